"""What every hidden plane must do beside carrying: tell two ranks that do not mean the same, one
that does not come, and who waits when the plane is aborted. The second half of its conformance
suite; the first is `aserve.testing.channels`.
"""

import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager

import torch
import trio
import trio.testing
from torch import Tensor

from aserve.errors import PlaneError, PlaneMismatch, PlaneTimeout
from aserve.planes.hidden_bundle import Shapes
from aserve.testing.channels import DEADLINE_S
from aserve.testing.pairs import HiddenPair

OpenHidden = Callable[..., AbstractAsyncContextManager[HiddenPair]]  # limit_s=...
Check = Callable[[OpenHidden], Awaitable[None]]

AT_ONCE_S = 2.0

X = {"hidden": torch.ones(3, 4)}
SHAPES: Shapes = {"hidden": ((3, 4), torch.float32)}
# What is sent at step 7 and is not X at step 7, and how a rank calls it.
OTHERS: dict[str, tuple[int, Mapping[str, Tensor]]] = {
    "another step": (8, X),
    "an earlier step": (6, X),
    "more rows": (7, {"hidden": torch.ones(4, 4)}),
    "another shape of as many bytes": (7, {"hidden": torch.ones(4, 3)}),
    "another dtype of as many bytes": (7, {"hidden": torch.ones(3, 4, dtype=torch.int32)}),
    "another name": (7, {"aux.1": torch.ones(3, 4)}),
    "one tensor more": (7, {**X, "aux.1": torch.ones(3, 1)}),
}


async def check_meetings(open_hidden: OpenHidden) -> None:
    """Every check, each on a fresh pair. Raises AssertionError naming what does not hold."""
    for check in MEETINGS:
        try:
            with trio.fail_after(DEADLINE_S):
                await check(open_hidden)
        except Exception as error:
            raise AssertionError(f"{check.__name__}: {error!r}") from error


async def check_all_dtypes_and_odd_tensors(open_hidden: OpenHidden) -> None:
    """Any dtype, a view with gaps, no dimension at all, one of several without an element."""
    bundle = {
        "bfloat16": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "float64": torch.arange(6, dtype=torch.float64).view(2, 3),
        "bool": torch.tensor([True, False]),
        "gaps": torch.arange(24).view(4, 6)[:, ::2],
        "turned": torch.arange(6).view(2, 3).t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }
    shapes = {name: (tuple(one.shape), one.dtype) for name, one in reversed(bundle.items())}
    async with open_hidden() as pair:
        await pair.first.send(0, bundle)
        found = await pair.second.receive(0, shapes)
        assert found.keys() == bundle.keys(), list(found)
        for name, tensor in bundle.items():
            assert found[name].dtype == tensor.dtype, name
            assert found[name].shape == tensor.shape, name
            assert torch.equal(found[name], tensor), name


async def check_what_is_received_is_the_receivers(open_hidden: OpenHidden) -> None:
    """Writing to it changes nothing that is still on its way."""
    async with open_hidden() as pair:
        for step in range(3):
            await pair.first.send(step, {"hidden": torch.full((2, 2), step)})
        for step in range(3):
            found = await pair.second.receive(step, {"hidden": ((2, 2), torch.int64)})
            assert found["hidden"].eq(step).all()
            found["hidden"].fill_(-1)


async def check_nothing_travels_where_there_are_no_rows(open_hidden: OpenHidden) -> None:
    """An empty bundle is here before it is sent, and takes no room."""
    none, shapes = {"hidden": torch.empty(0, 4)}, {"hidden": ((0, 4), torch.float32)}
    async with open_hidden() as pair:
        assert (await pair.second.receive(0, shapes))["hidden"].shape == (0, 4)
        for step in range(3 * pair.in_flight_max):
            await pair.first.send(step, none)
        await pair.first.send(100, X)
        assert torch.equal((await pair.second.receive(100, SHAPES))["hidden"], X["hidden"])


async def check_mismatches_name_ranks_and_steps(open_hidden: OpenHidden) -> None:
    for what, (step, bundle) in OTHERS.items():
        async with open_hidden() as pair:
            await pair.first.send(step, bundle)
            for _ in range(2):  # once broken, it stays broken
                error = await _raised(PlaneMismatch, pair.second.receive(7, SHAPES), what)
                expected, sent = error.calls  # type: ignore[attr-defined]
                assert expected.startswith("rank 1 expects step 7"), (what, expected)
                assert sent.startswith(f"rank 0 sent step {step}"), (what, sent)


async def check_absent_sender_is_named(open_hidden: OpenHidden) -> None:
    async with open_hidden(limit_s=0.1) as pair:
        for _ in range(2):
            error = await _raised(PlaneTimeout, pair.second.receive(5, SHAPES))
            assert error.missing == (0,)  # type: ignore[attr-defined]
            assert "rank 0 sent nothing of step 5 to rank 1 within 0.1 s" in str(error)


async def check_absent_receiver_is_named(open_hidden: OpenHidden) -> None:
    async def send_all(pair: HiddenPair) -> None:
        for step in range(pair.in_flight_max + pair.slack + 2):
            await pair.send(step, 1 << 20)

    async with open_hidden(limit_s=0.1) as pair:
        error = await _raised(PlaneTimeout, send_all(pair))
        assert error.missing == (1,)  # type: ignore[attr-defined]


async def check_abort_frees_who_waits(open_hidden: OpenHidden) -> None:
    """From another thread, as a collective that broke would; and who comes later too."""
    async with open_hidden() as pair:
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + AT_ONCE_S
            waiting = _raised(PlaneError, pair.second.receive(0, SHAPES), "a rank is gone")
            nursery.start_soon(_awaited, waiting)
            await trio.testing.wait_all_tasks_blocked()
            thread = threading.Thread(target=pair.second.abort, args=("a rank is gone",))
            thread.start()
            thread.join()
        assert not nursery.cancel_scope.cancelled_caught, "who waits was not freed"
        await _raised(PlaneError, pair.second.receive(1, SHAPES), "a rank is gone")
        pair.first.abort("a rank is gone")
        await _raised(PlaneError, pair.first.send(0, X), "a rank is gone")


MEETINGS: tuple[Check, ...] = (
    check_all_dtypes_and_odd_tensors,
    check_what_is_received_is_the_receivers,
    check_nothing_travels_where_there_are_no_rows,
    check_mismatches_name_ranks_and_steps,
    check_absent_sender_is_named,
    check_absent_receiver_is_named,
    check_abort_frees_who_waits,
)


async def _awaited(one: Awaitable[object]) -> None:
    await one


async def _raised(kind: type[PlaneError], awaited: Awaitable[object], what: str = "") -> PlaneError:
    try:
        await awaited
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised: {what}")
