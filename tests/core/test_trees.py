"""Trees of drafts: cutting them, what their rows cost, and what is left of them when things end."""

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.config import Layout
from aserve.core.message import NO_DRAFTING, Drafting, StepPlan
from aserve.core.tree import NO_DRAFT, Draft, cut, depths, is_path, malformed, moved, row_parents
from aserve.errors import Desync
from tests.core import deployment as world
from tests.core.deployment import Deployment, oracle

#      0       root
#     / \
#    1   2      7, 8
#   /   / \
#  3   4   5    9, 10, 11
TREE = Draft((7, 8, 9, 10, 11), (-1, -1, 0, 1, 1))


def test_rows_are_the_root_and_the_draft_below_it() -> None:
    assert row_parents(TREE) == (-1, 0, 0, 1, 2, 2)
    assert depths(row_parents(TREE)) == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("n_max", "depth_max", "tokens", "parents"),
    [
        (9, 9, TREE.tokens, TREE.parents),
        (3, 9, (7, 8, 9), (-1, -1, 0)),
        (9, 1, (7, 8), (-1, -1)),
        (1, 9, (7,), (-1,)),
        (0, 9, (), ()),
        (9, 0, (), ()),
    ],
)
def test_a_cut_keeps_first_nodes_with_their_parents(
    n_max: int, depth_max: int, tokens: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    assert cut(TREE, n_max, depth_max) == Draft(tokens, parents)


def test_a_cut_by_depth_renumbers_the_parents() -> None:
    deep_first = Draft((1, 2, 3, 4, 5), (-1, 0, 1, -1, 3))  # a chain of three, then one of two
    assert cut(deep_first, 9, 2) == Draft((1, 2, 4, 5), (-1, 0, -1, 2))
    assert cut(deep_first, 3, 2) == Draft((1, 2, 4), (-1, 0, -1))


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    n_nodes = draw(st.integers(0, 12))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(n_nodes))
    return Draft(tuple(range(100, 100 + n_nodes)), parents)


@given(draft=drafts(), n_max=st.integers(0, 12), depth_max=st.integers(0, 6))
def test_every_cut_is_a_tree_within_bounds_whose_nodes_keep_their_ancestors(
    draft: Draft, n_max: int, depth_max: int
) -> None:
    def ancestry(tree: Draft, node: int) -> list[int]:
        tokens = []
        while node >= 0:
            tokens.append(tree.tokens[node])
            node = tree.parents[node]
        return tokens

    kept = cut(draft, n_max, depth_max)
    assert malformed(kept, Drafting(depth_max, 12, n_max)) is None
    assert all(depth < depth_max for depth in depths(kept.parents))
    for node, token in enumerate(kept.tokens):
        assert ancestry(kept, node) == ancestry(draft, token - 100)


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (Draft((1, 2), (-1,)), "drafted 2 tokens with 1 parents"),
        (Draft((1, 2), (-1, 1)), "drafted node 1 below 1"),
        (Draft((1, 2), (-1, -2)), "drafted node 1 below -2"),
        (Draft((1, -2), (-1, 0)), "drafted (1, -2), not all of them tokens"),
        (Draft((1 << 40,), (-1,)), "drafted (1099511627776,), not all of them tokens"),
        (Draft((1, 2, 3), (-1, 0, 1)), "drafted 3 levels, at most 2 were asked for"),
        (Draft((1,) * 4, (-1,) * 4), "drafted 4 tokens, at most 3 were asked for"),
    ],
)
def test_a_malformed_draft_is_named(draft: Draft, words: str) -> None:
    assert words in (malformed(draft, Drafting(2, 3, 3)) or "")


def test_a_path_goes_from_parent_to_child() -> None:
    parents = row_parents(TREE)
    assert all(is_path(parents, path) for path in [(0,), (0, 1, 3), (0, 2, 5)])
    assert not any(is_path(parents, path) for path in [(1,), (0, 3), (0, 1, 4), (0, 2, 6), (2, 0)])


def test_kept_rows_move_to_their_depth_and_those_in_place_stay() -> None:
    assert moved((0, 1, 3), 40) == ([43], [42])
    assert moved((0, 2, 5), 40) == ([42, 45], [41, 42])
    assert moved((0, 1, 2), 40) == ([], [])


