"""Which rank is where: the arithmetic of a layout, for attention and for experts.

world = pp * tp;  tp = dp * cp * attn_tp (attn_tp fastest) = moe_dp * ep * moe_tp (moe_tp fastest)
"""

import msgspec

from aserve.core.config import Layout
from aserve.errors import ConfigError


class Place(msgspec.Struct, frozen=True):
    """A rank's coordinate on every axis."""

    pp: int
    dp: int
    cp: int
    attn_tp: int
    moe_dp: int
    ep: int
    moe_tp: int


class Grid:
    """The sizes of a layout's axes. Raises ConfigError with every finding if they do not divide."""

    def __init__(self, layout: Layout) -> None:
        wrong = findings(layout)
        if wrong:
            raise ConfigError(wrong)
        self.pp = layout.pp
        self.tp = layout.tp
        self.dp = layout.dp
        self.cp = layout.cp
        self.attn_tp = layout.tp // (layout.dp * layout.cp)
        self.moe_dp = layout.moe_dp
        self.ep = layout.ep
        self.moe_tp = layout.tp // (layout.moe_dp * layout.ep)
        self.world = layout.pp * layout.tp

    def place(self, rank: int) -> Place:
        assert 0 <= rank < self.world, (rank, self.world)
        stage, inside = divmod(rank, self.tp)
        rest, attn_tp = divmod(inside, self.attn_tp)
        dp, cp = divmod(rest, self.cp)
        rest, moe_tp = divmod(inside, self.moe_tp)
        moe_dp, ep = divmod(rest, self.ep)
        return Place(stage, dp, cp, attn_tp, moe_dp, ep, moe_tp)

    def rank(self, pp: int, dp: int, cp: int, attn_tp: int) -> int:
        """The rank at a coordinate of the attention axes."""
        assert 0 <= pp < self.pp, pp
        assert 0 <= dp < self.dp, dp
        assert 0 <= cp < self.cp, cp
        assert 0 <= attn_tp < self.attn_tp, attn_tp
        return ((pp * self.dp + dp) * self.cp + cp) * self.attn_tp + attn_tp


def findings(layout: Layout) -> tuple[str, ...]:
    """What is wrong with a layout, each with values that would do."""
    found = [
        f"layout.{name} is {size}, at least 1"
        for name, size in msgspec.structs.asdict(layout).items()
        if size < 1
    ]
    if found:
        return tuple(found)
    for first, second in (("dp", "cp"), ("moe_dp", "ep")):
        sizes = getattr(layout, first), getattr(layout, second)
        if layout.tp % (sizes[0] * sizes[1]):
            found.append(_division_finding(layout.tp, (first, second), sizes))
    return tuple(found)


def _division_finding(tp: int, names: tuple[str, str], sizes: tuple[int, int]) -> str:
    product = sizes[0] * sizes[1]
    would_do = [
        f"layout.{name} in {[n for n in range(1, tp + 1) if tp % (n * other) == 0]}"
        for name, other in zip(names, reversed(sizes), strict=True)
        if tp % other == 0
    ]
    would_do.append(f"layout.tp in [{product}, {2 * product}, ...]")
    return (
        f"layout.tp = {tp} cannot be split by layout.{names[0]} * layout.{names[1]} = "
        f"{sizes[0]} * {sizes[1]}; what would do: {' or '.join(would_do)}"
    )
