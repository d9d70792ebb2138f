"""Which features stack: every rule is a row with a reason, and this is the only place with any.

`explain` reads a configuration against the rows; `matrix` shows them to people and programs.
"""

from collections.abc import Callable
from enum import StrEnum

import msgspec

from aserve.core import layout as grid
from aserve.core.config import Config
from aserve.core.depth import overlap_of


class Feature(StrEnum):
    CONTINUOUS_BATCHING = "continuous batching"
    CHUNKED_PREFILL = "chunked prefill, mixed with decode"
    PREFIX_CACHE = "prefix cache"
    CACHE_SALT = "cache salt"
    RETRACTION = "retraction and exact resumption"
    PRIORITY = "priorities"
    ABORT = "abort at any phase"
    SEED = "seeded sampling"
    PENALTIES = "penalties"
    LOGIT_BIAS = "logit bias, bad words, min tokens"
    STOP = "stop strings and token ids"
    CHOICES = "several choices (n)"
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt logprobs and echo"
    STRUCTURED = "structured output"
    TOOLS = "tool calls"
    REASONING = "reasoning content"
    FLOAT32 = "float32 weights"
    BLOCKS = "weights in blocks of 8 or 4 bits"
    KV_INT8 = "int8 KV cache"
    TP = "tensor parallelism"
    PP = "pipeline parallelism"
    DP = "data-parallel attention"
    CP = "context parallelism"
    EP = "expert parallelism"
    MOE_DP = "data-parallel experts"
    EXACT = "exact numerics"
    OVERLAP = "overlapped steps"
    DYNAMIC_CHUNKS = "dynamic chunks"
    SPECULATION = "speculative decoding"
    DISAGGREGATION = "prefill/decode disaggregation"


class Finding(msgspec.Struct, frozen=True):
    """Why a configuration is refused; `str()` of it is for people."""

    features: tuple[Feature, ...]
    text: str

    def __str__(self) -> str:
        return self.text


class Rule(msgspec.Struct, frozen=True):
    """`kind` forbid: not both. require: `first` only with `second`. imply: `first` brings `second`.

    An `imply` row refuses nothing; it says what happens to a request that asks for both.
    """

    kind: str
    first: Feature
    second: Feature
    why: str


def forbid(first: Feature, second: Feature, *, why: str) -> Rule:
    return Rule("forbid", first, second, why)


def require(first: Feature, second: Feature, *, why: str) -> Rule:
    return Rule("require", first, second, why)


def imply(first: Feature, second: Feature, *, why: str) -> Rule:
    return Rule("imply", first, second, why)


# Where a feature is asked for: a configuration key, or a field of a request.
SET_BY: dict[Feature, str] = {
    Feature.CONTINUOUS_BATCHING: "always on",
    Feature.CHUNKED_PREFILL: "schedule.step_tokens",
    Feature.PREFIX_CACHE: "schedule.prefix_cache",
    Feature.CACHE_SALT: "request: cache_salt",
    Feature.RETRACTION: "always on",
    Feature.PRIORITY: "request: priority",
    Feature.ABORT: "always on",
    Feature.SEED: "request: seed",
    Feature.PENALTIES: "request: presence_penalty, frequency_penalty, repetition_penalty",
    Feature.LOGIT_BIAS: "request: logit_bias, bad_words, min_tokens",
    Feature.STOP: "request: stop, stop_token_ids, ignore_eos",
    Feature.CHOICES: "request: n",
    Feature.LOGPROBS: "request: logprobs",
    Feature.PROMPT_LOGPROBS: "request: prompt_logprobs, echo",
    Feature.STRUCTURED: "request: response_format, structured_outputs",
    Feature.TOOLS: "request: tools; model.tool_parser",
    Feature.REASONING: "model.reasoning_parser",
    Feature.FLOAT32: "model.dtype",
    Feature.BLOCKS: "model.weights",
    Feature.KV_INT8: "cache.kv_dtype",
    Feature.TP: "layout.tp",
    Feature.PP: "layout.pp",
    Feature.DP: "layout.dp",
    Feature.CP: "layout.cp",
    Feature.EP: "layout.ep",
    Feature.MOE_DP: "layout.moe_dp",
    Feature.EXACT: "layout.numerics",
    Feature.OVERLAP: "schedule.overlap",
    Feature.DYNAMIC_CHUNKS: "schedule.dynamic_chunks",
    Feature.SPECULATION: "spec.method",
    Feature.DISAGGREGATION: "",
}

# Not in this release, and why.
ABSENT: dict[Feature, str] = {
    Feature.DISAGGREGATION: "no KV plane is built; plans allow for sending pages",
}

