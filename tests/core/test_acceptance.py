"""Counting what became of drafts."""

from random import Random

from aserve.core.acceptance import Acceptance, DraftStatistics
from aserve.core.message import Result, Rows
from tests.core.deployment import Deployment


def count(acceptance: Acceptance, n_drafted: int, n_accepted: int) -> None:
    """A chain of `n_drafted` tokens, of which the first `n_accepted` were drawn too."""
    tokens = tuple(range(10, 11 + n_drafted))
    parents = tuple(range(-1, n_drafted)) if n_drafted else ()
    path = tuple(range(n_accepted + 1))
    rows = Rows(1, 5, tokens, parents, True, ())
    acceptance.count(rows, Result(1, path, (*tokens[1 : n_accepted + 1], 99)))


def test_each_draft_counts_once_by_its_accepted_length_and_at_each_position_it_reached() -> None:
    acceptance = Acceptance()
    for n_drafted, n_accepted in ((3, 3), (3, 1), (2, 0), (0, 0), (3, 1)):
        count(acceptance, n_drafted, n_accepted)
    assert acceptance.statistics() == DraftStatistics(4, 11, 5, (1, 2, 0, 1), 5)
    assert acceptance.statistics().accepted_at == (3, 1, 1)


def test_nothing_drafted_is_steps_alone() -> None:
    acceptance = Acceptance()
    assert acceptance.statistics().accepted_at == ()
    count(acceptance, 0, 0)
    assert acceptance.statistics() == DraftStatistics(target_steps=1)


def test_the_planner_counts_what_its_outputs_carry() -> None:
    random = Random(3)
    deployment = Deployment(draft_max=5, page_size=4, pages_total=40)
    for seq in range(4):
        prompt = [random.randrange(40) for _ in range(7)]
        deployment.ask(seq, prompt, max_tokens=17)
    deployment.pump()
    drafts = deployment.planner.statistics().drafts
    assert drafts.target_steps == sum(output.n_steps for output in deployment.outputs)
    assert drafts.target_steps + drafts.accepted == sum(map(len, deployment.texts.values())) == 68
    rows = [one for plan in deployment.plans for batch in plan.batches for one in batch.rows]
    trees = [one for one in rows if one.parents]
    assert (drafts.drafts, drafts.drafted) == (
        len(trees),
        sum(len(one.tokens) - 1 for one in trees),
    )
    assert drafts.accepted == sum(drafts.accepted_at) > 10
    assert deployment.planner.state().drafts == drafts
