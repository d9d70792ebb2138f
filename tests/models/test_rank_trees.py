"""Trees of drafts on ranks, by hand: the text is that of a rank which never heard of drafts."""

import functools
import pathlib
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from aserve.core.config import Layout, Limits
from aserve.core.message import Admit, Commit, Drafting, Result, Rows, Sampling, StepReport
from aserve.core.request import StructuredOutput
from aserve.core.tree import Draft, row_parents
from aserve.models.registry import Model
from aserve.testing.drafts import draft
from aserve.text import grammar
from aserve.text.tokenizer import Tokenizer, load_tokenizer
from tests.models import families
from tests.models.test_rank_steps import Ranks, plan

PROMPT = "Once upon a time the dog"
LEN = 20  # tokens of each text
PAGES_EACH = 12
PAGES = 8 * PAGES_EACH


class Spoken(NamedTuple):
    """What one sequence said, and in how many draws below its prompt."""

    results: tuple[tuple[int, Any], ...]  # token, logprob
    error: str | None
    n_steps: int

    @property
    def tokens(self) -> list[int]:
        return [token for token, _ in self.results]


class Speaker:
    """One sequence as a planner would have it; `right` is what it is to say, if drafts are made."""

    def __init__(self, seq: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self.seq, self.sampling = seq, sampling
        self.tokens, self.prompt_len = list(prompt), len(prompt)
        self.pages = tuple(range(PAGES_EACH * seq, PAGES_EACH * (seq + 1)))
        self.told: list[tuple[int, Any]] = []
        self.error: str | None = None
        self.n_steps = 0
        self.rows: Rows | None = None

    def admit(self) -> Admit:
        return Admit(self.seq, tuple(self.tokens), self.prompt_len, 0, (), self.sampling)

    def next_rows(self, kind: str, right: Sequence[int]) -> Rows:
        if self.rows is None:
            self.rows = Rows(self.seq, 0, tuple(self.tokens), (), True, self.pages)
            return self.rows
        start = len(self.tokens) - 1
        drafted = self._draft(kind, right[len(self.told) :])
        tokens = (self.tokens[-1], *drafted.tokens)
        parents = row_parents(drafted) if drafted.tokens else ()
        self.rows = Rows(self.seq, start, tokens, parents, True, ())
        return self.rows

    def _draft(self, kind: str, right: Sequence[int]) -> Draft:
        n_max = min(7, LEN - len(self.told) - 1)
        random = Random(100 * self.seq + len(self.told))
        if kind == "none" or n_max < 1:
            return Draft((), ())
        if kind == "chain":
            n_right = random.randint(0, n_max)
            wrong = [3] * (n_max - n_right)
            tokens = (*right[:n_right], *wrong)[:n_max]
            return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)))
        return Draft(*draft(random, right, Drafting(n_max, 3, n_max), 64))

    def take(self, result: Result) -> Commit | None:
        self.error = result.error
        if result.error is not None:
            return None
        assert self.rows is not None
        told = result.logprobs or (None,) * len(result.tokens)
        self.told += zip(result.tokens, told, strict=True)
        self.tokens += result.tokens
        self.n_steps += 1
        return Commit(self.seq, result.path, result.tokens, False)


def spoken(
    ranks: Ranks,
    asked: Sequence[Sampling],
    kind: str,
    right: Sequence[Sequence[int]],
    prompt: Sequence[int],
) -> list[Spoken]:
    """Of one sequence for each of `asked`, all in one batch, dealt out to the DP groups."""
    groups = ranks.grid.dp
    speakers = [Speaker(seq, prompt, sampling) for seq, sampling in enumerate(asked)]
    admits, commits, step = tuple([one.admit() for one in speakers]), [], 0
    while going := [one for one in speakers if len(one.told) < LEN and one.error is None]:
        batches: list[list[Rows]] = [[] for _ in range(groups)]
        for one in going:
            batches[one.seq % groups].append(one.next_rows(kind, right[one.seq]))
        kept = [commit for commit in commits if commit.seq in {one.seq for one in going}]
        reports = ranks.step(plan(step, *map(tuple, batches), admits=admits, commits=tuple(kept)))
        commits = [commit for one in going if (commit := one.take(_result(reports, one.seq)))]
        admits, step = (), step + 1
    return [Spoken(tuple(one.told), one.error, one.n_steps) for one in speakers]