RULES: tuple[Rule, ...] = (
    imply(
        Feature.PROMPT_LOGPROBS,
        Feature.CHUNKED_PREFILL,
        why="every prompt row is computed, whatever the prefix cache holds",
    ),
    imply(
        Feature.CACHE_SALT,
        Feature.PREFIX_CACHE,
        why="pages are shared only between requests of one salt; without the cache it is idle",
    ),
    imply(
        Feature.CHOICES,
        Feature.PREFIX_CACHE,
        why="choices after the first wait for the prompt's pages and share them",
    ),
    imply(
        Feature.FLOAT32,
        Feature.BLOCKS,
        why="a file's own blocks become float32 numbers; those that int8 and q4 ask for do not",
    ),
    imply(
        Feature.EXACT,
        Feature.TP,
        why="partial sums of fixed blocks are added in one order, whoever holds them: one rank's "
        "bits, where the blocks divide",
    ),
    imply(
        Feature.CP,
        Feature.CHUNKED_PREFILL,
        why="ranks share the rows of a chunk; a decode row is one rank's",
    ),
    imply(
        Feature.OVERLAP,
        Feature.PP,
        why="with one stage the next step is planned before this one's tokens are known, which the "
        "ranks fill in; with several, more microbatches are in flight",
    ),
    imply(
        Feature.OVERLAP,
        Feature.STOP,
        why="an end that nobody foresaw costs one row, whose result and KV nobody sees",
    ),
    imply(
        Feature.SPECULATION,
        Feature.SEED,
        why="a drafted token stands if it is the one that would be drawn: the same text, in fewer "
        "steps",
    ),
    imply(
        Feature.SPECULATION,
        Feature.PREFIX_CACHE,
        why="where the drafter's KV depends on the next token, cached pages go by that too: after "
        "a hit as much is accepted",
    ),
    imply(
        Feature.SPECULATION,
        Feature.OVERLAP,
        why="nothing is planned behind drafts before they are known; where drafts do not pay none "
        "are made, and steps overlap (spec.adaptive)",
    ),
    imply(
        Feature.SPECULATION,
        Feature.PP,
        why="the last stage drafts at the end of each step; other microbatches fill the time",
    ),
    imply(
        Feature.SPECULATION,
        Feature.RETRACTION,
        why="drafts take rows and pages that nobody else needs: nobody is retracted for one",
    ),
    require(
        Feature.DYNAMIC_CHUNKS,
        Feature.PP,
        why="chunks of equal time are for stages that would wait for each other; one stage never "
        "waits (layout.pp of 2 or more)",
    ),
)

# Features that a configuration switches on; requests ask for the others.
ASKED: dict[Feature, Callable[[Config], bool]] = {
    Feature.PREFIX_CACHE: lambda config: config.schedule.prefix_cache,
    Feature.FLOAT32: lambda config: config.model.dtype == "float32",
    Feature.BLOCKS: lambda config: config.model.weights != "bf16",
    Feature.KV_INT8: lambda config: config.cache.kv_dtype == "int8",
    Feature.TP: lambda config: config.layout.tp > 1,
    Feature.PP: lambda config: config.layout.pp > 1,
    Feature.DP: lambda config: config.layout.dp > 1,
    Feature.CP: lambda config: config.layout.cp > 1,
    Feature.EP: lambda config: config.layout.ep > 1,
    Feature.MOE_DP: lambda config: config.layout.moe_dp > 1,
    Feature.EXACT: lambda config: config.layout.numerics == "exact",
    Feature.OVERLAP: lambda config: overlap_of(config.layout, config.schedule) > 0,
    Feature.DYNAMIC_CHUNKS: lambda config: config.schedule.dynamic_chunks,
    Feature.SPECULATION: lambda config: config.spec.method != "none",
}


def explain(config: Config) -> tuple[Finding, ...]:
    """Everything that keeps a configuration from starting, all at once."""
    asked = [feature for feature, is_asked in ASKED.items() if is_asked(config)]
    found = [
        Finding((feature,), f"{SET_BY[feature]}: {feature} is not in this release: {why}")
        for feature, why in ABSENT.items()
        if feature in asked
    ]
    for rule in RULES:
        if rule.first in asked and rule.kind == "forbid" and rule.second in asked:
            text = f"{SET_BY[rule.first]} and {SET_BY[rule.second]}: {rule.why}"
            found.append(Finding((rule.first, rule.second), text))
        # What no configuration switches on is always on.
        missing = rule.second in ASKED and rule.second not in asked
        if rule.first in asked and rule.kind == "require" and missing:
            text = f"{SET_BY[rule.first]} needs {SET_BY[rule.second]}: {rule.why}"
            found.append(Finding((rule.first, rule.second), text))
    found += [Finding((), text) for text in grid.findings(config.layout)]
    return tuple(found)


class Row(msgspec.Struct, frozen=True):
    """One line of the matrix. `refused_with` and `notes` map other features to reasons."""

    feature: str
    works: bool
    set_by: str
    why: str
    refused_with: dict[str, str]
    notes: dict[str, str]


def rows() -> tuple[Row, ...]:
    """The matrix as data: what works today, what does not, and why."""
    made: list[Row] = []
    for feature in Feature:
        refused: dict[str, str] = {}
        notes: dict[str, str] = {}
        for rule in RULES:
            if feature not in (rule.first, rule.second):
                continue
            other = rule.second if feature == rule.first else rule.first
            if rule.kind == "forbid":
                refused[other] = rule.why
            elif feature == rule.first:
                notes[other] = rule.why
        why = ABSENT.get(feature, "")
        made.append(Row(feature, feature not in ABSENT, SET_BY[feature], why, refused, notes))
    return tuple(made)


def matrix() -> str:
    """The matrix as Markdown: a line a feature."""
    lines = ["| feature | works | with | set by |", "|---|---|---|---|"]
    for row in rows():
        if not row.works:
            lines.append(f"| {row.feature} | no: {row.why} | - | {row.set_by or '-'} |")
            continue
        cases = [f"not with {other}: {why}" for other, why in row.refused_with.items()]
        cases = cases or ["all that works"]
        cases += [f"{other}: {why}" for other, why in row.notes.items()]
        lines.append(f"| {row.feature} | yes | {'; '.join(cases)} | {row.set_by} |")
    return "\n".join(lines) + "\n"
