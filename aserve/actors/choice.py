"""One sequence as its client sees it: tokens become text, stop strings and counts here."""

from collections.abc import Sequence

from aserve.actors.generation import Ending, Stream
from aserve.actors.validate import stop_strings
from aserve.core.message import TokenLogprob
from aserve.core.request import FinishReason, Output, SamplingParams, Usage
from aserve.text.detokenizer import Detokenizer
from aserve.text.stops import StopStrings
from aserve.text.tokenizer import Tokenizer


class Choice:
    """Turns the planner's outputs for one sequence into news in its request's stream."""

    def __init__(
        self,
        seq: int,
        index: int,
        stream: Stream,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        self.seq = seq
        self.index = index
        self.stream = stream
        self.prompt_len = len(prompt)
        self.tokens_len = 0
        self.cached_len = 0
        self.target_steps = 0
        self.finish_reason: FinishReason | None = None
        self.started_at = 0.0
        self.first_at: float | None = None
        self.last_at = 0.0
        self._params = params
        # Behind an echoed prompt the output continues a text; otherwise it is one of its own.
        self._detokenizer = Detokenizer(
            tokenizer, params.skip_special_tokens, continues=params.echo
        )
        stops = tuple(stop_strings(params))
        self._stops = StopStrings(stops, params.include_stop_str_in_output) if stops else None
        # An end-of-text token that nobody asked for is no stop reason worth telling.
        self._silent_ids = frozenset(tokenizer.eos_ids) - frozenset(params.stop_token_ids)
        self.head = ""  # text that goes before the first: an echoed prompt
        self._begun = False  # what goes with the first tokens has gone
        self._plain = False  # begun, and no stop string to look for
        self._prompt_logprobs: list[TokenLogprob] = []
        self._owes_prompt_logprobs = wants_prompt_logprobs(params) >= 0

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def push(self, output: Output) -> str | None:
        """Publish `output`; the stop string that just ended the choice, if one did.

        Tokens behind a stop string are not shown: they were drawn before it was seen.
        """
        assert self.finish_reason is None
        tokens = output.tokens
        if self._plain and output.finish_reason is None and len(tokens) == 1:
            self.tokens_len += 1
            self.target_steps += 1
            self.stream.put(self.index, self._detokenizer.push(tokens), tokens, output.logprobs)
            return None
        self.target_steps += output.n_steps
        self.cached_len = max(self.cached_len, output.cached_len)
        self._prompt_logprobs.extend(output.prompt_logprobs)
        if not output.tokens and output.finish_reason is None:
            return None
        kept, text, hit = self._text(output.tokens, output.stop_token)
        if self._begun and hit is None and output.finish_reason is None:
            self.tokens_len += kept
            self.stream.put(self.index, text, output.tokens, output.logprobs)
            return None
        self._write(text, output.tokens[:kept], output.logprobs[:kept])
        if hit is not None:
            self.end("stop", stop_reason=hit)
        elif output.finish_reason is not None:
            shown = output.stop_token if output.stop_token not in self._silent_ids else None
            self.end(output.finish_reason, stop_reason=shown, error=output.error)
        else:
            self.stream.publish(ended=False)
        return hit

    def _text(self, tokens: tuple[int, ...], stop_token: int | None) -> tuple[int, str, str | None]:
        """How many of `tokens` count, the text that may be shown, and the stop string met."""
        if self._stops is None and stop_token is None:
            return len(tokens), self._detokenizer.push(tokens), None
        parts: list[str] = []
        for place, token in enumerate(tokens, 1):
            if token == stop_token and not self._params.include_stop_str_in_output:
                return len(tokens), "".join(parts), None
            text = self._detokenizer.push((token,))
            if self._stops is not None and self.tokens_len + place > self._params.min_tokens:
                text, hit = self._stops.push(text)
                if hit is not None:
                    return place, "".join((*parts, text)), hit
            parts.append(text)
        return len(tokens), "".join(parts), None

    def _write(
        self, text: str, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> None:
        pending = self.stream.pending(self.index)
        if self._owes_prompt_logprobs and tokens:
            pending.prompt_logprobs = (None, *self._prompt_logprobs)
            self._owes_prompt_logprobs = False
        self._begun = self._begun or bool(tokens)
        self._plain = self._begun and self._stops is None
        self.tokens_len += len(tokens)
        pending.text += (self._take_head(), text)
        pending.token_ids.extend(tokens)
        pending.logprobs.extend(logprobs)

    def end(
        self,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """Publish the end. After a stop string the text behind it stays unsaid."""
        assert not self.ended
        self.finish_reason = reason
        pending = self.stream.pending(self.index)
        if not isinstance(stop_reason, str):
            pending.text += (self._take_head(), self._rest())
        usage = Usage(self.prompt_len, self.tokens_len, self.cached_len, self.target_steps)
        pending.ending = Ending(reason, usage, stop_reason, error)
        self.stream.publish(ended=True)

    def _take_head(self) -> str:
        head, self.head = self.head, ""
        return head

    def _rest(self) -> str:
        text = self._detokenizer.flush()
        if self._stops is None:
            return text
        safe, hit = self._stops.push(text)
        return safe if hit is not None else safe + self._stops.flush()


def wants_prompt_logprobs(params: SamplingParams) -> int:
    """Alternatives wanted beside each prompt token, -1 for none at all.

    `echo` with `logprobs` means those of the prompt too.
    """
    if params.prompt_logprobs is not None:
        return params.prompt_logprobs
    return params.logprobs if params.echo and params.logprobs is not None else -1
