"""How large drafts are made, against machines and texts whose truth is known here."""

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from aserve.core.draft_sizer import DraftSizer, Step, sizes_within
from aserve.core.message import NO_DRAFTING, Drafting
from aserve.core.pace import Pace, bucket_of, rows_of
from aserve.core.speculation import Speculation, bounded

TREE = Drafting(6, 4, 31)
CHAIN = Drafting(10, 1, 10)


class Machine:
    """Sequences that draw step after step; `chance` is that of each level of a chain to be right,
    a tree's level has several tries. Times are in microseconds.
    """

    def __init__(
        self,
        most: Drafting,
        *,
        n_draws: int = 1,
        chance: float = 0.6,
        step_micros: Callable[[int], float] = lambda n_rows: 15000 + 250 * n_rows,
        level_micros: float = 1200,
        wait_micros: float = 800,
        noise: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.random = Random(seed)
        self.n_draws = n_draws
        self.chance = chance
        self.found = 1.0  # the part of drafts that are there at all
        self.step_micros = step_micros
        self.level_micros = level_micros
        self.wait_micros = wait_micros
        self.noise = noise
        self.sizer = DraftSizer(Speculation(most, adaptive=True))
        self.asked = NO_DRAFTING
        self.micros = 0.0
        self.tokens = 0
        self.n_steps: dict[int, int] = {}  # by tokens asked for

    def accepted(self, size: Drafting) -> int:
        # As many tries a level as a tree of this size has, on average.
        tries = size.tokens / size.depth
        chance = 1 - (1 - self.chance) ** (tries**0.5)
        n = 0
        while n < size.depth and self.random.random() < chance:
            n += 1
        return n

    def run(self, n_steps: int, fixed: Drafting | None = None) -> float:
        """Tokens a second of these steps."""
        micros, tokens = self.micros, self.tokens
        for _ in range(n_steps):
            self.step(fixed)
        return 1e6 * (self.tokens - tokens) / (self.micros - micros)

    def step(self, fixed: Drafting | None) -> None:
        before, n_drafted = self.asked, 0
        for _ in range(self.n_draws):
            n_accepted = n_own = 0
            if before.tokens and self.random.random() < self.found:
                n_own, n_accepted = before.tokens, self.accepted(before)
            if before.tokens:
                self.sizer.verified(before, n_own, n_accepted)
            self.tokens += 1 + n_accepted
            n_drafted += n_own
        chosen = self.sizer.choose(self.n_draws, self.n_draws, 512)
        self.asked = chosen if fixed is None else fixed
        self.n_steps[self.asked.tokens] = self.n_steps.get(self.asked.tokens, 0) + 1
        n_rows = self.n_draws + n_drafted
        noisy = 1 + self.noise * self.random.random()
        step_micros = self.step_micros(n_rows) * noisy
        draft_micros = self.level_micros * self.asked.depth
        waited = self.wait_micros if before.tokens else 0.0
        self.micros += step_micros + draft_micros + waited
        self.sizer.stepped(
            Step(
                self.asked,
                self.n_draws,
                n_rows,
                int(step_micros),
                int(draft_micros),
                int(waited),
                before.tokens > 0,
            )
        )


def speeds(n_steps: int, **machine: object) -> tuple[float, float, float]:
    """Of one who chooses, of the best who does not, and of one who never drafts."""
    most = machine.pop("most", TREE)
    found = [
        Machine(most, **machine).run(n_steps, fixed)  # type: ignore[arg-type]
        for fixed in sizes_within(most)  # type: ignore[arg-type]
    ]
    return Machine(most, **machine).run(n_steps), max(found), found[0]  # type: ignore[arg-type]


PLAIN = {"level_micros": 1500, "wait_micros": 1000}


@pytest.mark.slow
@pytest.mark.parametrize("n_draws", [1, 8, 32])
@pytest.mark.parametrize("most", [TREE, CHAIN])
def test_where_nothing_is_accepted_next_to_nothing_is_lost(most: Drafting, n_draws: int) -> None:
    found, best, none = speeds(400, most=most, n_draws=n_draws, chance=0.0, **PLAIN)
    assert best == none
    assert found > 0.97 * none


def test_where_rows_are_dear_drafts_are_turned_down_however_good() -> None:
    dear = {"n_draws": 32, "chance": 0.6, "step_micros": lambda n_rows: 500 + 1000 * n_rows}
    none = Machine(TREE, **dear).run(120, NO_DRAFTING)
    assert Machine(TREE, **dear).run(120) > 0.98 * none


@pytest.mark.slow
@pytest.mark.parametrize("most", [TREE, CHAIN])
@pytest.mark.parametrize("chance", [0.45, 0.7])
def test_one_stream_is_about_as_fast_as_with_the_best_size(most: Drafting, chance: float) -> None:
    found, best, none = speeds(500, most=most, chance=chance)
    assert found > 0.9 * best
    assert best > 1.3 * none


@pytest.mark.slow
def test_more_streams_get_smaller_drafts() -> None:
    sizes = []
    for n_draws in (1, 8, 32):
        machine = Machine(TREE, n_draws=n_draws)
        machine.run(400)
        sizes.append(max(machine.n_steps, key=machine.n_steps.__getitem__))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 5 * sizes[2]


def test_a_text_that_begins_to_repeat_itself_is_noticed_and_so_is_its_end() -> None:
    machine = Machine(CHAIN, chance=0.9, level_micros=10)
    machine.found = 0.0
    plain = machine.run(300, NO_DRAFTING)
    assert machine.run(300) > 0.95 * plain
    machine.found = 0.95
    machine.run(60)
    assert machine.run(60) > 2 * plain
    machine.found = 0.0
    machine.run(60)
    assert machine.run(60) > 0.95 * plain


def test_the_same_reports_give_the_same_drafts() -> None:
    def chosen(seed: int) -> list[Drafting]:
        machine = Machine(TREE, seed=seed)
        sizes = []
        for _ in range(200):
            machine.step(None)
            sizes.append(machine.asked)
        return sizes

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)


