"""Who waits, who may come in and who must go: the policy, over sequences and groups.

Admission looks ahead: what the running sequences will still need, discounted by how far requests
usually stay below their `max_tokens`. The discount is learnt from retractions alone.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from aserve.core.group import Group
from aserve.core.radix import Node
from aserve.core.request import Request
from aserve.core.sequence import Phase, Sequence
from aserve.errors import RequestError

FUTURE_LEN_MAX = 4096  # what a request may still generate counts up to here
RATIO_ONE = 1 << 20  # ratios are integers over this
RATIO_START = RATIO_ONE * 7 // 10
RATIO_LEAST = RATIO_START * 14 // 100
RATIO_DECAY = (RATIO_START - RATIO_LEAST) // 600  # a step with decode rows
RETRACT_STEPS = 20  # steps a sequence is expected to run on after a retraction


class NewTokenRatio:
    """The share of their remaining `max_tokens` that sequences are expected to use."""

    def __init__(self, draft_max: int = 0) -> None:
        self.value = RATIO_START
        self.draft_max = draft_max  # tokens of the largest draft

    def decode(self) -> None:
        self.value = max(RATIO_LEAST, self.value - RATIO_DECAY)

    def retract(self, running: Iterable[Sequence]) -> None:
        """Memory ran out: expect as much as the survivors have used, and some steps more."""
        n_generated = n_wanted = 0
        for sequence in running:
            n_generated += sequence.n_generated + RETRACT_STEPS
            n_wanted += sequence.max_tokens
        self.value = min(RATIO_ONE, RATIO_ONE * n_generated // (n_wanted + 1))
        self.value = max(self.value, RATIO_LEAST)

    def idle(self) -> None:
        self.value = RATIO_START

    def pages_future(self, group: Group, sequence: Sequence) -> int:
        """Pages it will hold when done, as far as can be expected."""
        remaining_len = min(sequence.max_tokens - sequence.n_generated, FUTURE_LEN_MAX)
        future_len = -(-remaining_len * self.value // RATIO_ONE)
        # The last token drawn never gets KV. The rows of one draft lie beyond the text; as surplus
        # pages stay with their sequence for the next draft, one draft is all that counts.
        return group.pages_for(len(sequence.tokens) + max(future_len - 1, 0) + self.draft_max)

    def pages_wanted(self, group: Group, sequence: Sequence) -> int:
        """Pages that a running sequence is expected to take yet."""
        return max(0, self.pages_future(group, sequence) - len(sequence.pages))

    def pages_reserved(self, group: Group) -> int:
        """Pages that all running sequences are expected to take yet."""
        return sum(self.pages_wanted(group, sequence) for sequence in group.running.values())

    def fits(self, group: Group, sequence: Sequence, hit_pages: int, reserved: int) -> bool:
        """Whether a waiting sequence may start in the group now; `reserved` as `pages_reserved`.

        What is true before its hit is locked may be false after, but not the other way round.
        """
        available = group.pages_available
        if group.pages_for(len(sequence.tokens)) - hit_pages > available:
            return False
        if not group.running:
            return True  # alone it may use the whole pool
        wanted = self.pages_future(group, sequence) - hit_pages
        return wanted + reserved <= available


class WaitingQueue:
    """Priority classes, lower first; in a class first come first served, the retracted first."""

    def __init__(self) -> None:
        self._classes: dict[int, OrderedDict[int, Sequence]] = {}
        self._priorities: list[int] = []
        self._n_waiting = 0

    def __len__(self) -> int:
        return self._n_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for priority in self._priorities:
            yield from self._classes[priority].values()

    def append(self, sequence: Sequence) -> None:
        self._insert(sequence)

    def put_first(self, sequence: Sequence) -> None:
        """A retracted sequence goes ahead of its class."""
        self._insert(sequence).move_to_end(sequence.seq, last=False)

    def remove(self, sequence: Sequence) -> None:
        line = self._classes[sequence.priority]
        del line[sequence.seq]
        self._n_waiting -= 1
        if not line:
            del self._classes[sequence.priority]
            self._priorities.remove(sequence.priority)

    def _insert(self, sequence: Sequence) -> OrderedDict[int, Sequence]:
        assert sequence.phase == Phase.WAITING, sequence.seq
        line = self._classes.get(sequence.priority)
        if line is None:
            line = self._classes[sequence.priority] = OrderedDict()
            self._priorities = sorted(self._classes)
        assert sequence.seq not in line, sequence.seq
        line[sequence.seq] = sequence
        self._n_waiting += 1
        return line


def victim(candidates: Iterable[Sequence]) -> Sequence:
    """Whom to retract: the lowest class, then the fewest outputs, then the longest input."""
    return max(candidates, key=lambda s: (s.priority, -s.n_generated, s.prompt_len, s.order))


def computed_by(group: Group, sequence: Sequence, hit: Node | None) -> Sequence | None:
    """Who in the group is just computing the page after `sequence`'s hit; None: nobody.

    Waiting for it is cheaper than computing the page twice, and cannot deadlock: who computes
    runs already and waits for no one; once it has left, by whatever way, nobody waits for it.
    """
    if hit is None:  # no cache, or nobody with this salt runs: it would hold the root
        return None
    start = hit.depth * group.page_size
    end = start + group.page_size
    if end > sequence.reusable_len():
        return None
    end += group.bigrams  # it may not be known yet how another goes on: nobody waits for that
    page = sequence.tokens[start:end]
    for other in group.promising.values():
        # A node is a prefix, so only the page after it is compared. Who stores below another node
        # of this path has been overtaken, and will not store this page: see `Group.store`.
        if (
            other.node is hit
            and other.promised_pages > hit.depth
            and other.tokens[start:end] == page
        ):
            return other
    return None


def still_waits(groups: Iterable[Group], sequence: Sequence) -> bool:
    """Whether what `computed_by` found is still on its way; else forget it and look again."""
    other = sequence.waits_for
    if other is None:
        return False
    for group in groups:
        if group.promising.get(other.seq) is other and other.cached_pages < sequence.wait_pages:
            return True
    sequence.waits_for = None
    return False


def refuse_misfit(request: Request, context_len: int, len_max: int) -> None:
    """Raises RequestError for what is malformed or can never fit; `len_max` tokens fit the pool."""
    prompt_len, max_tokens = len(request.tokens), request.max_tokens
    if not prompt_len:
        raise RequestError("the prompt is empty; it needs at least 1 token", param="prompt")
    if max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}, at least 1", param="max_tokens")
    if prompt_len + max_tokens > context_len:
        raise RequestError(
            f"the context is {context_len} tokens; {prompt_len} in the prompt and "
            f"{max_tokens} to generate are {prompt_len + max_tokens}",
            code="context_length_exceeded",
            param="max_tokens" if prompt_len < context_len else "prompt",
        )
    if prompt_len + max_tokens > len_max:
        raise RequestError(
            f"the KV cache holds {len_max - 1} tokens of one request; "
            f"{prompt_len} in the prompt and {max_tokens} to generate can never fit",
            status=413,
            code="kv_cache_exceeded",
        )
