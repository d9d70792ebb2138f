"""All ranks of a layout as threads, led through one script of steps; and what their logits were."""

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from aserve.core.layout import Grid
from aserve.core.message import Admit, Rows, Sampling, TokenLogprob
from aserve.core.replica import RowsView, SequenceState
from aserve.errors import PlaneError
from aserve.models.decoder import Model
from aserve.planes.layer import LayerEnd, open_thread_planes
from aserve.runner.kv_store import KvStore
from aserve.runner.runner import Runner
from aserve.tensor.sampler import Drawn, SampleRow
from tests.models.families import prompt

PAGE_SIZE, PAGES = 4, 64
LIMIT_S = 30.0

Logits = dict[tuple[int, ...], Tensor]  # (seq, position), or the tokens a chunk predicts


class Piece(NamedTuple):
    """Rows of one sequence in one step."""

    seq: int
    start: int
    n_rows: int
    sample: bool = True


class Text(NamedTuple):
    """A sequence whose tokens are known beforehand, so that no draw can hide a wrong logit."""

    tokens: tuple[int, ...]
    prompt_len: int
    pages: tuple[int, ...]
    prompt_logprobs: int = -1


class Script(NamedTuple):
    texts: Sequence[Text]
    steps: Sequence[Sequence[Piece]]

    def groups(self, dp: int) -> list[int]:
        """The DP group of each sequence; the last of three or more groups never has any.

        Sequences that share pages share a group.
        """
        return [text.pages[0] % max(min(dp, 2), dp - 1) for text in self.texts]


