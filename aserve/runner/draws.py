"""What each sequence remembers between draws: its token history and how far its grammar has got.

Both follow the sequence's tokens, so a resumed sequence is brought up to date by replay.
"""

from collections.abc import Callable

from aserve.core.message import GRAMMAR_FAULT, Grammar
from aserve.core.replica import SequenceState
from aserve.errors import RequestError
from aserve.tensor.sampler import Drawn, History, SampleRow
from aserve.text.grammar import GrammarMatcher

Compile = Callable[[Grammar], GrammarMatcher]


class DrawState:
    """Of one sequence on this rank, from its first draw here to its drop."""

    __slots__ = ("_known_len", "_matcher", "_state", "history")

    def __init__(self, state: SequenceState, compile_grammar: Compile) -> None:
        """Raises RequestError when the grammar cannot be compiled."""
        sampling = state.sampling
        self._state = state
        self._known_len = len(state.tokens)
        self.history = History(sampling, state.tokens, state.prompt_len)
        self._matcher: GrammarMatcher | None = None
        if sampling.grammar is not None:
            self._matcher = compile_grammar(sampling.grammar)
            self._matcher.accept_all(state.tokens[state.prompt_len :])

    def row(self) -> SampleRow | Drawn:
        """The next draw of this sequence, or why there cannot be one."""
        tokens, matcher = self._state.tokens, self._matcher
        for token in tokens[self._known_len :]:
            self.history.append(token)
            if matcher is not None:
                matcher.accept(token)
        self._known_len = len(tokens)
        if matcher is None:
            return SampleRow(self.history, len(tokens))
        mask = matcher.mask()
        if mask is None:
            return Drawn(-1, error=f"{GRAMMAR_FAULT}: {matcher.error}")
        return SampleRow(self.history, len(tokens), mask)


class Draws:
    """The draw states of all sequences."""

    def __init__(self, compile_grammar: Compile) -> None:
        self._compile = compile_grammar
        self._states: dict[int, DrawState] = {}

    def drop(self, seq: int) -> None:
        self._states.pop(seq, None)

    def row(self, state: SequenceState) -> SampleRow | Drawn:
        found = self._states.get(state.seq)
        if found is None:
            try:
                found = DrawState(state, self._compile)
            except RequestError as error:
                return Drawn(-1, error=f"{GRAMMAR_FAULT}: {error}")
            self._states[state.seq] = found
        return found.row()
