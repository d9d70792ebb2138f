"""Lies told inside the planner and the leader; see `faulty`."""

from typing import Any

import msgspec

from aserve.actors.leader import Leader
from aserve.core import compose, planner
from aserve.core.gauges import Gauges
from aserve.core.group import Group
from aserve.core.merge import Flights
from aserve.core.outbox import Outbox
from aserve.core.pages import OWNED, PagePool
from aserve.core.radix import RadixTree
from aserve.core.sequence import Sequence
from aserve.errors import RankDied
from aserve.testing.swap import Swap


def page_given_twice(swap: Swap) -> None:
    def take(right: Any, pool: PagePool) -> int:
        page: int = right(pool)
        return pool._places.find(OWNED) if pool.n_owned % 4 == 3 else page

    swap.wrap(PagePool, "take", take)


def page_kept(swap: Swap) -> None:
    def release(right: Any, group: Group, sequence: Sequence) -> None:
        if len(sequence.pages) > max(1, sequence.cached_pages):
            sequence.pages.pop()
            sequence.computed_len = min(
                sequence.computed_len, len(sequence.pages) * group.page_size
            )
        right(group, sequence)

    swap.wrap(Group, "release", release)


def drop_forgotten(swap: Swap) -> None:
    def drop(right: Any, outbox: Outbox, sequence: Sequence, done: bool) -> None:
        right(outbox, sequence, done)
        outbox._drops.pop()
        del outbox._drop_numbers[-3:]

    swap.wrap(Outbox, "drop", drop)


def last_commit_forgotten(swap: Swap) -> None:
    def drop(right: Any, outbox: Outbox, sequence: Sequence, done: bool) -> None:
        n_before = len(outbox._last_commits)
        right(outbox, sequence, done)
        del outbox._last_commits[n_before:]

    swap.wrap(Outbox, "drop", drop)


def locked_evicted(swap: Swap) -> None:
    def evict(right: Any, tree: RadixTree, n_pages: int) -> None:
        for node in tree.audit()[::-1] if n_pages == 1 else ():
            if node.locks and not node.children:
                tree._remove(node)
                return
        right(tree, n_pages)

    swap.wrap(RadixTree, "evict", evict)


def hit_too_long(swap: Swap) -> None:
    def match(right: Any, tree: RadixTree, salt: str, tokens: Any, len_max: int, known: Any) -> Any:
        node = right(tree, salt, tokens, len_max, None)
        if node is None or (node.depth + 1) * tree._page_size > len_max:
            return node
        return next(iter(node.children.values()), node)

    swap.wrap(RadixTree, "match", match)


def hit_without_salt(swap: Swap) -> None:
    def match(right: Any, tree: RadixTree, salt: str, tokens: Any, len_max: int, known: Any) -> Any:
        found = [right(tree, other, tokens, len_max, None) for other in tree._roots]
        return max((node for node in found if node), key=lambda node: node.depth, default=None)

    swap.wrap(RadixTree, "match", match)


def stored_early(swap: Swap) -> None:
    def store(right: Any, group: Group, sequence: Sequence, n_pages: int) -> None:
        right(group, sequence, min(n_pages + 1, sequence.promised_pages))

    swap.wrap(Group, "store", store)


def left_at_once(swap: Swap) -> None:
    def leave(right: Any, group: Group, sequence: Sequence, keep: bool) -> None:
        n_in_flight, sequence.in_flight = sequence.in_flight, 0
        right(group, sequence, keep)
        sequence.in_flight = n_in_flight

    swap.wrap(Group, "leave", leave)


def surplus_freed(swap: Swap) -> None:
    def settle(right: Any, sequence: Sequence, *args: Any) -> Any:
        found = right(sequence, *args)
        owner = groups[sequence.group]
        while len(sequence.pages) > owner.pages_for(len(sequence.tokens)):
            owner.pool.give_back(sequence.pages.pop())
        return found

    def place(right: Any, group: Group, sequence: Sequence) -> int:
        groups[group.index] = group
        n_pages: int = right(group, sequence)
        return n_pages

    groups: dict[int, Group] = {}
    swap.wrap(Group, "place", place)
    swap.wrap(planner, "settle", settle)


