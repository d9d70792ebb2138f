"""The ledger of KV pages of one pool: each page is free, owned by a sequence, or in the cache.

It knows places, not reasons: who owns a page stands in its sequence, who may evict it in the tree.
"""

import msgspec

FREE, OWNED, CACHED = 0, 1, 2


class CacheSpec(msgspec.Struct, frozen=True):
    """The KV pool of each attention-DP group; beyond `pages_kept` see `Group.grow`."""

    page_size: int
    pages_total: int
    pages_kept: int | None = None


class PagePool:
    """`pages_total` pages; every move between places is asserted, so none is in two."""

    def __init__(self, pages_total: int) -> None:
        assert pages_total > 0, pages_total
        self.pages_total = pages_total
        self._places = bytearray(pages_total)
        self._free = list(range(pages_total - 1, -1, -1))  # a stack; page 0 goes first
        self._n_owned = 0
        self._n_cached = 0

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_owned(self) -> int:
        return self._n_owned

    @property
    def n_cached(self) -> int:
        return self._n_cached

    def take(self) -> int:
        """A free page becomes owned."""
        page = self._free.pop()
        assert self._places[page] == FREE, page
        self._places[page] = OWNED
        self._n_owned += 1
        return page

    def give_back(self, page: int) -> None:
        """An owned page becomes free."""
        assert self._places[page] == OWNED, page
        self._places[page] = FREE
        self._n_owned -= 1
        self._free.append(page)

    def cache(self, page: int) -> None:
        """An owned page becomes the cache's."""
        assert self._places[page] == OWNED, page
        self._places[page] = CACHED
        self._n_owned -= 1
        self._n_cached += 1

    def uncache(self, page: int) -> None:
        """A cached page becomes free."""
        assert self._places[page] == CACHED, page
        self._places[page] = FREE
        self._n_cached -= 1
        self._free.append(page)

    def place(self, page: int) -> int:
        return self._places[page]

    def check(self) -> None:
        """The counts agree with the ledger; costs one scan of a byte a page at memory speed."""
        assert self._places.count(FREE) == len(self._free)
        assert self._places.count(OWNED) == self._n_owned
        assert self._places.count(CACHED) == self._n_cached
        assert len(self._free) + self._n_owned + self._n_cached == self.pages_total

    def audit(self) -> None:
        """Each free page is listed once; linear, for tests and rare checks."""
        self.check()
        assert sorted(self._free) == [
            page for page, place in enumerate(self._places) if place == FREE
        ]
