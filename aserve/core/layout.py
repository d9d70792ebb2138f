"""Which rank is where: the arithmetic of a layout, for attention and for experts.

world = pp * tp;  tp = dp * cp * attn_tp (attn_tp fastest) = moe_dp * ep * moe_tp (moe_tp fastest)

Groups of ranks that meet in collectives, each in rank order: `attn_tp` share rows and split heads,
`cp` split one attention group's rows, `rows` hold all rows of a stage once (dp x cp), `tp` is the
stage, `moe_tp` split one expert, `ep` hold the experts once, `experts` is a whole copy of them
(ep x moe_tp), `moe_dp` hold the same experts in different copies.
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


# For each group the axes on which its ranks differ; they agree on the others of the same kind.
GROUPS: dict[str, tuple[str, ...]] = {
    "attn_tp": ("attn_tp",),
    "cp": ("cp",),
    "rows": ("dp", "cp"),
    "tp": ("dp", "cp", "attn_tp"),
    "moe_tp": ("moe_tp",),
    "ep": ("ep",),
    "experts": ("ep", "moe_tp"),
    "moe_dp": ("moe_dp",),
}
ATTENTION_AXES, EXPERT_AXES = ("dp", "cp", "attn_tp"), ("moe_dp", "ep", "moe_tp")


class Grid:
    """The sizes of a layout's axes. Raises ConfigError with every finding if they do not divide."""

    def __init__(self, layout: Layout) -> None:
        wrong = findings(layout)
        if wrong:
            raise ConfigError(wrong)
        self.layout = layout
        self.pp = layout.pp
        self.tp = layout.tp
        self.dp = layout.dp
        self.cp = layout.cp
        self.attn_tp = layout.tp // (layout.dp * layout.cp)
        self.moe_dp = layout.moe_dp
        self.ep = layout.ep
        self.moe_tp = layout.tp // (layout.moe_dp * layout.ep)
        self.world = layout.pp * layout.tp
        self.layers = layout.layers

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

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks, in order, that meet `rank` in collectives of this name (a key of GROUPS)."""
        differ, place = GROUPS[name], self.place(rank)
        axes = ATTENTION_AXES if set(differ) <= set(ATTENTION_AXES) else EXPERT_AXES
        same = [axis for axis in ("pp", *axes) if axis not in differ]
        return tuple(
            other
            for other in range(place.pp * self.tp, (place.pp + 1) * self.tp)
            if all(getattr(self.place(other), axis) == getattr(place, axis) for axis in same)
        )

    def leader(self, dp: int) -> int:
        """The rank that draws and reports results for an attention-DP group: on the last stage."""
        return self.rank(self.pp - 1, dp, 0, 0)

    def stage(self, n_layers: int, pp: int) -> range:
        """Global layer indices of a stage. Raises ConfigError if the layers do not fill it.

        By default shares differ by one layer, the last stages having more.
        """
        shares = self.layers
        if shares is None:
            if self.pp > n_layers:
                raise ConfigError(
                    f"{n_layers} layers do not fill layout.pp = {self.pp} stages; use at most "
                    f"--layout.pp {n_layers}"
                )
            least, more = divmod(n_layers, self.pp)
            shares = (least,) * (self.pp - more) + (least + 1,) * more
        elif sum(shares) != n_layers:
            raise ConfigError(
                f"layout.layers = {','.join(map(str, shares))} are {sum(shares)} layers, the model "
                f"has {n_layers}"
            )
        start = sum(shares[:pp])
        return range(start, start + shares[pp])


def findings(layout: Layout) -> tuple[str, ...]:
    """What is wrong with a layout, each with values that would do."""
    found = [
        f"layout.{name} is {getattr(layout, name)}, at least 1"
        for name in ("tp", "pp", "dp", "cp", "ep", "moe_dp")
        if getattr(layout, name) < 1
    ]
    if found:
        return tuple(found)
    if layout.layers is not None and len(layout.layers) != layout.pp:
        found.append(
            f"layout.layers names {len(layout.layers)} stages, layout.pp is {layout.pp}: give one "
            "number of layers a stage"
        )
    if layout.layers is not None and min(layout.layers, default=1) < 1:
        found.append(
            f"layout.layers = {','.join(map(str, layout.layers))} leaves a stage without layers: "
            "each has at least 1"
        )
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