def path_off(swap: Swap) -> None:
    def settle(right: Any, sequence: Sequence, rows: Any, result: Any) -> Any:
        commit, reason = right(sequence, rows, result)
        if commit is not None and rows.parents:
            last = len(rows.tokens) - 1
            path = (0, *(min(row + 1, last) for row in commit.path[1:]))
            commit = msgspec.structs.replace(commit, path=path)
        return commit, reason

    swap.wrap(planner, "settle", settle)


def merged_early(swap: Swap) -> None:
    def count(right: Any, flights: Flights, flight: Any, report: Any) -> bool:
        flight.missing = {report.rank: None}
        over: bool = right(flights, flight, report)
        return over

    swap.wrap(Flights, "count", count)


def stops_ignored(swap: Swap) -> None:
    def ended_by(right: Any, sequence: Sequence, token: int) -> Any:
        reason = right(sequence, token)
        is_long = sequence.n_generated >= sequence.max_tokens
        return reason if reason != "stop" or is_long else None

    swap.wrap(Sequence, "ended_by", ended_by)


def rows_unbounded(swap: Swap) -> None:
    def compose_wide(right: Any, composer: compose.Composer, microbatch: int) -> Any:
        composer.rows_max *= 2
        try:
            return right(composer, microbatch)
        finally:
            composer.rows_max //= 2

    swap.wrap(compose.Composer, "compose", compose_wide)


def retraction_loses_token(swap: Swap) -> None:
    def retract(right: Any, composer: compose.Composer, sequence: Sequence) -> None:
        right(composer, sequence)
        if sequence.n_generated:
            sequence.tokens.pop()

    swap.wrap(compose.Composer, "retract", retract)


def restart_loses_token(swap: Swap) -> None:
    def restart(right: Any, sequence: Sequence) -> None:
        right(sequence)
        if sequence.n_generated:
            sequence.tokens.pop()

    swap.wrap(Sequence, "restart", restart)


def restart_repeats_logprobs(swap: Swap) -> None:
    def restart(right: Any, sequence: Sequence) -> None:
        right(sequence)
        sequence.prompt_logprobs_len = 0

    swap.wrap(Sequence, "restart", restart)


def outputs_lost(swap: Swap) -> None:
    def deliver(right: Any, leader: Leader) -> bool:
        if leader.planner.statistics().steps % 5 == 0:
            leader._outputs = tuple(output for output in leader._outputs if output.finish_reason)
        delivered: bool = right(leader)
        return delivered

    swap.wrap(Leader, "_deliver", deliver)


def wake_lost(swap: Swap) -> None:
    swap.put(Leader, "wake", lambda leader: None)


def restart_imagined(swap: Swap) -> None:
    def reported(right: Any, leader: Leader, report: Any) -> None:
        right(leader, report)
        if report.step == 5 and not leader.meters.finished["stop"]:
            raise RankDied(0, "so it seems")

    swap.wrap(Leader, "_report", reported)


def pairs_forgotten(swap: Swap) -> None:
    """Cached pages are found by their own tokens, whatever the drafter's KV was made of."""

    def init(right: Any, group: Group, index: int, cache: Any, prefix_cache: bool, *_: Any) -> None:
        right(group, index, cache, prefix_cache, False)

    swap.wrap(Group, "__init__", init)


def drafting_told_wrong(swap: Swap) -> None:
    """Ranks hear of smaller drafts than the planner asked for."""

    def emit(right: Any, brain: planner.Planner, composition: Any) -> Any:
        plan = right(brain, composition)
        if plan.drafting.tokens < 2 or plan.step % 3:
            return plan
        return msgspec.structs.replace(
            plan, drafting=msgspec.structs.replace(plan.drafting, tokens=1)
        )

    swap.wrap(planner.Planner, "_emit", emit)


def planned_behind_drafts(swap: Swap) -> None:
    """A step that drafts takes one place of its microbatch, like any other."""

    def departs(right: Any, gauges: Gauges, flight: Any) -> None:
        right(gauges, flight)
        flight.places = 1

    swap.wrap(Gauges, "departs", departs)
