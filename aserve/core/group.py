"""One attention-DP group: its KV pool, its prefix cache, and the sequences that run on them."""

from aserve.core.pages import CacheSpec, PagePool
from aserve.core.radix import Node, RadixTree
from aserve.core.sequence import Phase, Sequence

IDLE_SHARE = 32  # one in so many pages may be idle however many there are


class Group:
    """Gives pages to sequences and takes them back; decides nothing about who runs."""

    def __init__(
        self, index: int, cache: CacheSpec, prefix_cache: bool, bigrams: bool = False
    ) -> None:
        self.index = index
        self.page_size = cache.page_size
        self.prefix_cache = prefix_cache
        self.bigrams = bigrams  # a cached page is good only with the token after it
        self.pages_total = cache.pages_total
        kept = cache.pages_kept
        self._pages_kept = self.pages_total if kept is None else kept
        self.reset()

    def reset(self) -> None:
        """Nobody runs and nothing is cached: the ranks' pools are new."""
        self.pool = PagePool(self.pages_total)
        self.tree = RadixTree(self.pool, self.page_size, self.bigrams)
        self.running: dict[int, Sequence] = {}  # in order of admission
        self.prefilling: dict[int, Sequence] = {}  # of these, those in no microbatch yet
        self.promising: dict[int, Sequence] = {}  # of these, those who will store pages
        self.yielding: dict[
            int, Sequence
        ] = {}  # of these, to be retracted when nothing is in flight
        self.leaving: dict[int, Sequence] = {}  # over, but their rows are in flight

    @property
    def pages_available(self) -> int:
        return self.pool.n_free + self.tree.n_evictable

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_size)

    def hit(self, sequence: Sequence) -> Node | None:
        """Down to where the cache has a waiting sequence; not locked. Cheap when asked again."""
        assert sequence.node is None, sequence.seq
        if not self.prefix_cache:
            return None
        hits, len_max = sequence.hits, sequence.reusable_len()
        node = self.tree.match(sequence.salt, sequence.tokens, len_max, hits.get(self.index))
        if node is not None:
            hits[self.index] = node
        return node

    def lock(self, sequence: Sequence, hit: Node | None) -> None:
        """Keep a hit just found from eviction; follow it with `place`, or with `unlock`."""
        sequence.node = self.tree.root(sequence.salt) if hit is None else hit
        self.tree.lock(sequence.node)

    def unlock(self, sequence: Sequence) -> None:
        assert sequence.node is not None, sequence.seq
        self.tree.unlock(sequence.node)
        sequence.node = None

    def place(self, sequence: Sequence) -> int:
        """Give a sequence, whose hit is locked, pages for all its known tokens; its hit's pages.

        All at once, so that a prefill never stops half-way for want of pages.
        """
        node = sequence.node
        assert node is not None, sequence.seq
        sequence.group = self.index
        sequence.hits.clear()
        sequence.chunk_bases.clear()
        sequence.cached_pages = node.depth
        sequence.computed_len = sequence.kv_len = node.depth * self.page_size
        sequence.pages = self.tree.path_pages(node)
        n_tokens = len(sequence.tokens)
        for _ in range(self.pages_for(n_tokens) - node.depth):
            self.grow(sequence)
        self.running[sequence.seq] = sequence
        sequence.promised_pages = n_tokens // self.page_size if self.prefix_cache else 0
        if sequence.promised_pages > node.depth:
            self.promising[sequence.seq] = sequence
        return node.depth

    def lend(self, sequence: Sequence, n_rows: int) -> None:
        """Give pages to a sequence that is over already, until its rows landed; cache nothing."""
        self.lock(sequence, None)
        sequence.group = self.index
        sequence.spoiled = True
        for _ in range(self.pages_for(n_rows)):
            self.grow(sequence)
        self.leaving[sequence.seq] = sequence

    def grow(self, sequence: Sequence) -> int:
        """One more page at the end of its page table, evicting if none is free.

        Or if more than `pages_kept` are in use and one in `IDLE_SHARE` or more of them is used by
        nobody: the memory of a free page may never have been touched, that of a cached one was.
        """
        n_used, n_idle = self.pages_total - self.pool.n_free, self.tree.n_evictable
        has_surplus = n_used >= self._pages_kept and n_idle * IDLE_SHARE > n_used
        if has_surplus or not self.pool.n_free:
            self.tree.evict(1)
        page = self.pool.take()
        sequence.pages.append(page)
        return page

    def store(self, sequence: Sequence, n_pages: int) -> None:
        """Put a running sequence's first `n_pages` pages, all computed, into the tree.

        If the tree has the next one from elsewhere, the sequence stores nothing more until it
        leaves: were it to lock that copy beside its own, it might outgrow the pool.
        """
        start, size = sequence.cached_pages, self.page_size
        if n_pages > start:
            node = sequence.node
            assert node is not None, sequence.seq
            assert n_pages * size <= sequence.computed_len, sequence.seq
            tokens = sequence.tokens[start * size : n_pages * size + self.bigrams]
            if self.tree.has(node, tokens):
                sequence.promised_pages = start
            else:
                pages = sequence.pages[start:n_pages]
                sequence.node, duplicates = self.tree.extend(node, tokens, pages)
                sequence.cached_pages = n_pages
                assert not duplicates, sequence.seq
        if sequence.cached_pages >= sequence.promised_pages:
            self.promising.pop(sequence.seq, None)

    def leave(self, sequence: Sequence, keep: bool) -> None:
        """It runs no more; its pages go back unless its rows are still in flight."""
        del self.running[sequence.seq]
        for part in (self.prefilling, self.promising, self.yielding):
            part.pop(sequence.seq, None)
        sequence.spoiled |= not keep
        if sequence.in_flight:
            self.leaving[sequence.seq] = sequence
        else:
            self.release(sequence)

    def land(self, sequence: Sequence) -> None:
        """The last rows of a sequence that had left came back: nobody writes its pages now."""
        del self.leaving[sequence.seq]
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give back all its pages; the computed full ones stay in the tree unless spoiled."""
        assert not sequence.in_flight, sequence.seq
        node = sequence.node
        assert node is not None, sequence.seq
        start, end, size = sequence.cached_pages, 0, self.page_size
        if self.prefix_cache and not sequence.spoiled:
            end = sequence.computed_len // size
            if self.bigrams:  # the token after the last page must be known
                end = min(end, (len(sequence.tokens) - 1) // size)
        surplus = sequence.pages[max(start, end) :]
        if end > start:
            tokens = sequence.tokens[start * size : end * size + self.bigrams]
            node, duplicates = self.tree.extend(node, tokens, sequence.pages[start:end])
            surplus += duplicates
        for page in reversed(surplus):
            self.pool.give_back(page)
        self.tree.unlock(node)
        sequence.forget_kv()

    def check(self) -> None:
        """Every page is in exactly one place, by the ledger's counts."""
        self.pool.check()
        assert self.pool.n_cached == self.tree.n_pages
        assert self.tree.n_evictable <= self.tree.n_pages

    def audit(self) -> None:
        """Every page is in exactly one place, by walking all of them."""
        self.check()
        self.pool.audit()
        for part in (self.prefilling, self.promising, self.yielding):
            assert all(self.running.get(seq) is sequence for seq, sequence in part.items())
        assert all(sequence.in_flight for sequence in self.leaving.values())
        assert all(sequence.in_flight for sequence in self.yielding.values())
        locked: dict[int, int] = {}
        owned: list[int] = []
        for sequence in (*self.running.values(), *self.leaving.values()):
            assert len(sequence.pages) == len(dict.fromkeys(sequence.pages)), sequence.seq
            owned += sequence.pages[sequence.cached_pages :]
            known_len = len(sequence.tokens)
            assert sequence.computed_len <= min(sequence.kv_len, known_len), sequence.seq
            assert sequence.kv_len < known_len + max(1, sequence.in_flight) or (
                sequence.phase == Phase.FINISHED
            ), sequence.seq
            assert sequence.kv_len <= len(sequence.pages) * self.page_size, sequence.seq
            node = sequence.node
            assert node is not None, sequence.seq
            assert node.depth == sequence.cached_pages, sequence.seq
            for page in self.tree.path_pages(node):
                locked[page] = locked.get(page, 0) + 1
        assert sorted(owned) == sorted(dict.fromkeys(owned))
        assert len(owned) == self.pool.n_owned
        for node in self.tree.audit():
            assert node.locks == locked.get(node.page, 0), node.page