def _result(reports: Sequence[StepReport], seq: int) -> Result:
    (found,) = [one for report in reports for one in report.results if one.seq == seq]
    return found


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: pathlib.Path) -> Tokenizer:
    return load_tokenizer(tiny_model_path)


def asked_of(regex: str) -> tuple[Sampling, ...]:
    checked = grammar.check(StructuredOutput(regex=regex), Limits())
    return (
        Sampling(temperature=0.0, logprobs=2),
        Sampling(seed=1, temperature=0.8, logprobs=0),
        Sampling(seed=2, temperature=0.7, top_k=20, repetition_penalty=1.3),
        Sampling(seed=3, presence_penalty=0.6, frequency_penalty=0.4, min_p=0.01, top_p=0.9),
        Sampling(seed=4, logit_bias=((70, 4.0), (71, 4.0)), bad_words=((70, 71), (71, 71))),
        Sampling(seed=5, logit_bias=((2, 6.0),), min_tokens=12, stop_ids=(2,)),
        Sampling(seed=6, grammar=checked, logprobs=1),
        Sampling(temperature=0.0, grammar=checked),
    )


ASKED = asked_of("[a-z ]{200}")


class Case(NamedTuple):
    """A model, what it is asked, and a tokenizer where a grammar is among that."""

    folder: pathlib.Path
    tokenizer: Tokenizer | None
    prompt: tuple[int, ...]
    asked: tuple[Sampling, ...]

    def ranks(self, layout: Layout = Layout()) -> Ranks:  # noqa: B008
        return Ranks(layout, self.folder, self.tokenizer, PAGES)


@pytest.fixture(scope="module")
def tiny(tiny_model_path: pathlib.Path, tokenizer: Tokenizer) -> Case:
    return Case(tiny_model_path, tokenizer, tuple(tokenizer.encode(PROMPT)), ASKED)


def of_family(name: str) -> Case:
    free = tuple([sampling for sampling in ASKED if sampling.grammar is None])
    return Case(families.saved(name)[0], None, tuple(families.prompt(7)), free)


@functools.cache
def alone(case: Case) -> list[Spoken]:
    return spoken(case.ranks(), case.asked, "none", [()] * len(case.asked), case.prompt)


def check_same(layout: Layout, kind: str, case: Case) -> list[int]:
    expected = alone(case)
    right = [one.tokens for one in expected]
    found = spoken(case.ranks(layout), case.asked, kind, right, case.prompt)
    for one, other in zip(found, expected, strict=True):
        assert one.error is other.error is None
        assert one.results == other.results
        assert one.n_steps < other.n_steps - 3, "drafts were accepted"
    return [one.n_steps for one in found]


@functools.cache
def steps_of_one_rank(kind: str, case: Case) -> list[int]:
    return check_same(Layout(), kind, case)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_drafts_change_no_text(kind: str, tiny: Case) -> None:
    check_same(Layout(), kind, tiny)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(tp=2, dp=2),
        Layout(tp=2, cp=2),
        Layout(tp=2, cp=2, cp_split="zigzag"),
        Layout(tp=4, dp=2, cp=2),
        Layout(tp=4, dp=4),
    ],
)
def test_drafts_change_no_text_in_any_layout(layout: Layout, kind: str, tiny: Case) -> None:
    assert check_same(layout, kind, tiny) == steps_of_one_rank(kind, tiny)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=3),
        Layout(tp=3, dp=3),
        Layout(tp=3, cp=3),
        Layout(tp=6, cp=3, dp=2),
        Layout(tp=4, ep=2, moe_dp=2),
        Layout(tp=4, dp=2, ep=4, experts="all_to_all"),
    ],
)
def test_drafts_change_no_text_where_experts_are_split(layout: Layout) -> None:
    case = of_family("divisible-moe")
    assert check_same(layout, "tree", case) == steps_of_one_rank("tree", case)


