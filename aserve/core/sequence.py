"""A sequence: its tokens and its KV, and the table of phases it may go through."""

from enum import IntEnum

from aserve.core.message import NO_DRAFTING, Drafting, Sampling
from aserve.core.radix import Node
from aserve.core.request import FinishReason, Request
from aserve.core.tree import NO_DRAFT


class Phase(IntEnum):
    WAITING = 0  # in the queue, holding nothing
    RUNNING = 1  # holding pages; its rows are planned
    AWAITING_KV = 2  # its KV is on the way from a prefill instance
    LEAVING_KV = 3  # done here, its KV is on the way to a decode instance
    FINISHED = 4  # over for the client; pages stay while rows are in flight


# What is not listed is illegal.
PHASES: dict[Phase, tuple[Phase, ...]] = {
    Phase.WAITING: (Phase.RUNNING, Phase.AWAITING_KV, Phase.FINISHED),
    Phase.AWAITING_KV: (Phase.RUNNING, Phase.FINISHED),
    Phase.RUNNING: (Phase.WAITING, Phase.LEAVING_KV, Phase.FINISHED),
    Phase.LEAVING_KV: (Phase.FINISHED,),
    Phase.FINISHED: (),
}

NO_MICROBATCH = -1


class Sequence:
    """What the planner knows of one request's choice.

        [0, computed_len)       in the pool for certain: its report came. The part below
                                cached_pages * page_size is also in the prefix cache
        [computed_len, kv_len)  planned, not reported: ranks obey plans in order, so it is there
                                by the time that the rows of any later plan read it
        [kv_len, len(tokens))   known, not planned: the work, followed by the draft
        [len(tokens), kv_len)   planned before they are known: rows that lag behind their tokens

    The rows of a draft in flight lie at kv_len and after, in the order of the tree, until the
    accepted ones move to their places and count. Between steps a sequence that decodes has one
    token of work, the bonus token, root of the next tree.

    `pages` is the page table; its first `cached_pages` are the cache's, down to `node`, which is
    locked; the others are its own. `promised_pages` are to be in the cache after the prefill.
    `asked` is the drafting that `draft`, or the tree in flight, came of, unless it was cut.
    While it only prefills it belongs to its group; with its last chunk it joins a microbatch.
    """

    __slots__ = (
        "asked",
        "cached_len",
        "cached_pages",
        "chunk_base",
        "chunk_bases",
        "computed_len",
        "draft",
        "group",
        "hits",
        "in_flight",
        "kv_len",
        "max_tokens",
        "microbatch",
        "node",
        "order",
        "pages",
        "phase",
        "priority",
        "promised_pages",
        "prompt_len",
        "prompt_logprobs_len",
        "salt",
        "sampling",
        "seq",
        "spoiled",
        "tokens",
        "wait_pages",
        "waits_for",
    )

    def __init__(self, request: Request, order: int) -> None:
        self.seq = request.seq
        self.order = order
        self.tokens = list(request.tokens)
        self.prompt_len = len(request.tokens)
        self.max_tokens = request.max_tokens
        self.sampling: Sampling = request.sampling
        self.priority = request.priority
        self.salt = request.cache_salt
        self.phase = Phase.WAITING
        self.computed_len = 0
        self.kv_len = 0
        self.draft = NO_DRAFT
        self.asked: Drafting = NO_DRAFTING
        self.pages: list[int] = []
        self.node: Node | None = None
        self.hits: dict[int, Node] = {}  # by group, while waiting: what the cache had last time
        self.cached_pages = 0
        self.promised_pages = 0
        self.group = -1
        self.microbatch = NO_MICROBATCH
        self.in_flight = 0  # plans with rows of it that some rank has not reported
        self.spoiled = False  # its KV may be wrong: nothing more of it goes into the cache
        self.chunk_base = 0  # with dynamic chunks: the length of the first one
        self.chunk_bases: dict[int, int] = {}  # while waiting: what it would be after so many rows
        self.cached_len = -1  # prompt tokens found in the cache when first admitted
        self.prompt_logprobs_len = 0  # entries already given out; they start at token 1
        self.waits_for: Sequence | None = None  # is computing `wait_pages` pages that we need too
        self.wait_pages = 0

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def n_drawing(self) -> int:
        """Of one that joined a microbatch: its draws in flight. Each will add a token (a tree
        more than one), and the row after the last draw is the next to be planned.
        """
        return self.kv_len + 1 - len(self.tokens)

    def forget_kv(self) -> None:
        """It holds no page and no rows any more: all that is known of it are its tokens."""
        self.node = None
        self.pages = []
        self.cached_pages = self.promised_pages = 0
        self.computed_len = self.kv_len = 0
        self.draft = NO_DRAFT
        self.asked = NO_DRAFTING
        self.microbatch = NO_MICROBATCH

    def restart(self) -> None:
        """The ranks are new: nothing is in flight, or cached anywhere."""
        self.forget_kv()
        self.in_flight = 0
        self.hits.clear()
        self.chunk_bases.clear()
        self.waits_for = None

    def reusable_len(self) -> int:
        """How many leading tokens may come from the cache: the last one's logits are needed.

        With prompt logprobs every prompt row is needed whose entry has not been given out.
        """
        len_max = len(self.tokens) - 1
        if self.sampling.prompt_logprobs >= 0 and self.prompt_logprobs_len < self.prompt_len - 1:
            return min(len_max, self.prompt_logprobs_len)
        return len_max

    def enter(self, phase: Phase) -> None:
        assert phase in PHASES[self.phase], (self.seq, self.phase, phase)
        self.phase = phase

    def ended_by(self, token: int) -> FinishReason | None:
        """Whether `token`, just appended, ends the sequence."""
        n_generated = len(self.tokens) - self.prompt_len
        # A stop id is masked while it has fewer than min_tokens before it, unless a grammar allows
        # nothing else: the text is whole then, and its end must not be drawn again and again.
        early = n_generated <= self.sampling.min_tokens and self.sampling.grammar is None
        if token in self.sampling.stop_ids and not early:
            return "stop"
        return "length" if n_generated >= self.max_tokens else None
