"""What a rank does around the model: plans, moves of KV, who draws, and who is called at all."""

import functools
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.core.message import Admit, Batch, Commit, Rows, Sampling, StepPlan, StepReport
from aserve.core.replica import KvMove
from aserve.models.registry import Model, load_model
from aserve.planes.layer import open_thread_planes
from aserve.runner.kv_store import KvStore
from aserve.runner.runner import Runner
from aserve.tensor.ops import Linear, open_ops
from aserve.tensor.sampler import open_sampler
from aserve.text.tokenizer import load_tokenizer
from tests.models.families import prompt, saved

PAGE_SIZE, PAGES = 4, 64
NO_TOKENIZER: Any = None


class Ranks:
    """Runners of every rank of one stage, stepped together."""

    def __init__(
        self,
        layout: Layout,
        folder: pathlib.Path,
        tokenizer: Any = NO_TOKENIZER,
        pages: int = PAGES,
    ) -> None:
        self.grid = Grid(layout)
        self.ops = ops = open_ops("native", 1)
        planes = open_thread_planes(self.grid, limit_s=20.0)
        self.kv: list[KvStore] = []
        self.models: list[Model] = []
        self.runners: list[Runner] = []
        for rank in range(self.grid.world):
            model = load_model(folder, ops=ops, layout=layout, rank=rank)
            self.models.append(model)
            self.kv.append(KvStore(model.regions(), PAGE_SIZE, pages))
            sampler = open_sampler("native", ops.team)  # type: ignore[attr-defined]
            self.runners.append(Runner(model, self.kv[-1], sampler, tokenizer, planes[rank]))

    def step(self, plan: StepPlan) -> list[StepReport]:
        def run(runner: Runner) -> StepReport:
            return runner.report(plan, runner.forward(runner.apply(plan), None))

        with ThreadPoolExecutor(len(self.runners)) as pool:
            return list(pool.map(run, self.runners))


def plan(
    step: int,
    *batches: tuple[Rows, ...],
    admits: tuple[Admit, ...] = (),
    commits: tuple[Commit, ...] = (),
    drops: tuple[int, ...] = (),
) -> StepPlan:
    return StepPlan(step, 0, commits, drops, (), admits, tuple(map(Batch, batches)), ())


def greedy(**more: Any) -> Sampling:
    return Sampling(temperature=0.0, **more)


def two_steps(groups: int, sampling: Sampling) -> tuple[StepPlan, Any]:
    """A prompt of five tokens in the last group; then, given the draw, its first decode row."""
    nobody: tuple[tuple[Rows, ...], ...] = ((),) * (groups - 1)
    prompt = (5, 6, 7, 8, 9)
    first = plan(
        0,
        *nobody,
        (Rows(1, 0, prompt, (), True, (3, 1)),),
        admits=(Admit(1, prompt, 5, 0, (), sampling),),
    )

    def second(token: int) -> StepPlan:
        rows = Rows(1, 5, (token,), (), True, ())
        return plan(1, *nobody, (rows,), commits=(Commit(1, (0, 1, 2, 3, 4), (token,), False),))

    return first, second


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2), Layout(tp=2, dp=2), Layout(tp=4, dp=2, cp=2)]
)
def test_the_leader_of_a_group_alone_reports_its_results(layout: Layout) -> None:
    ranks = Ranks(layout, saved("llama")[0])
    first, second = two_steps(layout.dp, greedy(prompt_logprobs=1, logprobs=2))
    reports = ranks.step(first)
    leader = ranks.grid.leader(layout.dp - 1)
    assert [report.rank for report in reports] == list(range(ranks.grid.world))
    assert len({report.digest for report in reports}) == 1
    assert [len(report.results) for report in reports] == [
        int(rank == leader) for rank in range(ranks.grid.world)
    ]
    (result,) = reports[leader].results
    assert result.seq == 1
    assert [told.token for told in result.prompt_logprobs] == [6, 7, 8, 9]
    later = ranks.step(second(result.tokens[0]))
    expected = _of_one_rank()
    assert (result, later[leader].results) == expected


@functools.cache
def _of_one_rank() -> tuple[Any, Any]:
    alone = Ranks(Layout(), saved("llama")[0])
    first, second = two_steps(1, greedy(prompt_logprobs=1, logprobs=2))
    (result,) = alone.step(first)[0].results
    return result, alone.step(second(result.tokens[0]))[0].results


