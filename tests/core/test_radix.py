"""The page pool and the radix tree against models too simple to be wrong."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aserve.core.pages import CACHED, FREE, OWNED, PagePool
from aserve.core.radix import Node, RadixTree

PAGE_SIZE = 2
PAGES_TOTAL = 12


class PoolMachine(RuleBasedStateMachine):
    """The naive model: a set of pages for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES_TOTAL)
        self.places = {FREE: set(range(PAGES_TOTAL)), OWNED: set(), CACHED: set()}

    def move(self, page: int, place_from: int, place_to: int) -> None:
        self.places[place_from].remove(page)
        self.places[place_to].add(page)

    @precondition(lambda self: self.places[FREE])
    @rule()
    def take(self) -> None:
        self.move(self.pool.take(), FREE, OWNED)

    @precondition(lambda self: self.places[OWNED])
    @rule(data=st.data(), cache=st.booleans())
    def put(self, data: st.DataObject, cache: bool) -> None:
        page = data.draw(st.sampled_from(sorted(self.places[OWNED])))
        if cache:
            self.pool.cache(page)
        else:
            self.pool.give_back(page)
        self.move(page, OWNED, CACHED if cache else FREE)

    @precondition(lambda self: self.places[CACHED])
    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.places[CACHED])))
        self.pool.uncache(page)
        self.move(page, CACHED, FREE)

    @rule(page=st.integers(0, PAGES_TOTAL - 1))
    def illegal_moves_are_refused(self, page: int) -> None:
        if page not in self.places[OWNED]:
            with pytest.raises(AssertionError):
                self.pool.give_back(page)
            with pytest.raises(AssertionError):
                self.pool.cache(page)
        if page not in self.places[CACHED]:
            with pytest.raises(AssertionError):
                self.pool.uncache(page)

    @invariant()
    def agrees(self) -> None:
        self.pool.audit()
        assert self.pool.n_free == len(self.places[FREE])
        assert self.pool.n_owned == len(self.places[OWNED])
        assert self.pool.n_cached == len(self.places[CACHED])
        for place, pages in self.places.items():
            assert all(self.pool.place(page) == place for page in pages)


