"""A client's choice without text: collects tokens, may stop at a pair of them, and judges its end.

Takes the place of aserve.actors.choice.Choice, whose text is checked elsewhere.
"""

from aserve.core.message import TokenLogprob
from aserve.core.request import FinishReason, Output, Request
from aserve.testing.laws import Law, Laws
from aserve.testing.oracle import Said


class LegibleChoice:
    """`stop`: two tokens that end it from above, as a stop string would."""

    def __init__(self, request: Request, said: Said, stop: tuple[int, int] | None) -> None:
        self.seq = request.seq
        self.index = 0
        self.prompt_len = len(request.tokens)
        self.tokens_len = 0
        self.cached_len = 0
        self.started_at = 0.0
        self.first_at: float | None = None
        self.last_at = 0.0
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self._request = request
        self._said = said
        self._stop = stop

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def push(self, output: Output) -> str | None:
        assert not self.ended, f"sequence {self.seq} goes on after its end"
        self.prompt_logprobs += output.prompt_logprobs
        self.cached_len = max(self.cached_len, output.cached_len)
        for place, token in enumerate(output.tokens):
            self.tokens.append(token)
            self.logprobs += output.logprobs[place : place + 1]
            if self._stop is not None and tuple(self.tokens[-2:]) == self._stop:
                self.end("stop")
                return "stop"
        self.tokens_len = len(self.tokens)
        if output.finish_reason is not None:
            self.end(output.finish_reason, error=output.error)
        return None

    def end(
        self, reason: FinishReason, *, stop_reason: str | None = None, error: str | None = None
    ) -> None:
        assert not self.ended, f"sequence {self.seq} ends twice"
        self.finish_reason = reason
        self.error = error
        self.tokens_len = len(self.tokens)

    def expected(self) -> tuple[tuple[int, ...], FinishReason]:
        """What the oracle says, as far as the client listens."""
        tokens = self._said.tokens
        for end in range(2, len(tokens) + 1):
            if tokens[end - 2 : end] == self._stop:
                return tokens[:end], "stop"
        return tokens, self._said.reason

    def judge(self, laws: Laws, aborted: bool) -> None:
        """After the run: is this what the oracle said?"""
        who = f"sequence {self.seq}"
        tokens, reason = self.expected()
        got, logprobs = tuple(self.tokens), tuple(self.logprobs)
        is_cut = aborted and self.finish_reason == "abort"
        due_tokens = tokens[: len(got)] if is_cut else tokens
        laws.require(Law.TEXT, got == due_tokens, f"{who} said {got}, due was {due_tokens}")
        end = f"{who} ended with {self.finish_reason} ({self.error}), due was {reason}"
        laws.require(Law.END, is_cut or self.finish_reason == reason, end)
        due = self._said.logprobs[: len(got)]
        laws.require(Law.LOGPROBS, logprobs == due, f"{who} sent {logprobs}, due were {due}")
        if got or self.finish_reason not in ("abort", "error"):
            prompt, told = tuple(self.prompt_logprobs), self._said.prompt_logprobs
            laws.require(Law.LOGPROBS, prompt == told, f"{who} sent {prompt} of its prompt")
