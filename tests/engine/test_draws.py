"""What a sequence remembers between draws comes back whole when it is resumed."""

import pathlib
from functools import partial

import numpy as np
import pytest

from aserve.core.config import Limits
from aserve.core.message import Admit, Sampling
from aserve.core.replica import SequenceState
from aserve.core.request import StructuredOutput
from aserve.runner.drawing import progressions
from aserve.runner.draws import Draws
from aserve.tensor.sampler import SampleRow
from aserve.text import grammar
from aserve.text.tokenizer import load_tokenizer


@pytest.mark.parametrize("split", [0, 1, 2])
def test_a_resumed_grammar_stands_where_it_was(tiny_model_path: pathlib.Path, split: int) -> None:
    tokenizer = load_tokenizer(tiny_model_path)
    compile_grammar = partial(grammar.compile, tokenizer=tokenizer, vocab=tokenizer.vocab_size)
    checked = grammar.check(StructuredOutput(regex="[0-9]{2}x"), Limits())
    prompt, written = tokenizer.encode("x"), tokenizer.encode("12", False)
    assert len(written) == 2

    def resumed(n_written: int) -> tuple[SequenceState, Draws]:
        tokens = (*prompt, *written[:n_written])
        admit = Admit(1, tokens, len(prompt), 0, (), Sampling(grammar=checked))
        return SequenceState(admit), Draws(compile_grammar)

    state, draws = resumed(split)
    row = draws.row(state, len(state.tokens))
    for token in written[split:]:
        state.tokens.append(token)
        row = draws.row(state, len(state.tokens))
    assert isinstance(row, SampleRow)
    assert row.mask is not None
    fresh = compile_grammar(checked)
    assert fresh.accept_all(written)
    expected = fresh.mask()
    assert expected is not None
    assert np.array_equal(row.mask, expected)
    assert row.history.generated_len == 2


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([4], [range(4, 5)]),
        ([0, 1, 2, 3], [range(4)]),
        ([1, 9, 17, 25], [range(1, 26, 8)]),
        ([0, 8, 9, 10, 30], [range(0, 9, 8), range(9, 11), range(30, 31)]),
    ],
)
def test_rows_of_logits_are_taken_in_few_views(places: list[int], expected: list[range]) -> None:
    found = list(progressions(places))
    assert found == expected
    assert [place for run in found for place in run] == places
