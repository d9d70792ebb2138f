"""Rows that a drafter takes in later: drafts are those of one that never waits."""

import pathlib

import pytest
import torch

from aserve.core.message import NO_DRAFTING, Drafting
from aserve.core.tree import NO_DRAFT
from aserve.runner import later
from tests.models.drafting import Serving, Told
from tests.models.test_eagle_drafter import METHODS, served
from tests.training.texts import PROMPT_LEN, Oracle

DRAFTING = Drafting(3, 2, 6)
N_PLAIN = 5  # steps without drafts


def decoded(serving: Serving, oracle: Oracle) -> list[Told]:
    """Two sequences after steps that asked for no draft, one of them begun in between."""
    told = []
    for seq in range(2):
        text, seen = oracle.text(seq, 26)
        told.append(Told(seq, [*text.tokens, 0], seen.features_TF))
    serving.step([(told[0], PROMPT_LEN)], NO_DRAFTING)
    for _ in range(2):
        serving.step([(told[0], 0)], NO_DRAFTING)
    serving.step([(told[0], 0), (told[1], PROMPT_LEN)], NO_DRAFTING)
    for _ in range(N_PLAIN):
        serving.step([(told[1], 0), (told[0], 0)], NO_DRAFTING)
    return told


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limit", [3, later.LATER_MAX])
def test_drafts_behind_rows_that_waited_are_those_behind_rows_that_did_not(
    method: str, limit: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = []
    for most in (0, limit):
        monkeypatch.setattr(later, "LATER_MAX", most)
        oracle = Oracle(method)
        serving = served(oracle, tmp_path / str(most), "native", DRAFTING)[1]
        told = decoded(serving, oracle)
        serving.step([(told[0], 0), (told[1], 0)], DRAFTING)
        drafts.append([one.draft for one in told])
    assert drafts[0] == drafts[1]
    assert NO_DRAFT not in drafts[0]


def test_rows_that_wait_are_taken_in_before_their_pages_can_be_anybody_elses(
    tmp_path: pathlib.Path,
) -> None:
    oracle = Oracle("eagle3")
    serving = served(oracle, tmp_path, "native", DRAFTING)[1]
    told = decoded(serving, oracle)
    keys_PSHD = serving.drafter._layers[0].k_PSHD  # type: ignore[attr-defined]

    def missing() -> int:
        """Of the first sequence's rows that stayed, those without KV."""
        size, pages = serving.page_size, told[0].state.pages
        slots = [pages[at // size] * size + at % size for at in range(told[0].kv_len)]
        return int(keys_PSHD.flatten(0, 1)[torch.tensor(slots)].isnan().any(-1).any(-1).sum())

    assert missing() == N_PLAIN
    serving.drafter.drop(0)
    assert missing() == 0
