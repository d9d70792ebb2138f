"""`aserve chat`: a conversation in the terminal.

Each turn sends the whole history; the prefix cache makes that cheap.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aserve.cli.answer import Answer
from aserve.cli.flags import CommandParser, add_model_flags, config_of
from aserve.cli.generate import add_sampling_flags, checked_sampling
from aserve.cli.outcome import say
from aserve.cli.progress import Progress
from aserve.core.request import SamplingParams
from aserve.errors import RequestError

if TYPE_CHECKING:
    from aserve.actors.llm import LLM

HELP = """\
/reset         forget the conversation
/system TEXT   give new instructions, and forget the conversation
/stats         what the last answer cost
/exit          leave (as does Ctrl-D); Ctrl-C stops an answer
"""


def parser() -> CommandParser:
    made = CommandParser("chat", "Hold a conversation in the terminal.", usage="[MODEL] [flags]")
    made.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    made.add_argument("--json", action="store_true", help="each answer as one line of JSON")
    add_sampling_flags(made, temperature=0.7, max_tokens=512)
    add_model_flags(made)
    return made


class Conversation:
    """The messages so far and the commands that change them."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.last: Answer | None = None

    def command(self, line: str) -> bool:
        """Obey `/...`; False means leave."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self.messages.clear()
        elif name == "/system":
            self.system = rest.strip() or None
            self.messages.clear()
        elif name == "/stats" and self.last is not None:
            sys.stderr.write(cost(self.last) + "\n")
        else:
            sys.stderr.write(HELP)
        return True

    def ask(self, text: str, *, show: bool) -> Answer | None:
        """Answer `text`; a stopped answer is kept as far as it came, a refused one is not asked."""
        self.messages.append({"role": "user", "content": text})
        answer = Answer()
        try:
            with contextlib.suppress(_Stopped):
                self._read(answer, show=show)
        except RequestError as error:
            say(str(error))
            self.messages.pop()
            return None
        self.messages.append({"role": "assistant", "content": answer.text})
        self.last = answer
        if answer.error:
            say(answer.error)
        return answer

    def _read(self, answer: Answer, *, show: bool) -> None:
        while True:
            system = [{"role": "system", "content": self.system}] if self.system else []
            try:
                deltas = self.llm.stream([*system, *self.messages], self.params)
                return answer.read(deltas, show=show)
            except RequestError as error:
                if error.code != "context_length_exceeded" or len(self.messages) < 3:
                    raise
                del self.messages[:2]
                say("the conversation no longer fits the context; its oldest turn was dropped")
            except KeyboardInterrupt:
                answer.finish_reason = "abort"
                sys.stdout.write("\n" if show else "")
                raise _Stopped from None


def cost(answer: Answer) -> str:
    """In tokens; a stopped answer has no usage, but was counted as it came."""
    made = f"{len(answer.token_ids)} tokens generated, ended by {answer.finish_reason}"
    if answer.usage is None:
        return made
    usage = answer.usage
    if usage.target_steps < usage.completion_tokens:  # drafts were accepted
        made += f", in {usage.target_steps} steps"
    return f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} from the cache), {made}"


class _Stopped(Exception):
    """Ctrl-C while an answer came."""


def read_line(*, prompt: bool) -> str | None:
    """The next line; None at the end of input. Ctrl-C at a prompt drops the line, as in a shell."""
    try:
        if prompt:
            return input("> ")
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    except EOFError:
        sys.stderr.write("\n")
        return None
    except KeyboardInterrupt:
        if not prompt:
            raise
        sys.stderr.write("\nCtrl-D or /exit leaves\n")
        return ""
    except UnicodeDecodeError:
        say("that line is not UTF-8")
        return ""


def converse(conversation: Conversation, *, as_json: bool) -> None:
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    while (line := read_line(prompt=terminal)) is not None:
        if not line.strip():
            continue
        if line.startswith("/"):
            if not conversation.command(line.strip()):
                return
            continue
        answer = conversation.ask(line, show=not as_json)
        if as_json and answer is not None:
            print(json.dumps(answer.as_json()), flush=True)


def run(given: Sequence[str]) -> int:
    arguments = parser().parse_args(given)
    config = config_of(arguments)
    params = checked_sampling(arguments, config)
    if sys.stdin.isatty():
        # Line editing and history for input().
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    from aserve.actors.llm import LLM

    with Progress() as progress, LLM(config=config, progress=progress) as llm:
        progress.close()
        if sys.stdin.isatty():
            say(f"{llm.engine.model_name}; /help lists commands, Ctrl-C stops an answer")
        conversation = Conversation(llm, params, arguments.system)
        converse(conversation, as_json=arguments.json)
    return 0
