"""How large the drafts of the next step should be: the most tokens for the time, as far as known.

It sees counts and microseconds of reports, nothing else, so the same reports give the same drafts.
"""

from typing import NamedTuple

from aserve.core.message import NO_DRAFTING, Drafting
from aserve.core.pace import Pace, Yield
from aserve.core.speculation import Speculation, bounded

# With their roots these fill rows by half octaves, as tiles do.
SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
# Of all that is made, what steps may cost that are taken to learn from them.
EXPLORED = 1 / 128
EXPLORED_OFF = 1 / 256  # where no drafts are best
SAVED_MAX = 2.0  # steps' worth that is saved up for that at most
PAUSE_STEPS = 4  # from one such step to the next at least


def sizes_within(most: Drafting) -> list[Drafting]:
    """No draft, small ones, and the largest. A smaller tree has fewer levels."""
    sizes = [NO_DRAFTING]
    for tokens in SIZES:
        if tokens < most.tokens:
            depth = tokens if most.topk == 1 else min(most.depth, (tokens + 1).bit_length())
            sizes.append(bounded(Drafting(depth, most.topk, tokens)))
    return [*dict.fromkeys(sizes), most] if most.tokens else sizes


class Step(NamedTuple):
    """What is known of a step without chunks when all ranks have reported it.

    `micros` of all stages together, without the `draft_micros` in which its drafts were made.
    `waited_micros` is how long the first stage waited for its plan; None: nobody wanted one.
    `behind_open`: it could not be planned before the step before it was reported.
    """

    drafting: Drafting
    n_draws: int
    n_rows: int
    micros: int
    draft_micros: int
    waited_micros: int | None
    behind_open: bool


class DraftSizer:
    """Chooses among `sizes`, the first of which is no draft at all; or has no choice.

    What drafts of a size yield is measured, or else guessed from the nearest size that was
    measured; so is what a step of so many rows takes, and the making of drafts.
    """

    def __init__(self, speculation: Speculation, stages: int = 1) -> None:
        most = speculation.most
        self.sizes = sizes_within(most) if speculation.adaptive else [most]
        self._at = {size: at for at, size in enumerate(self.sizes)}
        self._stages = stages
        self._yield = Yield(self.sizes)
        self._pace = Pace(self.sizes)
        self._savings = SAVED_MAX  # in what a step makes
        self._pause = PAUSE_STEPS
        self._n_explored = 0

    def choose(self, n_draws: int, n_cell: int, rows_max: int, n_busy: int = 1) -> Drafting:
        """For a step that draws for `n_draws` sequences, `n_cell` of them in the largest group,
        each of which may have `rows_max` rows; `n_busy` microbatches share the stages.
        """
        if not n_draws:
            return NO_DRAFTING
        if len(self.sizes) == 1:
            return self.sizes[0]
        n_fitting = sum([n_cell * (1 + size.tokens) <= rows_max for size in self.sizes])
        n_sharing = min(self._stages, max(1, n_busy))
        speeds = [self._speed(at, n_draws, n_sharing) for at in range(max(1, n_fitting))]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return self.sizes[self._explored(best, speeds)]

    def _speed(self, at: int, n_draws: int, n_sharing: int) -> float:
        """Tokens in the time of a step that verifies drafts of a size and makes the next."""
        pace, tokens = self._pace, self._yield.drafted(at)
        micros = pace.step(n_draws * (1 + tokens)) / n_sharing
        micros += pace.draft(at, n_draws) + pace.wait(at > 0)
        return n_draws * self._made(at) / micros

    def _made(self, at: int) -> float:
        return 1 + self._yield.accepted(at)

    def _explored(self, best: int, speeds: list[float]) -> int:
        """The best, or now and then another, when what that costs has been saved.

        Its neighbours are worth a look, and no draft at all; from there, the best of the others.
        """
        self._savings = min(self._savings + (EXPLORED if best else EXPLORED_OFF), SAVED_MAX)
        self._pause -= 1
        if self._pause > 0:
            return best
        others = [best + 1, best - 1, best + 2, best + 1, best - 1, 0]
        if best == 0:
            others = [max(range(1, len(speeds)), key=speeds.__getitem__)] if speeds[1:] else []
        losses = [
            # Tokens that the best makes in the same time, less those made, by those of its step.
            (at, (speeds[best] / speeds[at] - 1) * self._made(at) / self._made(best))
            for at in others
            if 0 <= at < len(speeds) and at != best
        ]
        payable = [(at, loss) for at, loss in losses if loss <= SAVED_MAX]
        if not payable:
            return best
        other, loss = payable[self._n_explored % len(payable)]
        if loss > self._savings:
            return best
        self._savings -= loss
        self._pause = PAUSE_STEPS
        self._n_explored += 1
        return other

    def verified(self, asked: Drafting, n_drafted: int, n_accepted: int) -> None:
        """What came of one sequence's draft, which nobody cut; it may have been none."""
        at = self._at.get(asked, 0)
        if at:
            self._yield.add(at, n_drafted, n_accepted)

    def stepped(self, step: Step) -> None:
        """What a step took."""
        at = self._at.get(step.drafting)
        if at is None or step.micros <= 0 or len(self.sizes) == 1:
            return
        self._pace.add_step(step.n_rows, step.micros)
        self._pace.add_draft(at, step.n_draws, step.draft_micros)
        if step.waited_micros is not None:
            self._pace.add_wait(step.behind_open, step.waited_micros)

    def words(self) -> str:
        """For a doctor."""
        most = self.sizes[-1]
        if not most.tokens:
            return "none"
        if len(self.sizes) == 1:
            return f"always {most.tokens} tokens"
        return f"up to {most.tokens} tokens; {self._yield.words()}"
