"""Planted faults: each must be caught by an assertion, a Desync or a wrong text."""

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from aserve.core import compose, replica, tree
from aserve.core.admission import NewTokenRatio
from aserve.core.group import Group
from aserve.core.lane import Lane
from aserve.core.merge import Flight, Flights
from aserve.core.message import Rows, StepPlan, StepReport
from aserve.core.outbox import Outbox
from aserve.core.pages import PagePool
from aserve.core.planner import Planner
from aserve.core.radix import Node, RadixTree
from aserve.core.sequence import Sequence
from aserve.errors import Desync
from tests.core.deployment import Deployment
from tests.core.test_simulation import check, run

CAUGHT = (AssertionError, Desync, KeyError, IndexError)


def load(fault: Callable[[StepPlan], StepPlan] | None = None) -> Deployment:
    deployment = Deployment(page_size=4, pages_total=24)
    if fault is not None:
        deployment.fault = fault
    for seq in range(6):
        tokens = [(seq // 2 * 7 + at) % 40 for at in range(9)]
        deployment.ask(seq, tokens, max_tokens=12, seed=seq)
    deployment.pump()
    deployment.check_texts()
    return deployment


def test_without_a_fault_the_load_runs() -> None:
    load().check_idle()


def on_rows(step: int, change: Callable[[Rows], Rows]) -> Callable[[StepPlan], StepPlan]:
    """A change to the first rows of a step, on the way to the rank."""

    def fault(plan: StepPlan) -> StepPlan:
        if plan.step != step:
            return plan
        batch = plan.batches[0]
        rows = (change(batch.rows[0]), *batch.rows[1:])
        changed = msgspec.structs.replace(batch, rows=rows)
        return msgspec.structs.replace(plan, batches=(changed, *plan.batches[1:]))

    return fault


def other_page(rows: Rows) -> Rows:
    return msgspec.structs.replace(rows, pages=tuple((page + 1) % 24 for page in rows.pages))


@pytest.mark.parametrize(
    "fault",
    [
        on_rows(0, other_page),
        on_rows(1, lambda rows: msgspec.structs.replace(rows, start=rows.start + 1)),
        on_rows(1, lambda rows: msgspec.structs.replace(rows, tokens=(39,))),
        on_rows(1, lambda rows: msgspec.structs.replace(rows, sample=not rows.sample)),
        lambda plan: msgspec.structs.replace(plan, drops=()),
        lambda plan: msgspec.structs.replace(plan, commits=plan.commits[1:]),
        lambda plan: msgspec.structs.replace(plan, commits=plan.commits[:1] * 2),
        lambda plan: msgspec.structs.replace(plan, step=max(0, plan.step - 1)),
    ],
    ids=["pages", "start", "tokens", "sample", "drops", "commits", "commit twice", "step"],
)
def test_a_plan_spoilt_on_its_way_is_caught(fault: Callable[[StepPlan], StepPlan]) -> None:
    with pytest.raises(CAUGHT):
        load(fault)


def test_a_page_table_spoilt_on_a_rank_changes_the_text() -> None:
    deployment = Deployment(page_size=4, pages_total=24)
    deployment.ask(0, list(range(9)), max_tokens=12)
    deployment.ask(1, list(range(20, 29)), max_tokens=12)
    deployment.step()
    states = deployment.replica.sequences
    states[0].pages[0] = states[1].pages[0]
    deployment.pump()
    with pytest.raises(AssertionError):
        deployment.check_texts()


def test_kv_spoilt_on_a_rank_changes_the_text() -> None:
    deployment = Deployment(page_size=4, pages_total=24)
    deployment.ask(0, list(range(9)), max_tokens=12)
    deployment.step()
    deployment.kv[0][deployment.replica.sequences[0].pages[1] * 4] += 1
    deployment.pump()
    with pytest.raises(AssertionError):
        deployment.check_texts()


def match_without_salt(
    tree: RadixTree, salt: str, tokens: list[int], len_max: int, known: Node | None
) -> Node | None:
    for other in tree._roots:
        node = RIGHT["match"](tree, other, tokens, len_max)
        if node is not None and node.depth:
            return node
    return RIGHT["match"](tree, salt, tokens, len_max)


def match_too_much(
    tree: RadixTree, salt: str, tokens: list[int], len_max: int, known: Node | None
) -> Node | None:
    node = RIGHT["match"](tree, salt, tokens, len_max)
    return next(iter(node.children.values()), node) if node is not None else None


def evict_the_locked(tree: RadixTree, n_pages: int) -> None:
    root = next(iter(tree._roots.values()), None)
    if not n_pages or root is None or not root.children:
        RIGHT["evict"](tree, n_pages)
        return
    node = next(iter(root.children.values()))
    while node.children:
        node = next(iter(node.children.values()))
    tree._remove(node)


def leave_at_once(group: Group, sequence: Sequence, keep: bool) -> None:
    in_flight, sequence.in_flight = sequence.in_flight, 0
    RIGHT["leave"](group, sequence, keep)
    sequence.in_flight = in_flight


def store_what_is_not_computed(group: Group, sequence: Sequence, n_pages: int) -> None:
    RIGHT["store"](group, sequence, min(n_pages + 1, sequence.promised_pages))


def give_back_twice(pool: PagePool, page: int) -> None:
    pool._places[page] = 1
    RIGHT["give_back"](pool, page)


def drop_nothing(outbox: Outbox, sequence: Sequence, done: bool) -> None:
    if sequence.microbatch >= 0:
        outbox._commits[sequence.microbatch].pop(sequence.seq, None)


def drop_without_the_commit(outbox: Outbox, sequence: Sequence, done: bool) -> None:
    if sequence.microbatch >= 0:
        outbox._commits[sequence.microbatch].pop(sequence.seq, None)
    RIGHT["drop"](outbox, sequence, done)


def retract_the_token(composer: compose.Composer, sequence: Sequence) -> None:
    RIGHT["retract"](composer, sequence)
    sequence.tokens.pop()


def release_and_keep_a_page(group: Group, sequence: Sequence) -> None:
    sequence.pages = sequence.pages[: max(sequence.cached_pages, len(sequence.pages) - 1)]
    sequence.computed_len = min(sequence.computed_len, len(sequence.pages) * group.page_size)
    RIGHT["release"](group, sequence)


def forget_a_lock(tree: RadixTree, node: Node) -> None:
    if node.depth % 2:
        RIGHT["unlock"](tree, node)


def take_all_rows(composer: compose.Composer, lane: Lane, sequence: Sequence, start: int) -> int:
    return len(sequence.tokens) - start


def compact_nothing(path: tuple[int, ...], start: int) -> tuple[list[int], list[int]]:
    return [], []


def compact_backwards(path: tuple[int, ...], start: int) -> tuple[list[int], list[int]]:
    slots_from, slots_to = RIGHT["moved"](path, start)
    return slots_to, slots_from


def compact_too_late(path: tuple[int, ...], start: int) -> tuple[list[int], list[int]]:
    slots_from, slots_to = RIGHT["moved"](path, start)
    return slots_from[1:], slots_to[1:]


def step_over_early(flights: Flights, flight: Flight, report: StepReport) -> bool:
    group = flights.group_of(report.rank)
    return RIGHT["count"](flights, flight, report) or group == 0


def retract_at_once(composer: compose.Composer, lane: Lane) -> None:
    RIGHT["make_room"](composer, lane)
    for sequence in list(lane.group.yielding.values()):
        composer.retract(sequence)


def restart_and_keep_the_pages(sequence: Sequence) -> None:
    pages, kv_len, node = sequence.pages, sequence.kv_len, sequence.node
    RIGHT["restart"](sequence)
    sequence.pages, sequence.kv_len, sequence.node = pages, kv_len, node


RIGHT = {
    "evict": RadixTree.evict,
    "match": RadixTree.match,
    "store": Group.store,
    "leave": Group.leave,
    "give_back": PagePool.give_back,
    "drop": Outbox.drop,
    "retract": compose.Composer.retract,
    "release": Group.release,
    "unlock": RadixTree.unlock,
    "moved": tree.moved,
    "count": Flights.count,
    "make_room": compose.Composer._make_room,
    "restart": Sequence.restart,
    "reset": Group.reset,
    "empty": Outbox.reset,
}

FAULTS = [
    (RadixTree, "match", match_too_much),
    (RadixTree, "evict", evict_the_locked),
    (RadixTree, "unlock", forget_a_lock),
    (Group, "leave", leave_at_once),
    (Group, "store", store_what_is_not_computed),
    (Group, "release", release_and_keep_a_page),
    (PagePool, "take", lambda pool: pool._free[-1]),
    (PagePool, "give_back", lambda pool, page: None),
    (Outbox, "drop", drop_nothing),
    (Outbox, "drop", drop_without_the_commit),
    (compose.Composer, "retract", retract_the_token),
    (compose.Composer, "_chunk_len", take_all_rows),
    (NewTokenRatio, "fits", lambda ratio, group, sequence, hit_pages, reserved: True),
    (RadixTree, "_standing", lambda tree, known: known),
    (Sequence, "reusable_len", lambda sequence: len(sequence.tokens)),
    (Planner, "_settle", lambda planner, sequence, rows, result, drafting: None),
    (replica, "moved", compact_nothing),
    (replica, "moved", compact_backwards),
    (replica, "moved", compact_too_late),
    (compose, "cut", lambda draft, n_max, depth_max: draft),
    (Flights, "count", step_over_early),
    (compose.Composer, "_make_room", retract_at_once),
    (Sequence, "restart", restart_and_keep_the_pages),
    (Group, "reset", lambda group: None if hasattr(group, "pool") else RIGHT["reset"](group)),
    (Outbox, "reset", lambda outbox: None if hasattr(outbox, "_drops") else RIGHT["empty"](outbox)),
    (Planner, "_land", lambda planner, flight: None),
]


def run_many(n_runs: int) -> None:
    for seed in range(n_runs):
        check(run(Random(seed)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "wrong"), FAULTS, ids=[f"{i}-{name}" for i, (_, name, _) in enumerate(FAULTS)]
)
def test_a_fault_in_the_planner_is_caught_by_random_loads(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, wrong: object
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(CAUGHT):
        run_many(60)


def test_sharing_across_salts_is_caught_by_the_salt_scenario(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.core.test_planner import test_salts_never_share_a_page

    monkeypatch.setattr(RadixTree, "match", match_without_salt)
    with pytest.raises(AssertionError):
        test_salts_never_share_a_page()


def test_a_draft_spoilt_on_its_way_to_a_rank_is_a_desync() -> None:
    """It would leave the text alone and only lower acceptance, so no other law sees it."""

    def fault(plan: StepPlan) -> StepPlan:
        def spoil(rows: Rows) -> Rows:
            if len(rows.parents) < 2:
                return rows
            tokens = (*rows.tokens[:-1], (rows.tokens[-1] + 1) % 40)
            return msgspec.structs.replace(rows, tokens=tokens)

        batches = [
            msgspec.structs.replace(batch, rows=tuple(map(spoil, batch.rows)))
            for batch in plan.batches
        ]
        return msgspec.structs.replace(plan, batches=tuple(batches))

    deployment = Deployment(page_size=4, pages_total=24, draft_max=4)
    deployment.ask(1, list(range(9)), max_tokens=12, seed=1)
    deployment.fault = fault
    with pytest.raises(Desync, match="digest"):
        deployment.pump()
