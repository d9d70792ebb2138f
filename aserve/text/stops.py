"""Stop strings in streamed text: which comes first, and what may already be shown.

One Aho-Corasick automaton for all stop strings: O(1) amortised per character, and its depth is
exactly the length of the longest suffix that could still grow into a stop string.
"""

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """Cuts a stream of text at the first stop string, whatever the chunks.

    First means completed first: the text ends as soon as it contains any of `stops`, so none can
    win that needs more text. Of several completed by the same character the one listed first is
    the hit. `include` keeps the stop string in the text. Empty stop strings are ignored.
    """

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self.include = include
        self.hit: str | None = None
        self._held = ""
        self._node = 0
        self._build()

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that ended it if one did.

        After a hit every further call answers `("", hit)`.
        """
        if self.hit is not None:
            return "", self.hit
        if not self.stops:
            return text, None
        step, node = self._step, self._node
        for where, char in enumerate(text):
            node = step(node, char)
            if (which := self._ends[node]) >= 0:
                return self._cut(text[: where + 1], self.stops[which])
        self._node = node
        seen = self._held + text
        safe_len = len(seen) - self._depth[node]
        self._held = seen[safe_len:]
        return seen[:safe_len], None

    def flush(self) -> str:
        """The text held back, once no more can come."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _cut(self, text: str, stop: str) -> tuple[str, str]:
        seen, self._held, self.hit = self._held + text, "", stop
        return (seen if self.include else seen[: -len(stop)]), stop

    def _step(self, node: int, char: str) -> int:
        children, fails = self._children, self._fail
        while node and char not in children[node]:
            node = fails[node]
        return children[node].get(char, 0)

    def _build(self) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._ends = [-1]  # index of the first listed stop string that ends here
        self._fail = [0]
        for which, stop in enumerate(self.stops):
            self._insert(which, stop)
        queue = deque(self._children[0].values())
        while queue:  # breadth first, so the shorter suffix a node fails to is already done
            node = queue.popleft()
            for char, child in self._children[node].items():
                self._fail[child] = self._step(self._fail[node], char)
                ends = self._ends[child], self._ends[self._fail[child]]
                self._ends[child] = min((end for end in ends if end >= 0), default=-1)
                queue.append(child)

    def _insert(self, which: int, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._children[node].get(char)
            if child is None:
                child = len(self._depth)
                self._children[node][char] = child
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._ends.append(-1)
                self._fail.append(0)
            node = child
        if self._ends[node] < 0:
            self._ends[node] = which
