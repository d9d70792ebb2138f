"""Whether a model can be split as a layout says, checked before any weight is read."""

from collections.abc import Iterator

from aserve.core.config import Layout
from aserve.core.layout import Grid, findings
from aserve.errors import ConfigError
from aserve.models.decoder import row_blocks
from aserve.models.spec import ModelSpec

FAST = "--layout.numerics fast"


def check_layout(spec: ModelSpec, layout: Layout) -> list[str]:
    """Everything that is wrong, each finding with the values that would do; empty if nothing is."""
    if found := list(findings(layout)):
        return found
    grid = Grid(layout)
    try:
        grid.stage(spec.layers, 0)
    except ConfigError as error:
        found += error.findings
    if grid.tp > spec.vocab:
        found.append(f"{spec.vocab} tokens cannot be split over layout.tp = {grid.tp} ranks")
    found += _heads(spec, grid)
    found += _mlps(spec, grid)
    return found


def _heads(spec: ModelSpec, grid: Grid) -> Iterator[str]:
    heads, kv_heads, attn_tp = spec.heads, spec.kv_heads, grid.attn_tp
    would_do = [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
    if attn_tp not in would_do:
        yield (
            f"layout.tp / (dp * cp) = {attn_tp} ranks cannot share the {heads} heads and "
            f"{kv_heads} KV heads of this model; what would do: {_listed(would_do)}"
        )
    elif grid.layout.numerics == "exact" and kv_heads % attn_tp:
        yield (
            f"exact numerics add attention up by KV head, and {kv_heads} of them do not go into "
            f"layout.tp / (dp * cp) = {attn_tp} ranks; what would do: "
            f"{_listed(divisors(kv_heads))}, or {FAST}"
        )


def _mlps(spec: ModelSpec, grid: Grid) -> Iterator[str]:
    experts = spec.experts
    if experts is None or len(experts.layers) < spec.layers:
        yield from _columns("MLP", spec.inner, "layout.tp", grid.tp, grid.layout.numerics)
    if experts is None:
        yield from _without_experts(grid)
        return
    if experts.count % grid.ep:
        yield (
            f"layout.ep = {grid.ep} ranks cannot share {experts.count} experts; what would do: "
            f"{_listed(divisors(experts.count))}"
        )
    name = "layout.tp / (moe_dp * ep)"
    yield from _columns("expert", experts.inner, name, grid.moe_tp, grid.layout.numerics)


def _without_experts(grid: Grid) -> Iterator[str]:
    """Such an axis would change nothing: whoever sets it expects something of it."""
    for axis in ("ep", "moe_dp"):
        if (size := getattr(grid, axis)) > 1:
            yield f"layout.{axis} = {size}, but this model has no experts; what would do: 1"
    if grid.layout.experts != "gathered":
        yield f"layout.experts = {grid.layout.experts}, but this model has none; leave it out"


def _columns(what: str, inner: int, name: str, size: int, numerics: str) -> Iterator[str]:
    if size > inner:
        yield f"an {what} of {inner} columns cannot be split over {name} = {size} ranks"
    elif numerics == "exact" and row_blocks(inner) % size:
        yield (
            f"exact numerics add up an {what} of {inner} columns in {row_blocks(inner)} blocks, "
            f"which do not go into {name} = {size} ranks; what would do: "
            f"{_listed(divisors(row_blocks(inner)))}, or {FAST}"
        )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
