"""The whole configuration as one tree of frozen structs; modules take the struct they need."""

from typing import Literal

import msgspec

Accept = Literal["noise", "rejection"]


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the configuration."""


class Model(Struct, frozen=True):
    """Which weights. `path` is `smollm2`, a folder, a `.gguf` file or a hub name."""

    path: str = "smollm2"
    name: str | None = None  # as clients call it; default: derived from path
    dtype: Literal["auto", "bf16", "float32"] = "auto"
    weights: Literal["keep", "bf16", "int8", "q4"] = "keep"
    context_len: int | None = None
    chat_template: str | None = None  # a file with a Jinja template that replaces the model's own
    tool_parser: Literal["auto", "hermes", "none"] = "auto"
    reasoning_parser: Literal["auto", "qwen3", "none"] = "auto"


class Layout(Struct, frozen=True):
    """How a model is split over ranks: world = pp * tp; see `aserve.core.layout`."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    moe_dp: int = 1
    layers: tuple[int, ...] | None = None  # of each stage; None: even shares
    cp_split: Literal["interleave", "zigzag"] = "interleave"
    experts: Literal["gathered", "all_to_all"] = "gathered"
    numerics: Literal["exact", "fast"] = "exact"


class Ranks(Struct, frozen=True):
    """Where ranks live, and how long one may keep the others waiting."""

    live: Literal["auto", "inline", "thread", "process", "cluster"] = "auto"
    layer_plane: Literal["auto", "shared_memory", "torch"] = "auto"  # between processes
    plane_s: float = 10.0  # a rank that meets its peers later than this is absent
    start_s: float = 600.0  # processes must have loaded and joined within this
    restarts_max: int = 3  # of the grid, one after another without a token between


class Schedule(Struct, frozen=True):
    step_tokens: int = 512  # rows computed in one step, prefill and decode together
    running_max: int = 64  # sequences with KV at once
    waiting_max: int = 512  # queued sequences beyond which a request gets 429
    prefix_cache: bool = True
    overlap: int | None = None  # plans in flight beyond one a stage; None: 1 where pp is 1
    dynamic_chunks: bool = False  # size prompt chunks for equal time instead of equal length


class Cache(Struct, frozen=True):
    """`kv_tokens` is the size of the KV pool; None takes a share of free memory, bounded.

    `kept_tokens` bounds what the pool grows to for the sake of prefixes that nobody uses just now.
    """

    page_size: int = 16
    kv_tokens: int | None = None
    kv_mib_max: int = 2048
    kept_tokens: int = 8192
    kv_dtype: Literal["auto", "bf16", "float32", "int8"] = "auto"


class Spec(Struct, frozen=True):
    """Speculative decoding. `depth`, `topk` and `tokens` bound a draft; None is the method's own.

    `path` is the draft head or draft model; None: what belongs to the model. A draft changes no
    text. With `accept` "noise" it knows the noise of the draws that it foresees; with "rejection"
    it does not, so that each token is accepted as often as the model would have it.
    """

    method: Literal["none", "ngram", "draft", "eagle", "eagle3"] = "none"
    path: str | None = None
    depth: int | None = None  # levels below the last known token
    topk: int | None = None  # children of a node; 1 is a chain
    tokens: int | None = None  # drafted at once for a sequence
    adaptive: bool = True  # less, or nothing, where that is measured to be faster
    accept: Accept = "noise"
    ngram_min: int = 2  # tokens that must repeat before what followed them is proposed
    ngram_max: int = 5


class Compute(Struct, frozen=True):
    threads: int | None = None  # None: every core this process may use
    kernels: Literal["native", "reference"] = "native"
    fused: bool = True  # native kernels run whole blocks of layers in one call


class Limits(Struct, frozen=True):
    n_max: int = 64
    logprobs_max: int = 20
    stop_max: int = 16
    stop_len_max: int = 256
    bad_words_max: int = 256
    logit_bias_max: int = 1024
    prompts_max: int = 256  # prompts in one completions call
    messages_max: int = 4096  # messages in one chat
    grammar_bytes_max: int = 65536
    grammar_depth_max: int = 64
    grammar_compile_s: float = 5.0
    body_bytes_max: int = 8 << 20


class Server(Struct, frozen=True):
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    drain_s: float = 20.0
    write_s: float = 30.0  # a client that reads nothing for this long is cut off
    request_s: float = 600.0
    read_s: float = 30.0  # a request body must have come within this
    keep_alive_s: float = 75.0  # an idle connection is kept this long
    connections_max: int = 1024
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False


class Config(Struct, frozen=True):
    model: Model = Model()
    layout: Layout = Layout()
    ranks: Ranks = Ranks()
    schedule: Schedule = Schedule()
    cache: Cache = Cache()
    spec: Spec = Spec()
    compute: Compute = Compute()
    limits: Limits = Limits()
    server: Server = Server()