def prompt(first: int, length: int) -> list[int]:
    return [(first + at) % 40 for at in range(length)]


def trees(plan: StepPlan) -> dict[int, int]:
    """Drafted rows by sequence."""
    rows = [one for batch in plan.batches for one in batch.rows]
    return {one.seq: len(one.tokens) - 1 for one in rows if one.parents}


def chain(seed: int, tokens: list[int], n_max: int) -> Draft:
    """What follows indeed, in a chain."""
    text = list(tokens)
    for _ in range(n_max):
        text.append(world.draw(seed, text))
    return Draft(tuple(text[len(tokens) :]), tuple(range(-1, n_max - 1)))


def beside_a_decoy(seed: int, tokens: list[int], n_max: int) -> Draft:
    """The same, behind a decoy at the first place: each accepted row moves by one slot."""
    right = chain(seed, tokens, n_max - 1)
    decoy = (right.tokens[0] + 1) % world.VOCAB
    return Draft((decoy, *right.tokens), (-1, -1, *range(1, n_max - 1)))


@pytest.fixture(params=[chain, beside_a_decoy])
def drafter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "drafted", request.param)


def draft_in(deployment: Deployment, steps: Iterable[int]) -> None:
    """Drafts as large as allowed, in these steps only."""
    most, chosen = deployment.speculation.most, tuple(steps)
    deployment.planner._drafting = lambda composition: (  # type: ignore[method-assign]
        most if len(deployment.all_plans) in chosen else NO_DRAFTING
    )


@pytest.mark.usefixtures("drafter")
def test_rows_lag_until_a_step_drafts_and_again_when_no_tree_is_left() -> None:
    deployment = Deployment(draft_max=2, page_size=4, pages_total=30, layout=Layout(), overlap=2)
    draft_in(deployment, [2])
    deployment.ask(0, prompt(0, 3), max_tokens=16)
    assert [len(plan.batches[0].rows) for plan in iter(deployment.plan_one, None)] == [1, 1, 1]
    assert deployment.all_plans[2].batches[0].rows[0].is_lagging
    assert deployment.all_plans[2].drafting == deployment.speculation.most
    for _ in range(2):  # of the two plans before it, which leave its draft where it is
        deployment.report_one()
        assert deployment.plan_one() is None
    deployment.report_one()
    plan = deployment.plan_one()
    assert plan is not None
    assert trees(plan) == {0: 2}
    assert deployment.plan_one() is None  # nobody knows where its path ends
    deployment.report_one()
    later = list(iter(deployment.plan_one, None))
    assert [plan.batches[0].rows[0].is_lagging for plan in later] == [False, True, True]
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_a_pipeline_drafts_in_each_microbatch_by_itself() -> None:
    deployment = Deployment(draft_max=2, page_size=4, pages_total=60, layout=Layout(pp=2))
    draft_in(deployment, range(0, 100, 3))
    for seq in range(4):
        deployment.ask(seq, prompt(seq, 5), max_tokens=12)
    deployment.pump()
    drafting = {plan.microbatch for plan in deployment.plans if plan.drafting.tokens}
    assert drafting == {0, 1}
    assert any(trees(plan) for plan in deployment.plans)
    deployment.check_texts()
    deployment.check_idle()


def test_a_chunk_that_draws_nothing_asks_for_no_draft() -> None:
    deployment = Deployment(draft_max=3, page_size=4, pages_total=30, step_tokens=8)
    deployment.ask(0, prompt(0, 20), max_tokens=2)
    deployment.pump()
    asked = [plan.drafting.tokens for plan in deployment.plans]
    assert asked[:3] == [0, 0, 3]


def test_a_rank_told_of_another_drafting_is_out_of_step() -> None:
    deployment = Deployment(draft_max=3)
    deployment.ask(0, prompt(0, 3))
    deployment.fault = lambda plan: msgspec.structs.replace(plan, drafting=NO_DRAFTING)
    deployment.plan_one()
    with pytest.raises(Desync, match="digest"):
        deployment.report_one()


