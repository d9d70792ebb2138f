"""`aserve bench quality`: what it counts, prints and refuses, with the engine on a tiny model."""

import json
import math
import pathlib
from collections.abc import Sequence

import pytest
import torch
import transformers

from aserve.bench import quality
from aserve.cli import bench
from aserve.cli.outcome import UsageError
from aserve.core.message import TokenLogprob
from aserve.text.tokenizer import load_tokenizer


def test_windows_are_the_first_tokens_in_pieces() -> None:
    tokens = list(range(100))
    assert quality.windows(tokens, 10, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert quality.windows(tokens, 9, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]], "one token says nothing"
    with pytest.raises(ValueError, match="--tokens is 101, the text has 100"):
        quality.windows(tokens, 101, 4)


def test_a_row_is_ratio_error_and_agreement() -> None:
    base = [(-1.0, 3), (-2.0, 4), (-3.0, 5), (-2.0, 6)]
    same = quality.row_of("bf16", 10, base, base)
    assert (same.ratio, same.ratio_error, same.same_first) == (1.0, 0.0, 1.0)
    assert same.perplexity == pytest.approx(math.exp(2))
    worse = quality.row_of("q4", 5, [(-1.5, 3), (-2.5, 9), (-3.5, 5), (-2.5, 6)], base)
    assert worse.ratio == pytest.approx(math.exp(0.5))
    assert worse.ratio_error == pytest.approx(0)
    assert worse.same_first == 0.75
    assert quality.row_of("q4", 5, base, None).ratio is None


def test_the_first_token_of_a_window_has_no_probability() -> None:
    given: Sequence[TokenLogprob | None] = (None, TokenLogprob(5, -1.5, ((7, -0.5),)))
    assert quality.scored(given) == [(-1.5, 7)]


def test_the_text_is_long_prose() -> None:
    assert len(quality.text()) > 50_000
    assert "the" in quality.text().split()


def test_words_that_are_no_type_are_refused() -> None:
    with pytest.raises(UsageError, match="--weights 'q5' is unknown: use some of keep, bf16"):
        bench.run(["quality", "--weights", "bf16,q5"])
    with pytest.raises(UsageError, match="--tokens is at least 2"):
        bench.run(["quality", "--tokens", "1"])


@pytest.mark.slow
def test_perplexity_is_that_of_transformers(
    tiny_model_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(tiny_model_path), "--tokens", "150", "--json"]
    assert bench.run(["quality", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["weights"]: row for row in found["rows"]}
    assert list(rows) == ["keep", "bf16", "int8", "q4"]
    sizes = [row["weight_bytes"] for row in rows.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert rows["bf16"]["ratio"] == rows["bf16"]["same_first"] == 1
    assert rows["int8"]["ratio"] == pytest.approx(1, abs=0.02)

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    tokens = load_tokenizer(tiny_model_path).encode(quality.text())
    length = min(quality.WINDOW_LEN, model.config.max_position_embeddings - 1)
    losses: list[float] = []
    for window in quality.windows(tokens, 150, length):
        with torch.no_grad():
            logits = model(torch.tensor([window])).logits[0, :-1]
        wanted = torch.tensor(window[1:])
        losses += torch.nn.functional.cross_entropy(logits, wanted, reduction="none").tolist()
    perplexity = math.exp(sum(losses) / len(losses))
    assert rows["keep"]["perplexity"] == pytest.approx(perplexity, rel=0.02)


@pytest.mark.slow
def test_people_get_a_table(
    tiny_model_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(tiny_model_path), "--tokens", "60", "--weights", "q4,bf16"]
    assert bench.run(["quality", *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| --weights | MB in memory | perplexity")
    assert [line.split("|")[1].strip() for line in lines[4:6]] == ["q4", "bf16"]
    assert "+-" in lines[4]
    assert "100.0%" in lines[5]
