"""The loads that every engine gets alike, the rows they fill, and what one measurement saw."""

import dataclasses
from typing import NamedTuple

PROMPT_LEN, OUTPUT_LEN = 128, 128
TTFT_OUTPUT_LEN = 8  # some engines send nothing before they have a few tokens; all are asked alike
PREFILL_LENS = (512, 2048)
# A prefill or a first token takes a fraction of a second: a turn takes the median of several.
REPEATS = {"prefill": 3, "ttft": 5, "decode": 1}


@dataclasses.dataclass(frozen=True)
class Load:
    """`streams` requests at once, each `prompt_len` tokens in and `output_len` out."""

    streams: int
    prompt_len: int
    output_len: int


class Measured(NamedTuple):
    """`seconds` from the first request to the last token; `ttft_s` is the first request's."""

    seconds: float
    ttft_s: float
    prompt_tokens: int
    output_tokens: int


class Row(NamedTuple):
    """One number of the table: `kind` says which quantity of a measurement it is."""

    name: str
    kind: str  # decode, prefill, ttft or rss
    load: Load
    unit: str
    more_is_better: bool

    def value(self, seen: Measured) -> float:
        """Tokens a second (of the output in decode, of the prompt in prefill), or milliseconds."""
        if self.kind == "decode":
            return seen.output_tokens / seen.seconds
        if self.kind == "prefill":
            return seen.prompt_tokens / seen.seconds
        assert self.kind == "ttft", self.kind
        return seen.ttft_s * 1e3

    def is_better(self, value: float, than: float) -> bool:
        return value > than if self.more_is_better else value < than


# A first turn after another engine's finds that engine's data in the caches.
WARM_UP = Load(1, 32, 4)
RSS = "rss_mb"


def rows_of(streams: list[int], scale: float = 1.0) -> list[Row]:
    """The rows in the order they are measured; `scale` below 1 shortens the loads (a smoke run)."""

    def short(length: int) -> int:
        return max(4, round(length * scale))

    rows = [
        Row(f"decode_{n}", "decode", Load(n, short(PROMPT_LEN), short(OUTPUT_LEN)), "tok/s", True)
        for n in streams
    ]
    rows += [
        Row(f"prefill_{n}", "prefill", Load(1, short(n), 1), "tok/s", True) for n in PREFILL_LENS
    ]
    first = Load(1, short(PROMPT_LEN), TTFT_OUTPUT_LEN)
    rows.append(Row(f"ttft_{PROMPT_LEN}", "ttft", first, "ms", False))
    # Resident memory is read after the decode row of most streams: it has no load of its own.
    rows.append(Row(RSS, "rss", Load(0, 0, 0), "MB", False))
    return rows
