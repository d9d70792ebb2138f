"""Client parameters in tokens: what a rank needs to draw, and nothing of text."""

from collections.abc import Sequence

from aserve.actors.choice import wants_prompt_logprobs
from aserve.core.message import Grammar, Sampling
from aserve.core.request import SamplingParams
from aserve.text.tokenizer import Tokenizer


def sampling_of(
    params: SamplingParams, tokenizer: Tokenizer, seed: int, grammar: Grammar | None
) -> Sampling:
    """`params` have passed `check_params`. A grammar that is complete allows nothing but an end."""
    ends = grammar is not None or not params.ignore_eos
    eos_ids = tuple(tokenizer.eos_ids) if ends else ()
    return Sampling(
        seed=seed,
        temperature=float(params.temperature),
        top_k=max(params.top_k, 0),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        logit_bias=tuple(
            (token, float(params.logit_bias[token])) for token in sorted(params.logit_bias)
        ),
        bad_words=_bad_words(params.bad_words, tokenizer),
        min_tokens=params.min_tokens,
        stop_ids=tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids))),
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=wants_prompt_logprobs(params),
        grammar=grammar,
    )


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the start of a text and after a space."""
    spellings = (
        tokenizer.encode(space + word, add_special=False) for word in words for space in ("", " ")
    )
    return tuple(dict.fromkeys(tuple(ids) for ids in spellings if ids))
