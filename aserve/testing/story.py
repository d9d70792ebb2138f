"""A failed run for people: the law, what was set up, and the last plans, a line a thing."""

from aserve.core.message import Admit, Rows, StepPlan
from aserve.core.speculation import speculation_of
from aserve.testing.swarm import Setup
from aserve.testing.world import Outcome


def told(seed: int, scenario: str, setup: Setup, outcome: Outcome) -> str:
    """Everything needed to see what happened, and to see it again."""
    lines = [f"seed {seed} ({scenario}): {outcome.broken}", f"  {set_up(setup)}"]
    lines += [f"  trouble at {t.at_ms} ms: {t.kind} {t.rank}->{t.peer}" for t in setup.troubles]
    lines.append("  the last plans:")
    lines += [f"    {plan_line(plan)}" for plan in outcome.plans]
    lines.append(f"  again: {replay(seed, scenario)}")
    return "\n".join(lines) + "\n"


def drafts(setup: Setup) -> str:
    most = speculation_of(setup.spec).most
    if not most.tokens:
        return "no drafts"
    at_most = "up to " * setup.spec.adaptive
    return f"drafts of {at_most}{most.tokens} in {most.depth} levels, {most.topk} children"


def replay(seed: int, scenario: str) -> str:
    return f"aserve sim --first-seed {seed} --seeds 1 --scenario {scenario}"


def set_up(setup: Setup) -> str:
    layout, schedule = setup.layout, setup.schedule
    n_requests = sum(len(arrival.requests) for arrival in setup.arrivals)
    return (
        f"pp {layout.pp}, tp {layout.tp} = dp {layout.dp} x cp {layout.cp} x attn_tp, "
        f"moe_dp {layout.moe_dp} x ep {layout.ep}; {setup.pages_total} pages of "
        f"{setup.page_size}, {schedule.step_tokens} rows a step, overlap {schedule.overlap}, "
        f"{drafts(setup)}, {n_requests} sequences"
    )


def plan_line(plan: StepPlan) -> str:
    """`step 7/0  commit 3+2  drop 4  admit 5(cached 8/20)  | 5@8..20 3@12 | (another group)`"""
    parts = [f"step {plan.step}/{plan.microbatch} "]
    if plan.commits:
        found = [f"{c.seq}{list(c.path) if c.path else ''}+{len(c.tokens)}" for c in plan.commits]
        parts.append("commit " + " ".join(found) + " ")
    if plan.drops:
        parts.append("drop " + " ".join(map(str, plan.drops)) + " ")
    if plan.admits:
        parts.append("admit " + " ".join(map(_admit, plan.admits)) + " ")
    parts += ["| " + " ".join(map(_rows, batch.rows)) for batch in plan.batches]
    return " ".join(parts)


def _admit(admit: Admit) -> str:
    return f"{admit.seq}(cached {admit.kv_len}/{len(admit.tokens)})"


def _rows(rows: Rows) -> str:
    end = rows.start + len(rows.tokens)
    where = f"{rows.seq}@{rows.start}"
    if rows.parents:
        where += f"^{len(rows.tokens)}{list(rows.parents)}"
    elif end > rows.start + 1:
        where += f"..{end}"
    pages = f"+p{','.join(map(str, rows.pages))}" if rows.pages else ""
    return where + pages + ("" if rows.sample else "~")
