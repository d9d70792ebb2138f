"""What a result means for its sequence: is it possible, and how much of it counts."""

from aserve.core.message import NO_DRAFTING, Commit, Drafting, Result, Rows
from aserve.core.request import FinishReason
from aserve.core.sequence import Sequence
from aserve.core.tree import NO_DRAFT, Draft, is_path, is_token, malformed


def known_rows(rows: Rows) -> int:
    """How many of the rows were known tokens: all of a chain, the root of a tree."""
    return 1 if rows.parents else len(rows.tokens)


def objection(
    sequence: Sequence, rows: Rows, result: Result, drafting: Drafting = NO_DRAFTING
) -> str | None:
    """Why `result` cannot be what `rows` gave in a step with such drafts; None: it can."""
    if result.seq != rows.seq:
        return f"a result for sequence {result.seq} where {rows.seq} was due"
    if result.error is not None:
        return None
    if _is_plain(rows, result):
        return _logprobs_objection(sequence, rows, result)
    n_known, n_path = known_rows(rows), len(result.path)
    if n_path < n_known or not _is_path(rows, result.path):
        return f"sequence {rows.seq} kept rows {result.path}, no path through its {n_known} known"
    n_drawn = n_path - n_known + 1 if rows.sample else 0
    if len(result.tokens) != n_drawn:
        return f"sequence {rows.seq} drew {len(result.tokens)} tokens, {n_drawn} were due"
    drafts = tuple(rows.tokens[row] for row in result.path[n_known:])
    if drafts != result.tokens[: n_drawn - 1] and drafts:
        return f"sequence {rows.seq} accepted drafts {drafts} but drew {result.tokens}"
    if n_drawn and not is_token(result.tokens[-1]):
        return f"sequence {rows.seq} drew {result.tokens[-1]}, which is no token"
    if result.draft_tokens or result.draft_parents:
        draft = Draft(result.draft_tokens, result.draft_parents)
        wrong = malformed(draft, drafting if rows.sample else NO_DRAFTING)
        if wrong is not None:
            return f"sequence {rows.seq} {wrong}"
    return _logprobs_objection(sequence, rows, result)


def _is_plain(rows: Rows, result: Result) -> bool:
    """Whether it is what most results are, a token of one row; nothing else is wrong with it."""
    return (
        rows.sample
        and len(rows.tokens) == 1
        and result.path == (0,)
        and len(result.tokens) == 1
        and is_token(result.tokens[0])
        and not (rows.parents or result.draft_tokens or result.draft_parents)
    )


def _is_path(rows: Rows, path: tuple[int, ...]) -> bool:
    if rows.parents:
        return is_path(rows.parents, path)
    return len(path) <= len(rows.tokens) and path == tuple(range(len(path)))


def _logprobs_objection(sequence: Sequence, rows: Rows, result: Result) -> str | None:
    sampling = sequence.sampling
    n_logprobs = len(result.tokens) if sampling.logprobs >= 0 else 0
    if len(result.logprobs) != n_logprobs:
        return f"sequence {rows.seq} sent {len(result.logprobs)} logprobs, {n_logprobs} were due"
    n_prompt = prompt_logprobs_due(sequence, rows)
    if len(result.prompt_logprobs) != n_prompt:
        n_sent = len(result.prompt_logprobs)
        return f"sequence {rows.seq} sent {n_sent} prompt logprobs, {n_prompt} were due"
    return None


def prompt_logprobs_due(sequence: Sequence, rows: Rows) -> int:
    """Entries that the rows predict: of tokens start + 1 to the prompt's end."""
    if sequence.sampling.prompt_logprobs < 0:
        return 0
    end = rows.start + known_rows(rows)
    return max(0, min(end, sequence.prompt_len - 1) - rows.start)


def settle(
    sequence: Sequence, rows: Rows, result: Result
) -> tuple[Commit | None, FinishReason | None]:
    """Move a sequence on by a possible result; tokens after one that ends it do not count.

    What the ranks must hear of it, if anything: a chunk that drew nothing was what they expect.
    """
    path = result.path
    if not rows.sample:
        sequence.computed_len = rows.start + len(path)
        return None, None
    n_kept = 0
    reason = None
    for token in result.tokens:
        sequence.tokens.append(token)
        n_kept += 1
        reason = sequence.ended_by(token)
        if reason is not None:
            break
    tokens = result.tokens
    if rows.parents:
        tokens, path = tokens[:n_kept], path[: 1 + n_kept]
        sequence.kv_len += len(path) - 1
    sequence.computed_len = rows.start + len(path)
    sequence.draft = NO_DRAFT
    if result.draft_tokens and reason is None:
        sequence.draft = Draft(result.draft_tokens, result.draft_parents)
    return Commit(rows.seq, path, tokens, reason is not None), reason


def land(sequence: Sequence, rows: Rows, result: Result) -> None:
    """Note what a result says of the KV of a sequence that is over: it may stay in the cache.

    A lagging row was one too many: whatever it gave is nobody's.
    """
    if rows.is_lagging:
        return
    if result.error is None:
        sequence.computed_len = rows.start + known_rows(rows)
    else:
        sequence.spoiled = True