@pytest.mark.slow
@pytest.mark.parametrize("name", families.FAMILIES)
def test_drafts_change_no_text_of_any_family(name: str) -> None:
    check_same(Layout(), "tree", of_family(name))


def test_the_right_token_below_a_wrong_one_is_not_entered(tiny: Case) -> None:
    right = alone(tiny)[0].tokens
    wrong = (right[1] + 1) % 64
    ranks, first = tiny.ranks(), Speaker(0, tiny.prompt, tiny.asked[0])
    reports = ranks.step(plan(0, (first.next_rows("none", ()),), admits=(first.admit(),)))
    commit = first.take(_result(reports, 0))
    assert commit is not None
    tokens = (right[0], wrong, right[1], right[2], right[3], right[2])
    rows = Rows(0, len(tiny.prompt), tokens, (-1, 0, 0, 1, 1, 2), True, ())
    result = _result(ranks.step(plan(1, (rows,), commits=(commit,))), 0)
    assert (result.path, result.tokens) == ((0, 2, 5), tuple(right[1:4]))


def test_a_draft_that_the_grammar_cannot_follow_is_a_dead_end(
    tiny: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token before it goes out first, then the error comes: as without drafts."""
    right = [one.tokens for one in alone(tiny)]
    mask = grammar.GrammarMatcher.mask
    calls: list[int] = []

    def failing(self: Any) -> Any:
        calls.append(1)
        return None if len(calls) % 4 == 0 else mask(self)

    monkeypatch.setattr(grammar.GrammarMatcher, "mask", failing)
    monkeypatch.setattr(grammar.GrammarMatcher, "error", "it broke")
    asked = tiny.asked[-1]
    (plain,) = spoken(tiny.ranks(), [asked], "none", [()], tiny.prompt)
    assert plain.error == "the grammar cannot go on: it broke"
    assert len(plain.tokens) == 3
    rest = right[-1]
    calls.clear()
    ranks, first = tiny.ranks(), Speaker(0, tiny.prompt, asked)
    reports = ranks.step(plan(0, (first.next_rows("none", ()),), admits=(first.admit(),)))
    commit = first.take(_result(reports, 0))
    assert commit is not None
    tokens = (first.tokens[-1], *rest[1:5])
    rows = Rows(0, len(tiny.prompt), tokens, (-1, 0, 1, 2, 3), True, ())
    result = _result(ranks.step(plan(1, (rows,), commits=(commit,))), 0)
    assert (result.path, result.tokens, result.error) == ((0, 1), tuple(rest[1:3]), None)
    assert [token for token, _ in plain.results] == rest[:3]


def test_logits_of_all_rows_of_trees_come_in_one_call(
    tiny: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_rows: list[int] = []
    logits = Model.logits

    def counted(self: Model, hidden_WH: torch.Tensor, *given: Any) -> torch.Tensor:
        n_rows.append(len(hidden_WH))
        return logits(self, hidden_WH, *given)

    monkeypatch.setattr(Model, "logits", counted)
    ranks = tiny.ranks()
    speakers = [Speaker(seq, tiny.prompt, ASKED[0]) for seq in range(3)]
    first = tuple([one.next_rows("none", ()) for one in speakers])
    reports = ranks.step(plan(0, first, admits=tuple([one.admit() for one in speakers])))
    commits = [one.take(_result(reports, one.seq)) for one in speakers]
    start = len(tiny.prompt)
    rows = (
        Rows(0, start, (speakers[0].tokens[-1], 5, 6), (-1, 0, 0), True, ()),
        Rows(1, start, (speakers[1].tokens[-1],), (), True, ()),
        Rows(2, start, (speakers[2].tokens[-1], 5, 6, 7), (-1, 0, 1, 2), True, ()),
    )
    ranks.step(plan(1, rows, commits=tuple([one for one in commits if one is not None])))
    assert n_rows == [3, 8]
