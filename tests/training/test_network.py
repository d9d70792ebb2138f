"""Training's arithmetic: unrolled steps against the plain reference, losses against their sums."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from aserve.models.eagle_spec import HeadSpec, read_spec
from aserve.models.registry import load_spec
from aserve.models.weights.source import Entry
from aserve.training.network import Network
from aserve.training.objective import Batch, Goal, SoftCrossEntropy, loss
from aserve.training.start import Ends, first_weights
from tests.models import heads
from tests.models.families import VOCAB, saved
from tests.training.texts import Oracle

BATCH, LENGTH, STEPS = 2, 9, 3


def spec_of(oracle: Oracle) -> HeadSpec:
    entries = {name: Entry(tuple(w.shape), "F32", 0) for name, w in oracle.w.items()}
    return read_spec(oracle.config, entries, load_spec(saved("llama")[0]), "a head")


def batch(oracle: Oracle, seed: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    ids[1, 7:] = -1
    wanted = torch.ones(BATCH, LENGTH)
    wanted[:, :3] = 0
    wanted[0, 4] = 0.3
    wanted[1, 7:] = 0
    usable = torch.ones(BATCH, LENGTH)
    usable[0, 5] = 0
    shape = (BATCH, LENGTH, oracle.feature_len())
    return Batch(
        ids_BL=ids,
        wanted_BL=wanted,
        features_BLF=torch.randn(shape, generator=generator),
        hidden_BLH=torch.randn(BATCH, LENGTH, heads.HIDDEN, generator=generator),
        usable_BL=usable,
    )


def chain_row(oracle: Oracle, row: Batch, number: int, place: int, step: int) -> Tensor:
    """The head's row of a chain of `step` true tokens below the pair at `place`."""
    ids = row.ids_BL[number].clamp(min=0)
    hidden = row.features_BLF[number, : place + 1]
    if oracle.method == "eagle3":
        hidden = hidden @ oracle.w["fc.weight"].T
    rows = heads.eagle_rows if oracle.method == "eagle" else heads.eagle3_rows
    for length in range(step + 1):
        count = place + 1 + length
        where = (torch.arange(count), torch.ones(count, count, dtype=torch.bool).tril())
        out = rows(oracle.w, oracle.table[ids[1 : count + 1]], hidden, where)
        hidden = torch.cat((hidden, out[-1:]))
    return out[-1]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@torch.no_grad()
def test_unrolled_steps_are_chains_below_each_pair(method: str) -> None:
    oracle = Oracle(method)
    network, given = Network(spec_of(oracle), oracle.table), batch(oracle)
    ids_BT, features = given.ids_BL[:, 1:].clamp(min=0), given.features_BLF[:, :-1]
    for step, hidden in enumerate(network.unroll(oracle.w, ids_BT, features, STEPS)):
        for place in range(LENGTH - 1 - step):
            expected = chain_row(oracle, given, 0, place, step)
            torch.testing.assert_close(hidden[0, place], expected, rtol=2e-4, atol=2e-4)


@torch.no_grad()
def test_the_loss_of_eagle3_is_the_published_sum() -> None:
    oracle = Oracle("eagle3")
    network, given = Network(spec_of(oracle), oracle.table), batch(oracle)
    head_rows = oracle.target_head.detach()[oracle.ids]
    found = loss(Goal(network, head_rows, STEPS), oracle.w, given, torch.Generator())
    expected = 0.0
    for step in range(STEPS):
        total = count = 0.0
        for number in range(BATCH):
            for place in range(LENGTH - 2 - step):
                at = place + step + 1  # where the target's distribution stands
                weight = float(given.wanted_BL[number, at + 1] * given.usable_BL[number, at])
                if not weight:
                    continue
                wished = (head_rows @ given.hidden_BLH[number, at]).softmax(-1)
                row = chain_row(oracle, given, number, place, step)
                normed = heads.rms(row, oracle.w["norm.weight"])
                ours = (oracle.w["lm_head.weight"] @ normed).log_softmax(-1)
                total += weight * -float((wished * ours).sum())
                count += weight
        expected += 0.8**step * total / count
    assert float(found) == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_the_loss_of_eagle_is_regression_and_a_tenth_of_distillation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aserve.training.objective.NOISE", 0.0)
    oracle = Oracle("eagle")
    network, given = Network(spec_of(oracle), oracle.table), batch(oracle)
    head = oracle.target_head.detach()
    found = loss(Goal(network, head, 1), oracle.w, given, torch.Generator())
    total = count = 0.0
    for number in range(BATCH):
        for at in range(1, LENGTH - 1):
            weight = float(given.wanted_BL[number, at + 1] * given.usable_BL[number, at])
            row, wished = chain_row(oracle, given, number, at - 1, 0), given.hidden_BLH[number, at]
            apart = -((head @ wished).softmax(-1) * (head @ row).log_softmax(-1)).sum()
            total += weight * float(functional.smooth_l1_loss(row, wished) + 0.1 * apart)
            count += weight
    assert float(found) == pytest.approx(total / count, rel=1e-4)


def test_cross_entropy_in_parts_has_the_gradient_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aserve.training.objective.CHUNK", 3)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 8, generator=generator, requires_grad=True)
    wished, head = torch.randn(7, 8, generator=generator), torch.randn(20, 8, generator=generator)
    counts = torch.rand(7, generator=generator)
    head.requires_grad_()
    p = (wished @ head.T).softmax(-1).detach()
    value = SoftCrossEntropy.apply(rows, head, p.__getitem__, counts)
    gradients = torch.autograd.grad(2 * value, (rows, head))
    whole = (functional.cross_entropy(rows @ head.T, p, reduction="none") * counts).sum()
    torch.testing.assert_close(value, whole)
    torch.testing.assert_close(gradients, torch.autograd.grad(2 * whole, (rows, head)))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_starts_as_one_that_repeats_the_target(method: str) -> None:
    oracle = Oracle(method)
    spec = spec_of(oracle)
    norm = torch.rand(heads.HIDDEN) + 0.5
    rows = torch.randn(spec.draft_vocab, heads.HIDDEN)
    weights = first_weights(spec, Ends(norm, rows), torch.Generator().manual_seed(0))
    assert {n: w.shape for n, w in weights.items()} == {
        n: w.shape for n, w in oracle.w.items() if n not in ("d2t", "t2d")
    }
    network, given = Network(spec, oracle.table.detach()), batch(oracle)
    ids, features = given.ids_BL[:, 1:].clamp(min=0), given.features_BLF[:, :-1]
    (hidden,) = network.unroll(weights, ids, features, 1)
    last = features[..., -heads.HIDDEN :]
    assert float(functional.cosine_similarity(hidden, last, dim=-1).min()) > 0.8
