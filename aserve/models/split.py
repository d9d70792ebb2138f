"""How a parameter is split over the ranks of a stage: data beside its name, and one pure function.

Axes are those of core.layout, with `tp` for the whole stage. An axis of size 1 is not there.
"""

import dataclasses
from collections.abc import Sequence

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Dimension `dim` is cut over `axes` (slowest first) in `units` equal, indivisible parts.

    With `units` 0 any row stands alone, and shares differ by one row at most. With `replicas` there
    may be more ranks than units (KV heads): neighbours then hold the same unit. `exact_only` units
    are those of a sum's blocks: fast numerics cut them where they do not go up evenly.
    """

    dim: int
    axes: tuple[str, ...]
    units: int = 0
    replicas: bool = False
    exact_only: bool = False

    def is_cut(self, layout: Layout) -> bool:
        return any(getattr(Grid(layout), axis) > 1 for axis in self.axes)


WHOLE = Split(0, ())
TILE = 32  # columns of a weight that the kernels take at once


def share(split: Split, layout: Layout, rank: int) -> tuple[int, int]:
    """(this rank's place, number of places) along all axes of the split."""
    grid = Grid(layout)
    place = grid.place(rank)
    number, places = 0, 1
    for axis in split.axes:
        size = getattr(grid, axis)
        at = rank % grid.tp if axis == "tp" else getattr(place, axis)
        number, places = number * size + at, places * size
    return number, places


def bounds(split: Split, length: int, layout: Layout, rank: int) -> tuple[int, int]:
    """[start, stop) of this rank in a dimension of `length`. Raises ConfigError if it cannot be."""
    number, places = share(split, layout, rank)
    if places == 1:
        return 0, length
    units, is_even = split.units or length, split.units > 0
    if split.exact_only and layout.numerics == "fast" and units % places:
        tiles, is_even = length // TILE, False
        units = tiles if tiles * TILE == length and tiles >= places else length
    unit_len = length // units
    assert unit_len * units == length, (split, length)
    if split.replicas and places > units:
        if places % units:
            raise ConfigError(f"{units} parts cannot be copied evenly to {places} ranks")
        unit = number // (places // units)
        return unit * unit_len, (unit + 1) * unit_len
    if is_even and units % places:
        raise ConfigError(f"{units} parts do not split over {places} ranks ({split.axes})")
    return units * number // places * unit_len, units * (number + 1) // places * unit_len


def slice_for(split: Split, shape: Sequence[int], layout: Layout, rank: int) -> tuple[slice, ...]:
    """What `rank` holds of a parameter of this shape; joined over ranks it is the whole."""
    index = [slice(0, length) for length in shape]
    if split.axes:
        index[split.dim] = slice(*bounds(split, shape[split.dim], layout, rank))
    return tuple(index)
