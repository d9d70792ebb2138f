"""`aserve generate`: one prompt, offline, streamed to the terminal or given as JSON."""

import argparse
import json
import sys
from collections.abc import Sequence

from aserve.actors.validate import Facts, check_params
from aserve.cli.answer import Answer
from aserve.cli.flags import CommandParser, add_model_flags, config_of
from aserve.cli.outcome import FAILED, UsageError, say
from aserve.cli.progress import Progress
from aserve.core.config import Config
from aserve.core.request import SamplingParams

Prompt = str | list[int] | list[dict[str, str]]


def parser() -> CommandParser:
    made = CommandParser(
        "generate",
        "Continue a prompt or answer a message, without a server.",
        usage="[MODEL] (--prompt TEXT | --prompt-ids 1,2,3 | --chat TEXT) [flags]",
    )
    prompt = made.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue; - reads stdin")
    prompt.add_argument(
        "--prompt-ids", metavar="1,2,3", help="token ids to continue; - reads stdin"
    )
    prompt.add_argument("--chat", metavar="TEXT", help="a message to answer; - reads stdin")
    made.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    add_sampling_flags(made, temperature=0.0, max_tokens=128)
    made.add_argument("--logprobs", type=int, metavar="K", help="log-probabilities, and K others")
    add_model_flags(made)
    return made


def add_sampling_flags(made: CommandParser, *, temperature: float, max_tokens: int) -> None:
    """How to draw; the same for every command that generates."""
    group = made.add_argument_group("sampling")
    add = group.add_argument
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help="default: %(default)s")
    add(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help="0 always takes the likeliest token (default: %(default)s)",
    )
    add("--seed", type=int, metavar="S", help="the same seed gives the same text")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0: from all")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest share P")
    add("--min-p", type=float, default=0.0, metavar="P", help="at least P times the likeliest")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1 repeats less")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable")
    add("--ignore-eos", action="store_true", help="go on to --max-tokens in any case")


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
        logprobs=getattr(arguments, "logprobs", None),
    )


def checked_sampling(arguments: argparse.Namespace, config: Config) -> SamplingParams:
    """Raises RequestError before a model is loaded only to refuse."""
    params = sampling_of(arguments)
    check_params(params, Facts(context_len=0, vocab_size=0, limits=config.limits))
    return params


def prompt_of(arguments: argparse.Namespace) -> Prompt:
    """Raises UsageError for text that is not UTF-8 and ids that are not numbers."""
    if arguments.prompt is not None:
        return given_or_stdin(arguments.prompt)
    if arguments.chat is not None:
        return [{"role": "user", "content": given_or_stdin(arguments.chat)}]
    text = given_or_stdin(arguments.prompt_ids)
    try:
        return [int(part) for part in text.strip().strip("[]").replace(",", " ").split()]
    except ValueError:
        raise UsageError(f"--prompt-ids takes numbers like 1,2,3, not {text[:80]!r}") from None


def given_or_stdin(given: str) -> str:
    """The flag's value, or all of stdin if it is `-`."""
    try:
        raw = sys.stdin.buffer.read() if given == "-" else given.encode(errors="surrogateescape")
        return raw.decode()
    except UnicodeDecodeError:
        raise UsageError("the prompt is not UTF-8") from None


def run(given: Sequence[str]) -> int:
    arguments = parser().parse_args(given)
    prompt = prompt_of(arguments)
    config = config_of(arguments)
    params = checked_sampling(arguments, config)
    # Imported late: it brings torch, which --help and refusals need not wait for.
    from aserve.actors.llm import LLM

    answer = Answer()
    with Progress() as progress, LLM(config=config, progress=progress) as llm:
        progress.close()
        deltas = llm.stream(prompt, params)
        answer.read(deltas, show=not arguments.json)
    if arguments.json:
        print(json.dumps(answer.as_json(logprobs=arguments.logprobs is not None)))
    elif arguments.logprobs is not None:
        for entry in answer.logprobs:
            others = " ".join(f"{token}:{logprob:.4f}" for token, logprob in entry.top)
            say(f"token {entry.token} {entry.logprob:.4f}  {others}")
    if answer.error:
        say(answer.error)
    return FAILED if answer.error else 0
