"""The prefix cache: a tree of whole pages, keyed by (cache salt, the pages' tokens); where KV
depends on the token that follows, by that too.

One node is one page, so a path is a page table. A lock on a node holds its path up to the root;
what no lock holds may be evicted, leaves first, least recently used first (by a logical clock).
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from aserve.core.pages import CACHED, PagePool


class Node:
    """`page` holds the KV of `key`, the tokens that follow the parent's; a root has only a salt.

    With bigrams the last token of `key` is the first of the next page.
    """

    __slots__ = ("children", "depth", "key", "locks", "page", "parent", "salt", "used")

    def __init__(
        self, parent: "Node | None", key: tuple[int, ...] = (), page: int = -1, salt: str = ""
    ) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.salt = salt
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        self.used = 0


class RadixTree:
    """The cached pages of one pool. With `bigrams` a page is found by those only who go on with the
    token with which its writer went on: KV of a drafter may be made of pairs of tokens.
    """

    def __init__(self, pool: PagePool, page_size: int, bigrams: bool = False) -> None:
        self._pool = pool
        self._page_size = page_size
        self._key_len = page_size + bigrams
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._serial = 0
        self._heap: list[tuple[int, int, Node]] = []  # evictable leaves, and stale entries
        self.n_pages = 0
        self.n_evictable = 0  # pages without a lock: all can be evicted, as locks go up the path

    def match(
        self, salt: str, tokens: Sequence[int], len_max: int, known: Node | None = None
    ) -> Node | None:
        """The deepest node whose path is a prefix of `tokens[:len_max]`; None: nothing cached.

        With bigrams all `tokens` count, of which there are more than `len_max`.
        `known` is an earlier answer for these tokens, with no smaller `len_max`: what still stands
        of it is not compared again.
        """
        node = self._standing(known) or self._roots.get(salt)
        if node is None:
            return None
        size = self._page_size
        for start in range(node.depth * size, len_max - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + self._key_len]))
            if child is None:
                break
            node = child
        return node

    def _standing(self, known: Node | None) -> Node | None:
        """The deepest node of a path that has not been evicted; None: not even its first page."""
        while known is not None and known.page < 0:
            known = known.parent  # a root too has no page, so the walk ends above it
        return known

    def root(self, salt: str) -> Node:
        """The root of a salt, to lock; it goes when unlocked and empty."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, salt=salt)
        return root

    def path_pages(self, node: Node) -> list[int]:
        """The pages from the root down to `node`."""
        pages: list[int] = []
        at = node
        while at.parent is not None:
            pages.append(at.page)
            at = at.parent
        pages.reverse()
        return pages

    def lock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            if at.locks == 0 and at.parent is not None:
                self.n_evictable -= 1
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        self._clock += 1
        at: Node | None = node
        while at is not None:
            assert at.locks > 0, at.depth
            at.locks -= 1
            if at.locks == 0:
                at.used = self._clock
                if at.parent is not None:
                    self.n_evictable += 1
                    if not at.children:
                        self._push(at)
                elif not at.children:
                    del self._roots[at.salt]
            at = at.parent

    def has(self, node: Node, tokens: Sequence[int]) -> bool:
        """Whether the page of the first `tokens` stands below `node`; if not, none after does."""
        return tuple(tokens[: self._key_len]) in node.children

    def extend(
        self, node: Node, tokens: Sequence[int], pages: Sequence[int]
    ) -> tuple[Node, list[int]]:
        """Store `pages` (owned, full) of `tokens` below `node`, whose path the caller has locked.

        With bigrams there is one token more, the one after the last page.
        The caller's lock is carried on to the node returned. Pages that the tree already had are
        returned: they stay the caller's own, to free, as their content is the tree's.
        """
        assert node.locks > 0
        overhang = self._key_len - self._page_size
        assert len(tokens) == len(pages) * self._page_size + overhang, (len(tokens), len(pages))
        duplicates: list[int] = []
        for index, page in enumerate(pages):
            start = index * self._page_size
            key = tuple(tokens[start : start + self._key_len])
            child = node.children.get(key)
            if child is None:
                self._pool.cache(page)
                child = node.children[key] = Node(node, key, page)
                self.n_pages += 1
            else:
                duplicates.append(page)
                if child.locks == 0:
                    self.n_evictable -= 1
            child.locks += 1
            node = child
        return node, duplicates

    def evict(self, n_pages: int) -> None:
        """Free the `n_pages` least recently used pages that no lock holds."""
        assert n_pages <= self.n_evictable, (n_pages, self.n_evictable)
        while n_pages > 0:
            used, _, node = heappop(self._heap)
            if not self._is_current(used, node):
                continue
            self._remove(node)
            n_pages -= 1

    def flush(self) -> None:
        """Free every page that no lock holds."""
        self.evict(self.n_evictable)

    def _is_current(self, used: int, node: Node) -> bool:
        return node.locks == 0 and not node.children and node.used == used and node.page >= 0

    def _push(self, node: Node) -> None:
        self._serial += 1
        heappush(self._heap, (node.used, self._serial, node))
        if len(self._heap) > 2 * self.n_pages + 64:  # stale entries must not pile up
            self._heap = [entry for entry in self._heap if self._is_current(entry[0], entry[2])]
            heapify(self._heap)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        self._pool.uncache(node.page)
        node.page = -1
        self.n_pages -= 1
        self.n_evictable -= 1
        if parent.children or parent.locks:
            return
        if parent.parent is not None:
            self._push(parent)
        else:
            del self._roots[parent.salt]

    def audit(self) -> list[Node]:
        """Walk the tree against its counts and the pool's ledger; returns every node."""
        nodes: list[Node] = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            below = sum(child.locks for child in node.children.values())
            assert node.locks >= below, node.depth
            for key, child in node.children.items():
                assert child.key == key
                assert child.parent is node
                assert self._pool.place(child.page) == CACHED, child.page
                nodes.append(child)
                stack.append(child)
        assert len(nodes) == self.n_pages == self._pool.n_cached
        assert sum(node.locks == 0 for node in nodes) == self.n_evictable
        assert len({node.page for node in nodes}) == len(nodes)
        return nodes
