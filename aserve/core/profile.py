"""Steps that only measure: a scratch sequence that nobody asked for, of as many rows as wanted."""

from aserve.core.compose import Composer
from aserve.core.lane import Composition, Lane
from aserve.core.message import Sampling
from aserve.core.noise import mix64
from aserve.core.request import Request
from aserve.core.sequence import Phase, Sequence


def compose_profile(
    composer: Composer, microbatch: int, n_rows: int, seq: int, vocab_size: int
) -> Composition:
    """A step of `n_rows` rows of the first group, without history and without a draw.

    The scratch sequence is over from the start: its pages come back, and the ranks drop it, when
    the step landed. Its tokens are scattered, as experts are not all asked alike.
    """
    lanes = [Lane(group, [], max(composer.rows_max, n_rows)) for group in composer.groups]
    tokens = tuple([mix64(at) % vocab_size for at in range(n_rows + 1)])
    sequence = Sequence(Request(seq, tokens, 1, Sampling()), order=-1)
    sequence.enter(Phase.RUNNING)
    sequence.enter(Phase.FINISHED)
    composer.groups[0].lend(sequence, n_rows)
    composition = Composition(microbatch, lanes)
    composition.admit(sequence, 0)
    lanes[0].add(sequence, n_rows, tuple(sequence.pages))
    return composition
