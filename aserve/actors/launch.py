"""Runs the engine's own tasks and turns the death of one into an error a supervisor acts on."""

import logging
from collections.abc import Awaitable, Callable, Iterator

import trio

from aserve.errors import Desync, PeerError, PlaneError, PlaneMismatch, PlaneTimeout, RankDied

logger = logging.getLogger("aserve.engine")

# The most telling first: when ranks break, those that waited for the culprit break with it.
TELLING = (PlaneMismatch, Desync, RankDied, PlaneTimeout, PeerError, PlaneError)


async def run_as_rank(rank: int, run: Callable[[], Awaitable[None]]) -> None:
    """Run `run()`; any error that is no plane's own leaves as RankDied, with its cause logged.

    One of the places where any exception is caught: whatever a rank dies of, the others and the
    clients must hear of it.
    """
    try:
        await run()
    except PlaneError:
        raise
    except Exception as error:
        logger.exception("rank %d died", rank)
        raise RankDied(rank, f"{type(error).__name__}: {error}") from error


async def cause_of_end(run: Callable[[], Awaitable[None]]) -> Exception | None:
    """Why `run()` ended: the error of it that tells most, None if it just returned.

    A cancellation goes on its way alone: what else came up while ending is no news.
    """
    try:
        await run()
    except BaseExceptionGroup as group:
        cancelled, rest = group.split(trio.Cancelled)
        if cancelled is not None:
            logger.debug("while ending", exc_info=rest)
            raise cancelled from None
        if not isinstance(group, ExceptionGroup):
            raise
        return most_telling(group)
    except Exception as error:
        return error
    return None


def most_telling(group: ExceptionGroup[Exception]) -> Exception:
    found = list(_leaves(group))
    for kind in TELLING:
        for error in found:
            if isinstance(error, kind):
                return error
    return found[0]


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
