"""What a result means for its sequence: is it possible, and how much of it counts."""

from aserve.core.message import Commit, Result, Rows
from aserve.core.request import FinishReason
from aserve.core.sequence import Sequence


def objection(sequence: Sequence, rows: Rows, result: Result) -> str | None:
    """Why `result` cannot be what `rows` gave; None: it can."""
    if result.seq != rows.seq:
        return f"a result for sequence {result.seq} where {rows.seq} was due"
    if result.error is not None:
        return None
    n_known = min(len(rows.tokens), len(sequence.tokens) - rows.start)
    n_path = len(result.path)
    if n_path < n_known or not _is_path(rows, result.path):
        return f"sequence {rows.seq} kept rows {result.path}, no path through its {n_known} known"
    n_drawn = n_path - n_known + 1 if rows.sample else 0
    if len(result.tokens) != n_drawn:
        return f"sequence {rows.seq} drew {len(result.tokens)} tokens, {n_drawn} were due"
    drafts = tuple(rows.tokens[row] for row in result.path[n_known:])
    if drafts != result.tokens[: n_drawn - 1] and drafts:
        return f"sequence {rows.seq} accepted drafts {drafts} but drew {result.tokens}"
    return _logprobs_objection(sequence, rows, result)


def _is_path(rows: Rows, path: tuple[int, ...]) -> bool:
    """Whether each row's parent is the row before it, from a root down."""
    n_rows = len(rows.tokens)
    if not rows.parents:
        return path == tuple(range(len(path))) and len(path) <= n_rows
    before = -1
    for row in path:
        if not 0 <= row < n_rows or rows.parents[row] != before:
            return False
        before = row
    return True


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
    return max(0, min(rows.start + len(rows.tokens), sequence.prompt_len - 1) - rows.start)


def settle(sequence: Sequence, rows: Rows, result: Result) -> tuple[Commit, FinishReason | None]:
    """Move a sequence on by a possible result; tokens after one that ends it do not count."""
    if len(result.tokens) == 1:  # the plain decode row and the last chunk, on the fast path
        token = result.tokens[0]
        sequence.tokens.append(token)
        sequence.kv_len += len(result.path)
        reason = sequence.ended_by(token)
        return Commit(rows.seq, result.path, result.tokens, reason is not None), reason
    n_known = min(len(rows.tokens), len(sequence.tokens) - rows.start)
    n_kept = 0
    reason = None
    for token in result.tokens:
        sequence.tokens.append(token)
        n_kept += 1
        reason = sequence.ended_by(token)
        if reason is not None:
            break
    path = result.path[: n_known + n_kept]
    sequence.kv_len += len(path)
    return Commit(rows.seq, path, result.tokens[:n_kept], reason is not None), reason
