"""Many ranks' reports of one step become one event: who reported what, and whether it may be."""

from aserve.core.lane import Composition
from aserve.core.layout import Grid
from aserve.core.message import Result, Rows, StepPlan, StepReport
from aserve.core.sequence import Sequence
from aserve.core.status import RankProgress, StepInFlight
from aserve.errors import Desync


class Flight:
    """A plan in flight: what it moved, and the ranks whose reports are missing."""

    __slots__ = (
        "behind_open",
        "digest",
        "draft_micros",
        "is_open",
        "load",
        "micros",
        "missing",
        "n_chunks",
        "n_draws",
        "n_rows",
        "places",
        "plan",
        "sequences",
        "settling",
        "stage_micros",
        "waited_micros",
    )

    def __init__(self, plan: StepPlan, digest: int, composition: Composition) -> None:
        lanes = composition.lanes
        self.plan = plan
        self.digest = digest
        self.sequences = [lane.scheduled for lane in lanes]  # in the order of the plan's rows
        self.n_rows = composition.n_rows
        self.n_draws = composition.n_draws
        self.n_chunks = sum([lane.n_chunks for lane in lanes])
        self.is_open = composition.is_open
        self.behind_open: bool | None = None  # the step before it was; None: that says nothing
        self.load: tuple[float, float] | None = None  # of the first stage, for the chunk sizer
        self.places = 1  # that it takes of those of its microbatch
        self.missing: dict[int, None] = {}  # ranks, in order
        self.micros = 0  # of the slowest rank of the first stage
        self.stage_micros: list[int] = []  # of the slowest rank of each, without drafting
        self.draft_micros = 0  # of the slowest leader
        self.waited_micros = 0  # for its plan, by the first stage
        # By group, what its leader reported, until all ranks have.
        self.settling: list[list[tuple[Sequence, Rows, Result]]] = [[] for _ in lanes]

    def measure(self, stage: int, report: StepReport) -> None:
        own_micros = report.micros - report.draft_micros
        self.stage_micros[stage] = max(self.stage_micros[stage], own_micros)
        self.draft_micros = max(self.draft_micros, report.draft_micros)
        if stage == 0:
            self.micros = max(self.micros, report.micros)
            self.waited_micros = max(self.waited_micros, report.waited_micros)


class Flights:
    """All plans in flight. Ranks obey plans in order, so a rank reports the steps in order."""

    def __init__(self, grid: Grid) -> None:
        self._world = grid.world
        self._stage_size = grid.tp
        self._groups = {grid.leader(dp): dp for dp in range(grid.dp)}  # by the rank that leads
        self.reset()

    def reset(self) -> None:
        self._flights: dict[int, Flight] = {}  # by step, in order
        self._steps = [-1] * self._world  # last reported, by rank
        self._digests = [0] * self._world

    def __len__(self) -> int:
        return len(self._flights)

    def depart(self, flight: Flight) -> None:
        flight.missing = dict.fromkeys(range(self._world))
        flight.stage_micros = [0] * (self._world // self._stage_size)
        self._flights[flight.plan.step] = flight

    def group_of(self, rank: int) -> int | None:
        """The group whose results this rank reports; None: it leads none."""
        return self._groups.get(rank)

    def flight_of(self, report: StepReport) -> Flight:
        """The plan that a report is of. Raises Desync if it cannot be a report of that plan."""
        rank, step = report.rank, report.step
        if not 0 <= rank < self._world:
            raise Desync(rank, step, f"no such rank in a grid of {self._world}")
        last = self._steps[rank]
        if step <= last:
            raise Desync(rank, step, f"reported already, step {last} last: it is not in flight")
        flight = self._flights.get(step)
        if flight is None:
            raise Desync(rank, step, "reports a step that is not in flight")
        if step != last + 1:
            raise Desync(rank, step, f"reported out of order, after step {last}")
        if report.digest != flight.digest:
            message = f"digest {report.digest:08x}, the planner's is {flight.digest:08x}"
            raise Desync(rank, step, message)
        group = self._groups.get(rank)
        n_due = 0 if group is None else len(flight.sequences[group])
        if len(report.results) != n_due:
            message = f"{len(report.results)} results for {n_due} sequences"
            if group is None:
                message += ": it leads no group"
            raise Desync(rank, step, message)
        return flight

    def count(self, flight: Flight, report: StepReport) -> bool:
        """Note a report that may be; whether it was the last of its step."""
        rank = report.rank
        self._steps[rank] = report.step
        self._digests[rank] = report.digest
        del flight.missing[rank]
        flight.measure(rank // self._stage_size, report)
        if flight.missing:
            return False
        del self._flights[report.step]
        return True

    def progress(self) -> tuple[RankProgress, ...]:
        pairs = zip(self._steps, self._digests, strict=True)
        return tuple([RankProgress(rank, *pair) for rank, pair in enumerate(pairs)])

    def in_flight(self) -> tuple[StepInFlight, ...]:
        return tuple(
            [
                StepInFlight(step, flight.plan.microbatch, tuple(flight.missing))
                for step, flight in self._flights.items()
            ]
        )