def prompts_told(layout: Layout) -> dict[int, Any]:
    """Results of a step in which three sequences want logprobs of their prompts, one does not."""
    lengths, groups = {1: 70, 2: 9, 3: 80, 4: 30}, [[] for _ in range(layout.dp)]  # type: ignore[var-annotated]
    admits, page = [], 0
    for seq, length in lengths.items():
        tokens = tuple(prompt(length, seed=seq))
        pages = tuple(range(page, page := page - (-length // PAGE_SIZE)))
        wanted = -1 if seq == 2 else seq % 3
        admits.append(Admit(seq, tokens, length, 0, (), greedy(prompt_logprobs=wanted)))
        rows = Rows(seq, 0, tokens, (), True, pages)
        groups[seq % layout.dp].append(rows)
    reports = Ranks(layout, saved("llama")[0]).step(
        plan(0, *map(tuple, groups), admits=tuple(admits))
    )
    results = {result.seq: result for report in reports for result in report.results}
    assert {seq: len(result.prompt_logprobs) for seq, result in results.items()} == {
        seq: 0 if seq == 2 else length - 1 for seq, length in lengths.items()
    }
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(tp=2, dp=2),
        Layout(tp=2, cp=2, cp_split="zigzag"),
        Layout(tp=4, dp=2, cp=2),
        Layout(tp=4, dp=4),
    ],
)
def test_prompt_logprobs_are_told_however_many_rounds_they_take(layout: Layout) -> None:
    """177 rows are more than go through the head at once, and rounds do not end with sequences."""
    assert prompts_told(layout) == _told_by_one_rank()


@functools.cache
def _told_by_one_rank() -> dict[int, Any]:
    return prompts_told(Layout())


def test_a_stage_without_rows_calls_nobody() -> None:
    """Rank 0 of two returns although rank 1 is not there."""
    runner = Ranks(Layout(pp=2, tp=2), saved("llama")[0]).runners[0]
    outward = runner.forward(runner.apply(plan(0, ())), None)
    assert outward.results == ()
    assert outward.bundle["hidden"].shape == (0, 64)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, cp=2)])
def test_only_rows_that_draw_reach_the_head(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(layout, saved("llama")[0])
    heads, linear, n_rows = [model.head for model in ranks.models], ranks.ops.linear, []

    def counted(x_TK: Tensor, weight: Linear) -> Tensor:
        if any(weight is head for head in heads):
            n_rows.append(len(x_TK))
        return linear(x_TK, weight)

    monkeypatch.setattr(ranks.ops, "linear", counted)
    lengths = {1: 5, 2: 8, 3: 3}  # the second is not through with its prompt
    admits = [Admit(n, tuple(prompt(k, seed=n)), k, 0, (), greedy()) for n, k in lengths.items()]
    chunks = [
        Rows(admit.seq, 0, admit.tokens[:5], (), admit.seq != 2, (2 * admit.seq, 1 + 2 * admit.seq))
        for admit in admits
    ]
    ranks.step(plan(0, tuple(chunks), admits=tuple(admits)))
    assert n_rows == [2] * ranks.grid.world
    n_rows.clear()
    ranks.step(plan(1, (Rows(2, 5, admits[1].tokens[5:7], (), False, ()),)))
    assert n_rows == [], "a step without a draw has no use for logits"


def test_a_stage_says_what_it_takes_from_the_one_before() -> None:
    ranks = Ranks(Layout(pp=2, tp=2, cp=2), saved("llama")[0])
    first, _ = two_steps(1, greedy())
    inward = [runner.apply(first).inward for runner in ranks.runners]
    assert inward[:2] == [{}, {}]
    shapes = [{"hidden": ((n_rows, 64), torch.float32)} for n_rows in (3, 2)]
    assert inward[2:] == shapes, "five rows over two ranks"


def test_kv_moves_in_every_layer_of_the_own_group_before_the_rows() -> None:
    ranks = Ranks(Layout(tp=2, dp=2), saved("llama")[0])
    for store in ranks.kv:
        for layer, pool in enumerate(store.layers):
            slots = torch.arange(PAGES * PAGE_SIZE, dtype=torch.float32) + 100 * layer
            pool.k_PSHD.copy_(slots.view(PAGES, PAGE_SIZE, 1, 1).expand_as(pool.k_PSHD))
            pool.v_PSHD.copy_(-pool.k_PSHD)
    moves = (KvMove(1, 0, (5, 6), (4, 5)), KvMove(2, 1, (9,), (3,)), KvMove(3, 0, (20,), (30,)))
    for runner in ranks.runners:
        runner.forward(runner.work(0, (), moves), None)
    expected = ({4: 5, 5: 6, 30: 20}, {3: 9})
    for store, moved in zip(ranks.kv, expected, strict=True):
        for layer, pool in enumerate(store.layers):
            k = pool.k_PSHD.reshape(PAGES * PAGE_SIZE, -1)[:, 0] - 100 * layer
            wanted = [moved.get(slot, slot) for slot in range(PAGES * PAGE_SIZE)]
            assert k.tolist() == wanted
            assert torch.equal(pool.v_PSHD, -pool.k_PSHD)


def test_only_a_leader_compiles_grammars(
    tiny_model_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aserve.core.config import Limits
    from aserve.core.request import StructuredOutput
    from aserve.text import grammar

    compiled: list[int] = []
    compile_grammar = grammar.compile
    monkeypatch.setattr(
        grammar,
        "compile",
        lambda *args, **kwargs: compiled.append(1) or compile_grammar(*args, **kwargs),
    )
    ranks = Ranks(Layout(tp=2), tiny_model_path, load_tokenizer(tiny_model_path))
    checked = grammar.check(StructuredOutput(regex="[0-9]{3}"), Limits())
    first, _ = two_steps(1, greedy(grammar=checked))
    reports = ranks.step(first)
    (result,) = reports[0].results
    assert result.error is None
    assert reports[1].results == ()
    assert len(compiled) == 1
