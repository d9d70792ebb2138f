"""What each sequence remembers between draws: its token history and how far its grammar has got.

Both follow the sequence's tokens, so a resumed sequence is brought up to date by replay. The last
token drawn here is known here first: rows that lag are computed from it, and the commit that comes
later must say the same.
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

    __slots__ = ("_drawn_at", "_known_len", "_matcher", "_state", "drawn", "history")

    def __init__(self, state: SequenceState, compile_grammar: Compile, position: int) -> None:
        """Before the draw for `position`. Raises RequestError when the grammar cannot be compiled.

        The state may be ahead of that, by commits of plans that are yet to be computed.
        """
        sampling, tokens = state.sampling, state.tokens[:position]
        assert len(tokens) == position, (state.seq, position)
        self._state = state
        self._known_len = position
        self._drawn_at = -1
        self.drawn = -1  # the last token drawn here, for position `_drawn_at`
        self.history = History(sampling, tokens, state.prompt_len)
        self._matcher: GrammarMatcher | None = None
        if sampling.grammar is not None:
            self._matcher = compile_grammar(sampling.grammar)
            self._matcher.accept_all(tokens[state.prompt_len :])

    def row(self, position: int) -> SampleRow | Drawn:
        """The draw of the token for `position`, or why there cannot be one."""
        matcher = self._matcher
        for at in range(self._known_len, position):
            token = self._token(at)
            self.history.append(token)
            if matcher is not None:
                matcher.accept(token)
        self._known_len = position
        if matcher is None:
            return SampleRow(self.history, position)
        mask = matcher.mask()
        if mask is None:
            return Drawn(-1, error=f"{GRAMMAR_FAULT}: {matcher.error}")
        return SampleRow(self.history, position, mask)

    def _token(self, at: int) -> int:
        """Committed, or drawn here in the step before; if both, they are the same."""
        known = self._state.tokens
        if at >= len(known):
            assert at == self._drawn_at, (self._state.seq, at, self._drawn_at)
            return self.drawn
        assert at != self._drawn_at or known[at] == self.drawn, (self._state.seq, at, known[at])
        return known[at]

    def drew(self, position: int, token: int) -> None:
        self._drawn_at, self.drawn = position, token


class Draws:
    """The draw states of all sequences."""

    def __init__(self, compile_grammar: Compile) -> None:
        self._compile = compile_grammar
        self._states: dict[int, DrawState] = {}

    def drop(self, seq: int) -> None:
        self._states.pop(seq, None)

    def row(self, state: SequenceState, position: int) -> SampleRow | Drawn:
        """The draw of the token for `position`; those before it are known, or were drawn here."""
        found = self._states.get(state.seq)
        if found is None:
            try:
                found = DrawState(state, self._compile, position)
            except RequestError as error:
                return Drawn(-1, error=f"{GRAMMAR_FAULT}: {error}")
            self._states[state.seq] = found
        return found.row(position)

    def drew(self, seq: int, position: int, token: int) -> None:
        """What `row` came to; -1: an error."""
        found = self._states.get(seq)
        if found is not None:  # else its grammar could not be compiled
            found.drew(position, token)

    def last(self, seq: int) -> int:
        """The token drawn last, for a row that lags; -1: there was an error instead."""
        found = self._states.get(seq)
        return -1 if found is None else found.drawn