class TreeMachine(RuleBasedStateMachine):
    """The naive model: a dictionary from (salt, tokens of a path) to [page, locks, last use]."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES_TOTAL)
        self.tree = RadixTree(self.pool, PAGE_SIZE)
        self.naive: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self.holds: list[tuple[str, tuple[int, ...], Node]] = []
        self.clock = 0

    salts = st.sampled_from(["", "a"])
    texts = st.lists(st.integers(0, 1), max_size=9)

    def naive_match(self, salt: str, tokens: list[int], len_max: int) -> tuple[int, ...]:
        path: tuple[int, ...] = ()
        while len(path) + PAGE_SIZE <= len_max:
            longer = tuple(tokens[: len(path) + PAGE_SIZE])
            if (salt, longer) not in self.naive:
                break
            path = longer
        return path

    def naive_lock(self, salt: str, path: tuple[int, ...], change: int) -> None:
        for end in range(PAGE_SIZE, len(path) + 1, PAGE_SIZE):
            entry = self.naive[(salt, path[:end])]
            entry[1] += change
            if change < 0:
                entry[2] = self.clock

    def naive_leaf(self) -> tuple[str, tuple[int, ...]]:
        """The least recently used unlocked leaf."""
        leaves = [
            key
            for key, entry in self.naive.items()
            if not entry[1]
            and not any(
                salt == key[0] and len(path) > len(key[1]) and path[: len(key[1])] == key[1]
                for salt, path in self.naive
            )
        ]
        return min(leaves, key=lambda key: self.naive[key][2])

    @rule(salt=salts, tokens=texts, data=st.data())
    def match_and_lock(self, salt: str, tokens: list[int], data: st.DataObject) -> None:
        len_max = data.draw(st.integers(0, len(tokens)))
        path = self.naive_match(salt, tokens, len_max)
        node = self.tree.match(salt, tokens, len_max) or self.tree.root(salt)
        pages = [self.naive[(salt, path[:end])][0] for end in range(2, len(path) + 1, 2)]
        assert self.tree.path_pages(node) == pages
        self.tree.lock(node)
        self.naive_lock(salt, path, +1)
        self.holds.append((salt, path, node))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holds) - 1))
        salt, path, node = self.holds.pop(index)
        self.clock += 1
        self.tree.unlock(node)
        self.naive_lock(salt, path, -1)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), n_pages=st.integers(0, 3))
    def extend(self, data: st.DataObject, n_pages: int) -> None:
        index = data.draw(st.integers(0, len(self.holds) - 1))
        n_pages = min(n_pages, self.pool.n_free)
        salt, path, node = self.holds[index]
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=n_pages * 2, max_size=n_pages * 2))
        pages = [self.pool.take() for _ in range(n_pages)]
        duplicates = []
        for at, page in enumerate(pages):
            key = (salt, (*path, *tokens[: (at + 1) * 2]))
            if key in self.naive:
                duplicates.append(page)
            self.naive.setdefault(key, [page, 0, 0])[1] += 1
        if n_pages:
            assert self.tree.has(node, tokens) == (pages[0] in duplicates)
        node, surplus = self.tree.extend(node, tokens, pages)
        assert surplus == duplicates
        for page in duplicates:
            self.pool.give_back(page)
        self.holds[index] = (salt, (*path, *tokens), node)

    @precondition(lambda self: self.tree.n_evictable)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        n_pages = data.draw(st.integers(1, self.tree.n_evictable))
        for _ in range(n_pages):
            del self.naive[self.naive_leaf()]
        self.tree.evict(n_pages)

    @rule()
    def flush(self) -> None:
        self.tree.flush()
        self.naive = {key: entry for key, entry in self.naive.items() if entry[1]}

    @invariant()
    def agrees(self) -> None:
        self.pool.audit()
        nodes = self.tree.audit()
        pages = {page for page, _, _ in self.naive.values()}
        assert {node.page for node in nodes} == pages
        assert self.tree.n_evictable == sum(not locks for _, locks, _ in self.naive.values())

    def teardown(self) -> None:
        for _, _, node in self.holds:
            self.tree.unlock(node)
        self.tree.flush()
        assert self.pool.n_free == PAGES_TOTAL
        assert not self.tree._roots


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestTree = pytest.mark.slow(TestTree)


def stored(tree: RadixTree, pool: PagePool, tokens: list[int]) -> list[int]:
    root = tree.root("")
    tree.lock(root)
    pages = [pool.take() for _ in range(len(tokens) // PAGE_SIZE)]
    node, duplicates = tree.extend(root, tokens, pages)
    for page in duplicates:
        pool.give_back(page)
    tree.unlock(node)
    return pages


def test_a_match_takes_whole_pages_and_no_more_than_asked() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool, PAGE_SIZE)
    pages = stored(tree, pool, [1, 2, 3, 4])
    for len_max, n_pages in ((0, 0), (1, 0), (2, 1), (3, 1), (4, 2)):
        node = tree.match("", [1, 2, 3, 4, 5], len_max)
        assert node is not None
        assert tree.path_pages(node) == pages[:n_pages]


def test_eviction_takes_the_least_recently_used_leaf_and_never_a_locked_path() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool, PAGE_SIZE)
    stored(tree, pool, [1, 1])
    stored(tree, pool, [2, 2, 3, 3])
    locked = tree.match("", [2, 2], 2)
    assert locked is not None
    tree.lock(locked)
    tree.evict(1)
    assert tree.match("", [1, 1], 2).depth == 0
    assert tree.match("", [2, 2, 3, 3], 4).depth == 2
    tree.evict(1)
    assert tree.match("", [2, 2, 3, 3], 4).depth == 1
    with pytest.raises(AssertionError):
        tree.evict(1)


def test_stale_heap_entries_do_not_pile_up() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool, PAGE_SIZE)
    stored(tree, pool, [1, 1])
    node = tree.match("", [1, 1], 2)
    for _ in range(1000):
        tree.lock(node)
        tree.unlock(node)
    assert len(tree._heap) <= 2 * tree.n_pages + 65
    tree.evict(1)
    assert pool.n_free == 8
