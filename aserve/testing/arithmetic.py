"""The legible model as arithmetic: integers where a language model has vectors, and no noise.

    hidden    one integer below 2**40 a row: every sum of a few of them is exact in float64
    layer     each head caches its own function of the hidden integer; a row reads what its
              sequence cached at its own and earlier positions, weighted by position; then units
              (or experts) of which a row sums many
    draw      the allowed token with the highest score: a hash of (hidden, key, token)

Nothing here knows of pages, ranks or trees; `oracle` and `stage` are the two who use it.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aserve.core.message import Sampling, TokenLogprob
from aserve.core.noise import GOLDEN64, U64, draw_key, mix64

Ints = npt.NDArray[np.uint64]

HIDDEN_BITS = 40
MASK = np.uint64((1 << HIDDEN_BITS) - 1)
HEADS = 12  # split by any attn_tp of 1, 2, 3, 4, 6
UNITS = 24  # of an MLP, or of one expert; split by any tp of 1, 2, 3, 4, 6, 8, 12
EXPERTS = 24
PER_ROW = 2  # experts that a row chooses
RULE_KIND = "legible"  # of a `Grammar` whose text is "KEY" or "KEY!", which breaks now and then
CONTEXT_LEN = 4096
_A, _B = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


class Shape(msgspec.Struct, frozen=True):
    """What a legible model is: all ranks and the oracle have the same."""

    layers: int = 3
    vocab: int = 32
    experts: bool = False


def mix(z: Ints) -> Ints:
    """`core.noise.mix64` of each element, in a new array."""
    z = (z ^ (z >> _S30)) * _A
    z = (z ^ (z >> _S27)) * _B
    return z ^ (z >> _S31)


def small(z: Ints) -> Ints:
    """Hashed down to a hidden integer."""
    return mix(z) & MASK


def salts(what: int, layer: int, count: int) -> Ints:
    """One number for each of `count` parts of a layer; other kinds and layers have others."""
    start = mix64((what + 1) * GOLDEN64 + layer)
    return mix(np.arange(count, dtype=np.uint64) + np.uint64(start))


def _table(what: int) -> tuple[Ints, ...]:
    return tuple(salts(what, layer, 24) for layer in range(64))


KEY_SALTS, READ_SALTS, UNIT_SALTS, EXPERT_SALTS, CHOICE_SALTS = (_table(what) for what in range(5))
# How much an entry at each position counts: odd, so that none is lost.
WEIGHTS: Ints = mix(np.arange(CONTEXT_LEN, dtype=np.uint64)) | np.uint64(1)


def embed(tokens: Ints, positions: Ints) -> Ints:
    return small(tokens * np.uint64(GOLDEN64) + positions)


def cached(layer: int, hidden_T: Ints, heads: slice) -> Ints:
    """[T] -> [heads, T]: what each head caches of each row."""
    return small(hidden_T[None, :] ^ KEY_SALTS[layer][heads, None])


def read(layer: int, sums_HT: Ints, heads: slice) -> Ints:
    """What each head says of the weighted sum of all that a row sees."""
    return small(sums_HT ^ READ_SALTS[layer][heads, None])


def units(layer: int, hidden_T: Ints, part: slice) -> Ints:
    """[T]: the sum over a part of an MLP's units."""
    return small(hidden_T[None, :] ^ UNIT_SALTS[layer][part, None]).sum(0, dtype=np.uint64)


def chosen_experts(layer: int, hidden_T: Ints) -> Ints:
    """[PER_ROW, T]: two different experts."""
    hashed = mix(hidden_T ^ CHOICE_SALTS[layer][0])
    first = hashed % np.uint64(EXPERTS)
    step = (hashed >> np.uint64(32)) % np.uint64(EXPERTS - 1) + np.uint64(1)
    return np.stack([first, (first + step) % np.uint64(EXPERTS)])


def expert(layer: int, hidden_T: Ints, experts_T: Ints, part: slice) -> Ints:
    """[T]: the sum over a part of the units of the expert that stands beside each row."""
    mixed = hidden_T ^ EXPERT_SALTS[layer][experts_T.astype(np.int64)]
    return small(mixed[None, :] ^ UNIT_SALTS[layer][part, None]).sum(0, dtype=np.uint64)


def add(hidden_T: Ints, sums_T: Ints) -> Ints:
    """The residual: whole again below 2**40, and no longer linear in what was added."""
    return small(hidden_T + (sums_T << np.uint64(1)))


def scores(hidden_R: Ints, key_R: Ints, tokens: slice) -> Ints:
    """[R, tokens]: how much each is wanted after each row, below 2**40 and rarely equal."""
    ids = np.arange(tokens.start, tokens.stop, dtype=np.uint64) * np.uint64(GOLDEN64)
    return small(ids + mix(hidden_R ^ key_R)[:, None])


def score_key(sampling: Sampling, position: int) -> int:
    """Noise by (seed, position of the token drawn); none at temperature 0."""
    return 0 if sampling.temperature == 0 else draw_key(sampling.seed, position)


def logprob(score: int) -> float:
    """A number in place of a log-probability: of this score and no other."""
    return -float(int(score) & 0xFFFF_FFFF)


def broken(sampling: Sampling, generated: Sequence[int]) -> bool:
    """Whether the rule cannot go on after `generated`, as a grammar may not."""
    rule = sampling.grammar
    if rule is None or not rule.text.endswith("!") or not generated:
        return False
    return mix64(int(rule.text[:-1]) + GOLDEN64 * len(generated) + generated[-1]) % 13 == 0


def allowed(sampling: Sampling, generated: Sequence[int], vocab: int) -> npt.NDArray[np.bool_]:
    """[vocab]: which tokens may follow; the rule's set depends on the token before."""
    mask = np.ones(vocab, dtype=np.bool_)
    if sampling.grammar is not None:
        last = generated[-1] + 1 if generated else 0
        key = mix64(int(sampling.grammar.text.rstrip("!")) + GOLDEN64 * last)
        mask = mix(np.arange(vocab, dtype=np.uint64) + np.uint64(key)) % np.uint64(3) == 0
        mask[key % vocab] = True  # never empty
    elif len(generated) < sampling.min_tokens:
        mask[list(sampling.stop_ids)] = False
    return mask


def best(values_V: Ints, allowed_V: npt.NDArray[np.bool_]) -> int:
    """The most wanted of the allowed tokens."""
    return int(np.argmax(np.where(allowed_V, values_V, np.uint64(0))))


def told(token: int, values_V: Ints, n_top: int) -> TokenLogprob:
    """What stands in place of log-probabilities: `token` and the `n_top` most wanted."""
    best = np.argsort(values_V, kind="stable")[::-1][:n_top].tolist()
    top = tuple((one, logprob(int(values_V[one]))) for one in best)
    return TokenLogprob(token, logprob(int(values_V[token])), top)


def to_tensor(x: Ints) -> Tensor:
    """As float64, exact below 2**53; a vector becomes a column."""
    return torch.from_numpy(np.ascontiguousarray(x[:, None] if x.ndim == 1 else x, np.float64))


def to_ints(x: Tensor, *, flat: bool = True) -> Ints:
    """Back again; `flat` makes a column a vector."""
    ints = x.numpy().astype(np.uint64)
    return ints[:, 0] if flat else ints


def seed_numbers(seed: int, *numbers: int) -> int:
    """A hash of a few small numbers, for whoever needs to choose by them."""
    state = mix64(seed & U64)
    for number in numbers:
        state = mix64((state ^ number) + GOLDEN64)
    return state
