"""What a seed chooses: a layout, a pool, a load and its troubles, as one readable struct.

Swarm testing: every run leaves most features out, so that the others meet in more ways. A scenario
forces some choices and leaves the rest to chance.
"""

from random import Random
from typing import Any, Literal

import msgspec

from aserve.core.config import Layout, Schedule, Spec
from aserve.core.depth import Depth, depth_of
from aserve.core.message import Grammar, Sampling
from aserve.core.noise import seed_of_choice
from aserve.core.request import Request
from aserve.testing.arithmetic import RULE_KIND, Shape
from aserve.testing.oracle import say

CONTEXT_LEN = 1024
WORLD_MAX = 16  # ranks, unless a scenario forces more: larger worlds are slower, not richer
TroubleKind = Literal["delay", "pause", "cut", "crash", "hang", "slow"]


class Arrival(msgspec.Struct, frozen=True):
    """The choices of one client request. `stop` is a pair of tokens that ends one from above."""

    at_ms: float
    requests: tuple[Request, ...]
    stop: tuple[int, int] | None = None
    abort_ms: float | None = None


class Trouble(msgspec.Struct, frozen=True):
    """Something breaks at a time: a rank, or the link between `rank` and `peer` (-1: leader)."""

    at_ms: float
    kind: TroubleKind
    rank: int
    peer: int = -1
    for_ms: float = 0.0


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run is made of; the same setup gives the same run, bit for bit."""

    layout: Layout
    shape: Shape
    page_size: int
    pages_total: int
    schedule: Schedule
    spec: Spec
    arrivals: tuple[Arrival, ...]
    troubles: tuple[Trouble, ...] = ()
    asked_ms: tuple[float, ...] = ()  # when every rank is asked what it is at
    link_ms: float = 0.0  # the longest delay of a message
    jitter: float = 0.0  # how much longer a step may take, as a factor
    restarts_max: int = 20

    @property
    def depth(self) -> Depth:
        return depth_of(self.layout, self.schedule)


class Choices:
    """Draws from one `Random`; what a scenario forces is drawn no less, so the rest stays put."""

    def __init__(self, random: Random, forced: dict[str, Any]) -> None:
        self.random = random
        self._forced = forced
        self._known: set[str] = set()

    def of(self, name: str, drawn: Any) -> Any:
        self._known.add(name)
        return self._forced.get(name, drawn)

    def one_of(self, name: str, *values: Any) -> Any:
        return self.of(name, self.random.choice(values))

    def between(self, name: str, least: int, most: int) -> int:
        value: int = self.of(name, self.random.randint(least, most))
        return value

    def maybe(self, name: str, chance: float) -> bool:
        value: bool = self.of(name, self.random.random() < chance)
        return value

    def check(self) -> None:
        unknown = sorted(self._forced.keys() - self._known)
        assert not unknown, f"nobody asked for {unknown}"


def draw(random: Random, forced: dict[str, Any]) -> Setup:
    """A whole setup. Names in `forced` are those of `Choices` calls below."""
    choose = Choices(random, forced)
    layout = _layout(choose)
    shape = Shape(
        layers=sum(layout.layers) if layout.layers else layout.pp + random.randint(0, 2),
        vocab=choose.one_of("vocab", 17, 32),
        experts=choose.maybe("experts", 0.4) or layout.ep * layout.moe_dp > 1,
    )
    page_size = choose.one_of("page_size", 1, 2, 4, 4, 5, 8)
    overlap = choose.one_of("overlap", 0, 0, 1, 2)
    draft_max = choose.one_of("draft_max", 0, 0, 2, 5)
    schedule = Schedule(
        step_tokens=layout.dp
        * choose.of("group_rows", page_size * random.randint(1, 6) + random.randint(0, 5)),
        running_max=choose.one_of("running_max", 1, 4, 12, 24) * (layout.pp + overlap) * layout.dp,
        waiting_max=choose.one_of("waiting_max", 4, *(500,) * 7),
        prefix_cache=choose.maybe("prefix_cache", 0.75),
        overlap=overlap,
        dynamic_chunks=choose.maybe("dynamic_chunks", 0.1) and layout.pp > 1,
    )
    load = Load(choose, shape)
    arrivals = load.arrivals()
    len_max = max(
        len(request.tokens) + request.max_tokens
        for arrival in arrivals
        for request in arrival.requests
    )
    least = -(-(len_max + draft_max) // page_size) + 1
    spare = least * choose.one_of(
        # What a crowd is expected to need fits, and what it does need does not.
        "pages_spare",
        *((0.6, 1.2, 2, 3) if load.crowd else (0, 0.2, 1, 4)),
    )
    setup = Setup(
        layout=layout,
        shape=shape,
        page_size=page_size,
        pages_total=least + int(spare),
        schedule=schedule,
        spec=Spec(),
        arrivals=arrivals,
        troubles=_troubles(choose, layout),
        asked_ms=tuple(
            round(random.uniform(0, 20), 3) for _ in range(choose.between("asked", 0, 2))
        ),
        link_ms=choose.one_of("link_ms", 0.0, 0.0, 0.1, 2.0),
        jitter=choose.one_of("jitter", 0.0, 0.5, 5.0),
    )
    spec = _spec(choose, draft_max)  # last: what is drawn before stays what it was
    choose.check()
    return msgspec.structs.replace(setup, spec=spec)


def _layout(choose: Choices) -> Layout:
    random = choose.random
    pp = choose.one_of("pp", 1, 1, 2, 2, 3)
    dp = choose.one_of("dp", 1, 1, 1, 2, 2, 3)
    cp = choose.one_of("cp", 1, 1, 1, 2)
    attn_tp = choose.one_of("attn_tp", 1, 1, 2)
    if pp * dp * cp * attn_tp > WORLD_MAX:
        cp, attn_tp = choose.of("cp", 1), choose.of("attn_tp", 1)
    tp = dp * cp * attn_tp
    pairs = [(a, b) for a in range(1, tp + 1) for b in range(1, tp + 1) if tp % (a * b) == 0]
    moe_dp, ep = random.choice(pairs) if random.random() < 0.5 else (1, 1)
    moe_dp, ep = choose.of("moe_dp", moe_dp), choose.of("ep", ep)
    if tp % (moe_dp * ep):  # only one of them was forced
        moe_dp, ep = (moe_dp, 1) if "moe_dp" in choose._forced else (1, ep)
    shares = tuple(random.randint(1, 2) for _ in range(pp))
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        moe_dp=moe_dp,
        layers=choose.of("layers", shares if random.random() < 0.4 else None),
        cp_split=choose.one_of("cp_split", "interleave", "zigzag"),
        experts=choose.one_of("expert_rows", "gathered", "all_to_all"),
    )


def _spec(choose: Choices, draft_max: int) -> Spec:
    """Drafts of `draft_max` tokens: trees of any form, or of bounded depth and width."""
    depth, topk = choose.one_of("draft_form", *[(draft_max, draft_max)] * 2, (3, 2), (draft_max, 1))
    adaptive = choose.maybe("adaptive", 0.5)
    method = "eagle" if choose.maybe("bigrams", 0.5) else "draft"
    if not draft_max:
        return Spec()
    return Spec(method, depth=depth, topk=topk, tokens=draft_max, adaptive=adaptive)


def _troubles(choose: Choices, layout: Layout) -> tuple[Trouble, ...]:
    random = choose.random
    count = choose.one_of("troubles", 0, 0, 0, 1, 1, 2, 4)
    kinds = choose.of("trouble_kinds", ("delay", "pause", "cut", "crash", "hang", "slow"))
    world = layout.pp * layout.tp
    made = []
    for _ in range(count):
        rank = random.randrange(world)
        kind = random.choice(kinds)
        for_ms = random.choice((1.0, 5.0, 50.0, 500.0)) * random.random()
        # A rank's links: with the leader, and with its likes of the next stage.
        next_stage = rank + layout.tp if rank + layout.tp < world else -1
        made.append(
            Trouble(
                at_ms=round(random.uniform(0, 40), 3),
                kind=kind,
                rank=rank,
                peer=random.choice((-1, next_stage)),
                for_ms=round(min(for_ms, 50.0) if kind == "delay" else for_ms, 3),
            )
        )
    return tuple(sorted(made, key=lambda trouble: trouble.at_ms))


class Load:
    """Requests and when they come."""

    def __init__(self, choose: Choices, shape: Shape) -> None:
        self._choose = choose
        self._shape = shape
        self._random = random = choose.random
        vocab = shape.vocab
        self._prefixes = [[random.randrange(vocab) for _ in range(40)] for _ in range(2)]
        self._shared = choose.maybe("shared_prefixes", 0.7)
        self._follow = choose.maybe("follow_ups", 0.4)
        self._rules = choose.one_of("structured", 0.0, 0.0, 0.5)
        self._logprobs = choose.one_of("logprobs", 0.0, 0.0, 0.5)
        self._prompt_logprobs = choose.one_of("prompt_logprobs", 0.0, 0.0, 0.5)
        self._aborts = choose.one_of("aborts", 0.0, 0.1, 0.5)
        self._stops = choose.one_of("stops", 0.0, 0.3)
        self._priorities = choose.maybe("priorities", 0.3)
        self._seeded = choose.one_of("seeded", 0.0, 1.0, 0.7)
        # Many that come in short and grow long are what a pool runs out of pages for.
        self.crowd = choose.maybe("crowd", 0.2)
        self._long = choose.between("prompt_len_max", 4, 6 if self.crowd else 60)
        self._output = choose.between("max_tokens_max", *((30, 40) if self.crowd else (2, 24)))

    def arrivals(self) -> tuple[Arrival, ...]:
        choose, random = self._choose, self._random
        count = choose.between("requests", 2, 9)
        # The mean between arrivals; 0: all at once.
        pace = choose.one_of("pace_ms", 0.0, 0.5 * (not self.crowd), 5.0 * (not self.crowd))
        made: list[Arrival] = []
        now_ms, seq = 0.0, 0
        for _ in range(count):
            if pace and random.random() < 0.8:
                now_ms += random.expovariate(1 / pace)
            parent = random.choice(made) if made and self._follow else None
            arrival = self._arrival(round(now_ms, 3), seq, parent)
            seq += len(arrival.requests)
            made.append(arrival)
        return tuple(made)

    def _arrival(self, at_ms: float, seq: int, parent: Arrival | None) -> Arrival:
        random = self._random
        tokens = self._tokens(parent)
        sampling = self._sampling()
        request = Request(
            seq,
            tokens,
            self._output if self.crowd else random.randint(1, self._output),
            sampling,
            random.choice((0, -1, 1)) if self._priorities else 0,
            random.choice(("", "", "tenant")) if self._priorities else "",
        )
        n = self._choose.of("n", 3 if self.crowd else random.choice((1, 1, 1, 3)))
        requests = tuple(
            msgspec.structs.replace(
                request,
                seq=seq + index,
                sampling=msgspec.structs.replace(
                    sampling, seed=seed_of_choice(sampling.seed, index)
                ),
            )
            for index in range(n)
        )
        stop = None
        if random.random() < self._stops:  # two tokens that do follow each other, or may
            said = say(request, self._shape).tokens
            at = random.randrange(max(1, len(said) - 1))
            stop = said[at : at + 2] if len(said) > 1 else (0, 0)
        abort_ms = None
        if random.random() < self._aborts:
            abort_ms = round(at_ms + random.choice((0.0, 1.0, 10.0)) * random.random(), 3)
        return Arrival(at_ms, requests, stop, abort_ms)

    def _tokens(self, parent: Arrival | None) -> tuple[int, ...]:
        """A prompt: alone, behind a shared prefix, or going on from an earlier answer."""
        random, vocab = self._random, self._shape.vocab
        tail = [random.randrange(vocab) for _ in range(random.randint(1, self._long))]
        prefix_len = random.randint(1, 8 if self.crowd else 40)
        if parent is not None and not self.crowd and random.random() < 0.6:
            before = parent.requests[0]
            said = say(before, self._shape)
            tail = [*before.tokens, *said.tokens, *tail[:6]]
        elif self._shared and random.random() < 0.7:
            tail = [*random.choice(self._prefixes)[:prefix_len], *tail[:6]]
        return tuple(tail[: max(100, self._long)])

    def _sampling(self) -> Sampling:
        random, vocab = self._random, self._shape.vocab
        n_stops = 0 if self.crowd else random.choice((0, 1, 3))
        rule = None
        if random.random() < self._rules:
            rule = Grammar(RULE_KIND, f"{random.randrange(1000)}{random.choice(('', '', '!'))}")
        return Sampling(
            seed=random.randrange(1 << 40),
            temperature=1.0 if random.random() < self._seeded else 0.0,
            min_tokens=random.choice((0, 0, 5)),
            stop_ids=tuple(sorted(random.sample(range(vocab), n_stops))),
            logprobs=random.randint(0, 2) if random.random() < self._logprobs else -1,
            prompt_logprobs=random.randint(0, 2) if random.random() < self._prompt_logprobs else -1,
            grammar=rule,
        )