def mixed_script(more: int = 0) -> Script:
    """Chunked prompts, decode rows, a shared prefix, prompt logprobs; steps where half are idle.

    The longest chunk has 15 rows and `more`.
    """
    end = 23 + more
    lengths = ((end + 3, end, -1), (8, 5, -1), (14, 11, 0), (3, 1, -1), (15, 13, -1))
    texts, page = [], 0
    for seq, (length, prompt_len, wanted) in enumerate(lengths):
        n_pages = -(-length // PAGE_SIZE)
        # Neighbours in a table are far apart in memory.
        pages = tuple((7 * at + 3) % PAGES for at in range(page, page + n_pages))
        page += n_pages
        texts.append(Text(tuple(prompt(length, seed=seq)), prompt_len, pages, wanted))
    assert page <= PAGES
    first, last = texts[0], texts[4]
    texts[4] = last._replace(
        tokens=first.tokens[:8] + last.tokens[8:], pages=first.pages[:2] + last.pages[2:]
    )
    steps = (
        (Piece(0, 0, 8, sample=False), Piece(1, 0, 5)),
        (Piece(1, 5, 1), Piece(0, 8, 15 + more), Piece(2, 0, 7, sample=False)),
        (Piece(0, end, 1), Piece(2, 7, 4), Piece(3, 0, 1)),
        (Piece(4, 8, 5), Piece(0, end + 1, 1), Piece(2, 11, 1)),
        (Piece(0, end + 2, 1), Piece(1, 6, 1), Piece(2, 12, 1), Piece(3, 1, 1), Piece(4, 13, 1)),
        (Piece(1, 7, 1),),
    )
    return Script(texts, steps)


class Recorder:
    """A sampler that keeps every logit it is given, and draws what stands in the script."""

    def __init__(self, script: Script) -> None:
        self.logits: Logits = {}
        self._texts = script.texts

    def sample(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[Drawn]:
        assert len(logits_RV) == len(rows)
        drawn = []
        for logits_V, row in zip(logits_RV, rows, strict=True):
            seq = row.history.sampling.seed
            self._keep((seq, row.position), logits_V)
            follows = self._texts[seq].tokens[row.position : row.position + 1]
            drawn.append(Drawn(follows[0] if follows else 0))
        return drawn

    def logprobs(
        self, logits_RV: Tensor, targets: Sequence[int], wanted: int
    ) -> list[TokenLogprob | None]:
        self._keep(tuple(targets), logits_RV)
        rows = zip(logits_RV, targets, strict=True)
        return [TokenLogprob(target, float(row[target]), ()) for row, target in rows]

    def _keep(self, key: tuple[int, ...], logits: Tensor) -> None:
        assert key not in self.logits, key
        self.logits[key] = logits.clone()


class Rank:
    """One rank: its runner, and its copy of every sequence."""

    def __init__(self, model: Model, layer: LayerEnd, script: Script) -> None:
        self.grid, self.layer, self.script = model.grid, layer, script
        self.recorder = Recorder(script)
        regions = model.regions()
        self.kv = kv = KvStore(regions, PAGE_SIZE, PAGES)
        for pool in kv.layers:  # a slot that is read before it is written shows in the logits
            pool.k_PSHD.fill_(torch.nan)
            pool.v_PSHD.fill_(torch.nan)
        no_tokenizer: object = None
        self.runner = Runner(model, kv, self.recorder, no_tokenizer, layer)  # type: ignore[arg-type]
        self.states = []
        for seq, text in enumerate(script.texts):
            sampling = Sampling(seed=seq, prompt_logprobs=text.prompt_logprobs)
            known = text.tokens[: text.prompt_len]
            state = SequenceState(Admit(seq, known, text.prompt_len, 0, (), sampling))
            state.pages = list(text.pages)
            self.states.append(state)

    def views(self, step: int) -> tuple[RowsView, ...]:
        groups = self.script.groups(self.grid.dp)
        views = []
        for seq, start, n_rows, sample in self.script.steps[step]:
            state, text = self.states[seq], self.script.texts[seq]
            state.tokens += text.tokens[len(state.tokens) : start + n_rows]
            tokens = text.tokens[start : start + n_rows]
            rows = Rows(seq, start, tokens, (), sample, ())
            views.append(RowsView(state, rows, groups[seq], PAGE_SIZE))
        return tuple(sorted(views, key=lambda view: view.group))


def logits_of(grid: Grid, load: Callable[[int], Model], script: Script) -> Logits:
    """Every logit that the leaders of a layout saw, all its ranks having run the script."""
    planes = open_thread_planes(grid, limit_s=LIMIT_S)
    ranks = [Rank(load(rank), planes[rank], script) for rank in range(grid.world)]
    hidden: list[queue.Queue[Mapping[str, Tensor]]] = [queue.Queue() for _ in ranks]

    def run(number: int) -> None:
        rank = ranks[number]
        for step in range(len(script.steps)):
            work = rank.runner.work(step, rank.views(step))
            inward = None
            if work.inward:
                inward = hidden[number].get(timeout=LIMIT_S)
                assert {name: x.shape for name, x in inward.items()} == {
                    name: shape for name, (shape, _) in work.inward.items()
                }
            outward = rank.runner.forward(work, inward)
            if number + grid.tp < grid.world:
                hidden[number + grid.tp].put(outward.bundle)
            _check_results(rank, work.views, outward.results, number)

    def guarded(number: int) -> None:
        try:
            run(number)
        except BaseException as error:
            for plane in planes.values():
                plane.abort(f"rank {number} failed: {error!r}")
            raise

    with ThreadPoolExecutor(grid.world) as pool:
        failures = [job.exception() for job in [pool.submit(guarded, n) for n in range(len(ranks))]]
    for wanted in (False, True):  # what went wrong first, before those it took along
        for failure in failures:
            if failure is not None and isinstance(failure, PlaneError) is wanted:
                raise failure
    merged: Logits = {}
    for rank in ranks:
        assert not merged.keys() & rank.recorder.logits.keys()
        merged |= rank.recorder.logits
    return merged


def _check_results(
    rank: Rank, views: Sequence[RowsView], results: Sequence[object], number: int
) -> None:
    """A leader answers for each of its group's rows, in order; nobody else answers."""
    dp = rank.grid.place(number).dp
    own = [view.rows.seq for view in views if view.group == dp]
    leads = number == rank.grid.leader(dp)
    assert [result.seq for result in results] == (own if leads else [])  # type: ignore[attr-defined]