@pytest.mark.usefixtures("drafter")
def test_accepted_drafts_save_steps_and_keep_the_text() -> None:
    deployment = Deployment(draft_max=4, page_size=4, pages_total=30)
    deployment.ask(0, prompt(0, 9), max_tokens=21, logprobs=0)
    deployment.pump()
    assert len(deployment.plans) <= 1 + 5
    assert [len(one.logprobs) for one in deployment.outputs] == [
        len(one.tokens) for one in deployment.outputs
    ]
    assert sum(one.n_steps for one in deployment.outputs) == len(deployment.outputs) <= 1 + 5
    deployment.check_texts()
    deployment.check_idle()


def test_a_chunked_prompt_drafts_after_its_last_chunk() -> None:
    deployment = Deployment(draft_max=3, page_size=4, pages_total=30, step_tokens=8)
    deployment.ask(0, prompt(0, 20), max_tokens=9)
    deployment.pump()
    first = [trees(plan) for plan in deployment.plans[:3]]
    assert first == [{}, {}, {}]
    assert any(trees(plan) for plan in deployment.plans[3:])
    deployment.check_texts()


@pytest.mark.usefixtures("drafter")
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_path_is_longer_than_what_may_still_be_drawn(max_tokens: int) -> None:
    deployment = Deployment(draft_max=6, page_size=4, pages_total=30)
    deployment.ask(0, prompt(0, 9), max_tokens=max_tokens)
    deployment.pump()
    assert len(deployment.texts[0]) == max_tokens
    for plan in deployment.plans:
        for rows in plan.batches[0].rows:
            depth = max(depths(rows.parents), default=0)
            assert rows.start + depth < 9 + max_tokens - 1 or rows.start < 9
    deployment.check_texts()
    deployment.check_idle()


@pytest.mark.usefixtures("drafter")
@pytest.mark.parametrize("place", range(8))
def test_a_stop_id_inside_the_path_ends_the_text_there(place: int) -> None:
    deployment = Deployment(draft_max=6, page_size=4, pages_total=30)
    deployment.ask(0, prompt(0, 9), max_tokens=12)
    stop = oracle(deployment.requests[0])[place]
    deployment.ask(1, prompt(0, 9), max_tokens=12, stop_ids=(stop,))
    deployment.ask(2, prompt(0, 9), max_tokens=12, stop_ids=(stop,), min_tokens=place)
    deployment.pump()
    assert deployment.ends[1].finish_reason == "stop"
    assert deployment.ends[2].finish_reason == "stop"
    deployment.check_texts()
    deployment.check_idle()


@pytest.mark.usefixtures("drafter")
def test_what_a_finished_tree_left_in_the_cache_is_the_text() -> None:
    deployment = Deployment(draft_max=6, page_size=2, pages_total=40)
    deployment.ask(0, prompt(0, 5), max_tokens=14)
    deployment.pump()
    deployment.ask(1, [*prompt(0, 5), *deployment.texts[0], 3, 4], max_tokens=5)
    deployment.pump()
    assert deployment.ends[1].cached_len == 18  # all but the token that never got KV
    deployment.check_texts()


