"""What planner and ranks say to each other: frozen structs of tuples, hashable and printable."""

from enum import IntEnum

import msgspec

# In place of the token of a row: what was drawn last for its sequence, reported or not.
LAGGING = -1
# How an `error` starts that is the doing of the request's own grammar, not of the engine.
GRAMMAR_FAULT = "the grammar cannot go on"
# The `error` where a request's own wishes exclude each other.
NONE_LEFT = "no token is left to draw: the grammar, bad_words and logit_bias rule out all"


class Struct(msgspec.Struct, frozen=True, array_like=True):
    """A message part; fields go over the wire by position.

    What is a message by itself has a tag, which tells it from the others of its direction.
    """


class Grammar(Struct, frozen=True):
    """A constraint on the text: `kind` is json_schema, json_object, regex, choice or grammar."""

    kind: str
    text: str


class Sampling(Struct, frozen=True):
    """How one sequence is sampled, in tokens only; a rank needs nothing else to draw.

    Penalties follow OpenAI (presence, frequency: over generated tokens) and CTRL
    (repetition: over prompt and generated tokens). `logprobs` and `prompt_logprobs` count the
    alternatives wanted beside the chosen token; -1 is none at all. `stop_ids` (EOS included unless
    ignored) are masked until `min_tokens` tokens were generated.
    """

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int = -1
    prompt_logprobs: int = -1
    grammar: Grammar | None = None


class Admit(Struct, frozen=True):
    """A sequence starts (or, after a retraction, resumes) on the ranks.

    `tokens` are all tokens known so far; the first `prompt_len` are the prompt. KV of
    `tokens[:kv_len]` already lies in `pages` (a prefix-cache hit, whole pages only).
    """

    seq: int
    tokens: tuple[int, ...]
    prompt_len: int
    kv_len: int
    pages: tuple[int, ...]
    sampling: Sampling


class Rows(Struct, frozen=True):
    """One sequence's rows in one step: `tokens` at positions `start + depth`.

    `parents` index into these rows (-1: the sequence's last token before them); `()` means a chain
    of known tokens, else row 0 is the last known token and the others are a draft below it. Row
    `i` has slot `start + i` of the sequence either way. `start` is what was planned of it before.
    `sample`: the last row (every row, if a tree) gets logits and a draw. `pages` are appended to
    the sequence's page table before the step.

    `tokens` of `(LAGGING,)` are the token drawn for the sequence in the step before with rows of
    it: the ranks have it, though the planner may not. Its shape is known, so all else is said.
    """

    seq: int
    start: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sample: bool
    pages: tuple[int, ...]

    @property
    def is_lagging(self) -> bool:
        return self.tokens[0] == LAGGING


class Commit(Struct, frozen=True):
    """What rows that drew turned out to be: rows `path` kept, then `tokens` appended.

    Draws are committed in their order; rows behind a draw may be planned before its commit.

    For a chain `path` is every row and `tokens` the one drawn. Of a tree each rank moves the KV of
    row `path[d]` to slot `start + d`. A chunk that drew nothing has no commit: it is no news.
    """

    seq: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    done: bool


class MoveKind(IntEnum):
    COMPACT = 0
    DEVICE_TO_HOST = 1
    HOST_TO_DEVICE = 2


class PageMove(Struct, frozen=True):
    seq: int
    pages_from: tuple[int, ...]
    pages_to: tuple[int, ...]
    kind: MoveKind


class PageSend(Struct, frozen=True):
    """Final pages of a room that may leave a prefill instance."""

    room: int
    pages: tuple[int, ...]
    last: bool


class Batch(Struct, frozen=True):
    """The rows of one attention-DP group; may be empty, is never absent."""

    rows: tuple[Rows, ...]


class Drafting(Struct, frozen=True):
    """How large a draft is to be that a step's rows end with: at most `tokens`, `depth` levels,
    `topk` children of a node. 0 tokens: none."""

    depth: int = 0
    topk: int = 0
    tokens: int = 0


NO_DRAFTING = Drafting()


class StepPlan(Struct, frozen=True, tag=0):
    """One step, decided once. A rank applies commits, drops, moves, admits, rows, in that order."""

    step: int
    microbatch: int
    commits: tuple[Commit, ...]
    drops: tuple[int, ...]
    moves: tuple[PageMove, ...]
    admits: tuple[Admit, ...]
    batches: tuple[Batch, ...]
    sends: tuple[PageSend, ...]
    drafting: Drafting = NO_DRAFTING


class TokenLogprob(Struct, frozen=True):
    """log p of the token that stands here, and the best alternatives (id, log p), best first.

    Natural log of the softmax over the raw logits, before penalties, temperature and filters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Result(Struct, frozen=True):
    """What one sequence's rows gave: accepted `path`, drawn `tokens`, a logprob a token if wanted.

    A leader's report has one for each `Rows` of its group's batch, in the plan's order.
    `prompt_logprobs` are those of prompt tokens `start + 1 ...` that this chunk's rows predict.
    `error` ends the request (its grammar cannot go on, its logits were NaN). The draft is the next
    tree without its root, the last of `tokens`: parents index into `draft_tokens`, -1 is the root.
    """

    seq: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    draft_tokens: tuple[int, ...] = ()
    draft_parents: tuple[int, ...] = ()


class StepReport(Struct, frozen=True, tag=0):
    """What a step was on one rank; every rank reports every step, in order.

    Only the leader of an attention-DP group carries `results`: those of its group's batch.
    `micros` is the time in forward, `draft_micros` the part of it in which the next drafts were
    made, `waited_micros` the time that the rank waited for the plan and the inward bundle since its
    last report.
    """

    step: int
    rank: int
    digest: int
    results: tuple[Result, ...]
    done: tuple[int, ...]
    found: tuple[tuple[int, int], ...]
    micros: int
    waited_micros: int = 0
    draft_micros: int = 0


class RankState(Struct, frozen=True, tag=1):
    """What a rank is at, told to whoever asks, also in the middle of a step.

    `step` is the last plan it took up, `digest` that of its last report; `doing` is a sentence,
    `last_call` its last collective, `waited_micros` what it waited before its last report.
    """

    rank: int
    step: int
    digest: int
    n_sequences: int = 0
    doing: str = ""
    last_call: str = ""
    waited_micros: int = 0


class Ready(Struct, frozen=True, tag=2):
    """A rank has loaded: what only it knows and all must agree on, or what bounds the others.

    `pages` is how many it could hold; `config_digest` of what must be equal on every rank;
    `addresses` are (plane, address) where others reach it.
    """

    rank: int
    pages: int
    model: str
    n_layers: int
    config_digest: str
    addresses: tuple[tuple[str, str], ...] = ()


class Setup(Struct, frozen=True, tag=2):
    """What a rank must know before the first plan; may come in parts, what is not known yet left 0.

    `config` is JSON of the leader's; `pages_total` is the minimum over ranks; `addresses` are
    (plane, rank, address).
    """

    config: bytes = b""
    pages_total: int = 0
    addresses: tuple[tuple[str, int, str], ...] = ()


class AskState(Struct, frozen=True, tag=1):
    """The leader asks for a RankState."""


class End(Struct, frozen=True, tag=3):
    """The leader's last word: there are no more plans."""


class Bye(Struct, frozen=True, tag=3):
    """A rank's last word: `error` is what it died of, empty where it left since it was told to."""

    error: str = ""
