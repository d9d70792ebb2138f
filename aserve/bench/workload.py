"""What a load test asks: prompts and outputs of chosen lengths, and when; all seeded."""

import pathlib
import random
from typing import NamedTuple

# Short, common words: one token each in most vocabularies.
TEXT = """\
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line
end member law car city community name president team minute idea kid body information back
parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education
"""
WORDS = TEXT.split()
ID_LOW = 256  # below lie special tokens and single bytes in most vocabularies


class Span(NamedTuple):
    """A length drawn uniformly from low..high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Span":
        """`128` or `64:256`."""
        low, _, high = text.partition(":")
        span = cls(int(low), int(high or low))
        if not 1 <= span.low <= span.high:
            raise ValueError(f"{text!r} is not a length like 128 or 64:256")
        return span

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


class Ask(NamedTuple):
    """One request of the workload. `at_s` counts from the start; 0 in a closed loop."""

    prompt: str | list[int]
    output_len: int
    at_s: float


class Fit(NamedTuple):
    """How many tokens `n` words become at this server: fixed + per_word * n."""

    fixed: float = 0.0
    per_word: float = 1.0

    @classmethod
    def through(cls, few: tuple[int, int], many: tuple[int, int]) -> "Fit":
        """Through two (words, tokens) measurements."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        return cls(max(0.0, few[1] - per_word * few[0]), max(per_word, 0.05))

    def n_words(self, n_tokens: int) -> int:
        return max(1, round((n_tokens - self.fixed) / self.per_word))


class Prompts:
    """Draws prompts. `source` is `words`, `ids`, or a text file whose passages are used.

    `shared_share` of every prompt is one common beginning; the rest differs from prompt to prompt.
    """

    def __init__(
        self, source: str, length: Span, *, shared_share: float, vocab: int, fit: Fit
    ) -> None:
        self.length = length
        self.shared_share = shared_share
        self.vocab = vocab
        self.fit = fit
        self._text: list[str] = []
        self._ids = source == "ids"
        if source not in ("ids", "words"):
            self._text = pathlib.Path(source).read_text(encoding="utf-8").split()
            if not self._text:
                raise ValueError(f"{source} has no words in it")

    def draw(self, rng: random.Random) -> str | list[int]:
        n_tokens = self.length.draw(rng)
        n_parts = n_tokens if self._ids else self.fit.n_words(n_tokens)
        n_shared = int(n_parts * self.shared_share)
        # The common beginning is drawn from one fixed seed, whatever the run's own.
        common = random.Random(0)
        if self._ids:
            return self._draw_ids(common, n_shared) + self._draw_ids(rng, n_parts - n_shared)
        return " ".join(self.words(common, n_shared) + self.words(rng, n_parts - n_shared))

    def _draw_ids(self, rng: random.Random, n_ids: int) -> list[int]:
        return [rng.randrange(ID_LOW, self.vocab) for _ in range(n_ids)]

    def words(self, rng: random.Random, n_words: int) -> list[str]:
        if not self._text:
            return rng.choices(WORDS, k=n_words)
        start = rng.randrange(len(self._text))
        wrapped = self._text[start:] + self._text * (n_words // len(self._text) + 1)
        return wrapped[:n_words]


def draw_workload(
    prompts: Prompts, output: Span, *, n_requests: int, rate_per_s: float | None, seed: int
) -> list[Ask]:
    """`n_requests` asks; with a rate, Poisson arrivals (exponential gaps) at that mean rate."""
    rng = random.Random(seed)
    asks, at_s = [], 0.0
    for _ in range(n_requests):
        asks.append(Ask(prompts.draw(rng), output.draw(rng), at_s))
        if rate_per_s is not None:
            at_s += rng.expovariate(rate_per_s)
    return asks