def test_surplus_pages_serve_the_next_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "drafted", lambda seed, tokens, n_max: Draft((39,) * 7, (-1,) * 7))
    deployment = Deployment(draft_max=7, page_size=4, pages_total=30)
    deployment.ask(0, prompt(0, 8), max_tokens=20)
    deployment.step()
    held = []
    for _ in range(12):
        deployment.step()
        held.append(len(deployment.replica.sequences[0].pages))
    # Eight rows from 8, then from 9, ...: the tree's end, once; never the tree's pages anew.
    assert held == [-(-(8 + step + 8) // 4) for step in range(12)]
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_admission_counts_one_tree_a_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "drafted", lambda seed, tokens, n_max: Draft((39,) * 8, (-1,) * 8))
    # 20 pages of 4; 8 + 28 - 1 expected rows are 9 pages, with a tree of 8 rows 11.
    deployment = Deployment(draft_max=8, page_size=4, pages_total=20, step_tokens=64)
    for seq in range(2):
        deployment.ask(seq, prompt(seq * 9, 8), max_tokens=40)
    deployment.step()
    assert deployment.planner.statistics().running == 1
    group, ratio = deployment.planner._groups[0], deployment.planner._composer.ratio
    sequence = group.running[0]
    for n_held in (2, 5, 5, 5, 5, 6):  # rows of the tree are held, then held for the next
        assert len(sequence.pages) == n_held
        assert n_held + ratio.pages_wanted(group, sequence) in (11, 12)  # as the text grows
        deployment.step()
    deployment.pump()
    deployment.check_texts()


@pytest.mark.usefixtures("drafter")
def test_drafts_leave_rows_for_prompts_and_share_what_is_left() -> None:
    deployment = Deployment(draft_max=8, page_size=4, pages_total=90, step_tokens=20)
    for seq in range(2):
        deployment.ask(seq, prompt(seq * 9, 3), max_tokens=60)
    deployment.step()
    plan = deployment.step()
    assert plan is not None
    assert trees(plan) == {0: 8, 1: 8}
    deployment.ask(2, prompt(5, 60), max_tokens=2)
    plan = deployment.step()
    assert plan is not None
    assert trees(plan) == {0: 4, 1: 5}
    assert len(plan.batches[0].rows[2].tokens) == 8
    deployment.pump()
    deployment.check_texts()


@pytest.mark.usefixtures("drafter")
def test_without_spare_pages_drafts_are_cut_and_nobody_is_retracted_for_them() -> None:
    deployment = Deployment(draft_max=8, page_size=2, pages_total=9)
    deployment.ask(0, prompt(0, 5), max_tokens=14)  # the whole pool
    deployment.pump()
    assert deployment.planner.statistics().retractions == 0
    assert any(trees(plan) for plan in deployment.plans)
    deployment.check_texts()
    deployment.check_idle()


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=3), Layout(pp=2, dp=2, tp=2)])
def test_aborts_and_retractions_drop_the_draft(layout: Layout) -> None:
    deployment = Deployment(draft_max=5, page_size=2, pages_total=14, layout=layout)
    for seq in range(6):
        deployment.planner._composer.ratio.value = 1 << 17
        deployment.ask(seq, prompt(seq * 5, 4), max_tokens=20)
    for step in range(400):
        if deployment.plan_one() is None:
            if not deployment.reports:
                break
            deployment.report_one()
        if step == 30:
            deployment.finish(1)
        for sequence in deployment.planner._sequences.values():
            assert sequence.pages or sequence.draft == NO_DRAFT
    deployment.pump()
    assert deployment.planner.statistics().retractions > 0
    deployment.check_texts()
    deployment.check_idle()


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, tp=2)])
def test_drafts_that_are_right_grow_and_those_that_are_not_cease(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(first: int) -> list[int]:
        """Of steps of two long texts, after those in which everything is new."""
        for seq in (first, first + 1):
            deployment.ask(seq, prompt(seq, 5), max_tokens=150)
        n_before = len(deployment.plans)
        deployment.pump()
        return [plan.drafting.tokens for plan in deployment.plans[n_before + 20 :]]

    deployment = Deployment(
        draft_max=7, adaptive=True, pages_total=200, layout=layout, overlap=1, step_tokens=128
    )
    deployment.micros = lambda plan: (
        1000 + 40 * sum([len(rows.tokens) for batch in plan.batches for rows in batch.rows])
    )
    monkeypatch.setattr(world, "drafted", lambda seed, tokens, n_max: Draft((39,), (-1,)))
    sizes = asked(0)
    assert sizes.count(0) > 0.7 * len(sizes)
    lagging = [rows.is_lagging for plan in deployment.plans for rows in plan.batches[0].rows]
    assert any(lagging)
    monkeypatch.setattr(world, "drafted", chain)
    asked(2)
    sizes = asked(4)
    assert sorted(sizes)[len(sizes) // 2] >= 2
    assert "7" in deployment.planner.state().draft_sizes
    deployment.check_texts()
    deployment.check_idle()


def test_a_draft_larger_than_asked_for_is_a_desync(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(draft_max=2)
    monkeypatch.setattr(
        world, "drafted", lambda seed, tokens, n_max: Draft((1, 2, 3), (-1, -1, -1))
    )
    deployment.ask(0, prompt(0, 3))
    deployment.plan_one()
    with pytest.raises(Desync, match="drafted 3 tokens, at most 2 were asked for"):
        deployment.report_one()