def test_a_step_that_something_else_delayed_changes_little() -> None:
    pace = Pace(sizes_within(TREE))
    for _ in range(8):
        pace.add_step(4, 15000)
        pace.add_draft(3, 1, 1000)
        pace.add_wait(True, 0)
    pace.add_step(4, 10**7)
    pace.add_draft(3, 1, 10**7)
    assert 15000 < pace.step(4) < 17000
    assert 1000 < pace.draft(3, 1) < 1150
    pace.add_wait(True, 900)  # nothing was expected: that is not to last
    assert pace.wait(True) == 100


def test_drafts_that_would_not_fit_the_step_are_not_asked_for() -> None:
    machine = Machine(TREE, chance=0.9, level_micros=0, step_micros=lambda n_rows: 10000)
    machine.run(100)
    sizer = machine.sizer

    def largest(n_cell: int, rows_max: int) -> int:
        return max([sizer.choose(n_cell, n_cell, rows_max).tokens for _ in range(40)])

    assert largest(1, 512) > 7
    assert largest(8, 33) == 3
    assert largest(8, 15) == 0
    assert sizer.choose(0, 0, rows_max=512) == NO_DRAFTING


def test_without_a_choice_the_largest_is_always_asked_for() -> None:
    sizer = DraftSizer(Speculation(TREE, adaptive=False))
    sizer.verified(TREE, 31, 0)
    sizer.stepped(Step(TREE, 1, 32, 10**6, 10**6, None, False))
    assert sizer.choose(3, 3, 8) == TREE
    assert sizer.choose(0, 0, 8) == NO_DRAFTING
    assert sizer.words() == "always 31 tokens"


@pytest.mark.parametrize("most", [TREE, CHAIN, Drafting(2, 2, 4), Drafting(1, 1, 1)])
def test_sizes_grow_from_nothing_to_the_most(most: Drafting) -> None:
    sizes = sizes_within(most)
    assert sizes[0] == NO_DRAFTING
    assert sizes[-1] == most
    assert all(a.tokens < b.tokens and a.depth <= b.depth for a, b in pairwise(sizes))
    assert all(bounded(size) == size for size in sizes[1:])


def test_buckets_of_rows_are_half_octaves() -> None:
    ends = [rows_of(bucket_of(n)) for n in range(1, 200)]
    assert sorted(set(ends))[:9] == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert all(n <= end < 1.5 * n for n, end in enumerate(ends, 1))


def test_times_of_rows_never_measured_follow_those_that_were() -> None:
    pace = Pace(sizes_within(CHAIN))
    assert pace.step(32) / pace.step(1) == 56 / 25  # a guess
    pace.add_step(1, 10100)
    pace.add_step(16, 11600)
    assert pace.step(8) == pytest.approx(10800)
    assert pace.step(32) == pytest.approx(13200)
