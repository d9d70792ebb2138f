"""The CUDA library as ctypes sees it: its structs, its functions, and how it is opened.

The structs are those of csrc/include/aserve/cuda.cuh, field by field, which a test compares.
Nothing here knows torch.
"""

import ctypes
import pathlib

from aserve.errors import ConfigError

PATH = pathlib.Path(__file__).resolve().parent.parent / "libaserve_cuda.so"

_TYPES: dict[str, type] = {
    "*": ctypes.c_void_p,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


def _struct(name: str, fields: str) -> type[ctypes.Structure]:
    """Fields by name, `:type` behind them, int64 without one."""
    pairs = [(field + ":i64").split(":")[:2] for field in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": [(n, _TYPES[t]) for n, t in pairs]})


Norm = _struct(
    "aserve_norm",
    "x:* x_stride residual:* total:* weight:* y:* y_bf16:* rows heads dim eps:f32",
)
Rope = _struct(
    "aserve_rope",
    "q:* k:* q_stride k_stride q_heads k_heads rows dim rot positions:* cos_sin:* q_weight:* "
    "k_weight:* eps:f32",
)
SiluMul = _struct("aserve_silu_mul", "gate_up:* out:* out_bf16:* rows dim")
Embed = _struct("aserve_embed", "table:* ids:* out:* vocab dim rows type:i32")
Pages = _struct(
    "aserve_pages", "k:* v:* pages page_size heads dim head_len k_stride v_stride type:i32"
)
Append = _struct("aserve_append", "k:* v:* k_stride v_stride slots:* rows")
Tokens = _struct(
    "aserve_tokens", "pool:* pages page_size heads head_bytes page_stride rows_at:* slots:* rows"
)
Copy = _struct(
    "aserve_kv_copy",
    "from:* to:* from_pages:* to_pages:* from_page_size from_heads from_stride from_head "
    "to_page_size to_heads to_stride to_head heads head_bytes begin end",
)
Rows = _struct("aserve_rows", "x:* out:* index:* x_stride row_bytes rows")
CpIndex = _struct(
    "aserve_cp_index", "starts:* lengths:* places:* rows:* sequences cp rank kind:i32"
)
Attention = _struct(
    "aserve_attend",
    "q:* out:* row_start:* positions:* kv_len:* page_table:* path_start:* paths:* sinks:* "
    "partials:* q_stride rows heads sequences pages_max splits window scale:f32",
)
Narrow = _struct("aserve_narrow", "x:* out:* x_stride rows k k_pad blocks")
Gemm = _struct("aserve_gemm", "x:* w:* parts:* workspace:* workspace_bytes m n k blocks")
Sum = _struct("aserve_sum", "parts:* bias:* y:* m n n_pad blocks")
DrawRow = _struct(
    "aserve_draw_row",
    "mask:* bias_ids:* bias:* seen_ids:* seen:* banned:* bias_n seen_n banned_n top_k "
    "temperature:f64 top_p:f64 min_p:f64 presence:f64 frequency:f64 repetition:f64 key:u64",
)
Draw = _struct("aserve_draw", "logits:* rows:* edited:* status:* token:* logits_stride vocab n")
Logprobs = _struct(
    "aserve_logprobs",
    "logits:* tokens:* logprobs:* top_ids:* top_logprobs:* ok:* logits_stride vocab n top_n",
)
TreePool = _struct("aserve_tree_pool", "scores:* tokens:* parents:* capacity n")
Noise = _struct(
    "aserve_noise",
    "logprobs:* tokens:* seeds:* positions:* temperatures:* out_logprobs:* out_tokens:* n m k",
)
Expand = _struct(
    "aserve_expand",
    "logprobs:* top_tokens:* beam:* places:* tokens:* rows:* begin beams k width",
)
Select = _struct("aserve_select", "start:* tokens:* parents:* scores:* count")
LayOut = _struct(
    "aserve_lay_out",
    "row_start:* parents:* starts:* positions:* first_child:* next_sibling:* mask:* n words",
)
Accept = _struct(
    "aserve_accept",
    "row_start:* parents:* tokens:* drawn:* slots:* path:* kept:* lengths:* next:* from_slots:* "
    "to_slots:* n",
)
Compact = _struct(
    "aserve_compact",
    "pools:* starts:* from_slots:* to_slots:* n sequences pages page_size token_bytes page_stride "
    "alignment",
)

# What each function takes before the stream: structs by reference, or plain values.
CALLS: dict[str, tuple[type, ...]] = {
    "rms_norm": (Norm,),
    "rope": (Rope,),
    "add": (_TYPES["*"], _TYPES["*"], _TYPES["*"], _TYPES["i64"]),
    "silu_mul": (SiluMul,),
    "embed": (Embed,),
    "kv_append": (Pages, Append),
    "kv_gather": (Tokens,),
    "kv_scatter": (Tokens,),
    "kv_copy": (Copy,),
    "gather_rows": (Rows,),
    "scatter_rows": (Rows,),
    "cp_index": (CpIndex,),
    "attention": (Pages, Attention),
    "narrow": (Narrow,),
    "gemm": (Gemm,),
    "sum_parts": (Sum,),
    "draw": (Draw,),
    "logprobs": (Logprobs,),
    "under_noise": (Noise,),
    "expand": (TreePool, Expand),
    "select": (TreePool, Select),
    "lay_out": (LayOut,),
    "accept": (Accept,),
    "compact": (Compact,),
}

FLASH_SPLIT = 256  # flash.cuh
TOP_N_MAX = 128  # sample.cu
CANDIDATES_MAX = 8192  # tree.cu
NOISY_MAX = 4096


class CudaError(RuntimeError):
    """A kernel was not queued, or a call before it failed: the device's state is lost."""


class NoDevice(ConfigError):
    """The library is there and no GPU that its kernels are for."""


class Library:
    """The functions of one library file. OSError if it cannot be loaded."""

    def __init__(self, path: pathlib.Path = PATH) -> None:
        self._library = ctypes.CDLL(str(path))
        self._calls = {}
        for name, takes in CALLS.items():
            call = getattr(self._library, f"aserve_cuda_{name}")
            by_pointer = [
                ctypes.POINTER(one) if issubclass(one, ctypes.Structure) else one for one in takes
            ]
            call.argtypes = [*by_pointer, ctypes.c_void_p]
            call.restype = ctypes.c_int
            self._calls[name] = call
        self._workspace = self._library.aserve_cuda_gemm_workspace
        self._workspace.argtypes = [ctypes.POINTER(Gemm)]
        self._workspace.restype = ctypes.c_int64
        self._error = self._library.aserve_cuda_error
        self._error.argtypes = [ctypes.c_int]
        self._error.restype = ctypes.c_char_p

    @property
    def is_host(self) -> bool:
        """The kernels compiled for the host, for tests: pointers are to host memory."""
        return self._library.aserve_cuda_backend() == 1

    @property
    def devices(self) -> int:
        """How many there are; minus CUDA's error where it cannot tell."""
        count: int = self._library.aserve_cuda_devices()
        return count

    @property
    def capability(self) -> int:
        """10 * major + minor of the current device."""
        found: int = self._library.aserve_cuda_capability()
        if found < 0:
            raise CudaError(f"no compute capability: {self.error(-found)} ({-found})")
        return found

    def error(self, code: int) -> str:
        told: bytes = self._error(code)
        return told.decode()

    def call(self, name: str, *arguments: object, stream: int | None) -> None:
        code = self._calls[name](*arguments, stream)
        if code != 0:
            raise CudaError(f"{name}: {self.error(code)} ({code})")

    def gemm_workspace(self, call: ctypes.Structure) -> int:
        found: int = self._workspace(call)
        return found


def open_library(path: pathlib.Path = PATH) -> Library:
    """ConfigError where it is not built, or there is no device that its kernels are for."""
    if not path.exists():
        raise ConfigError(f"the CUDA kernels are not built ({path.name}): run `make cuda`")
    try:
        library = Library(path)
    except OSError as error:
        raise ConfigError(f"the CUDA kernels do not load: {error}") from error
    if (count := library.devices) <= 0:
        raise NoDevice(f"no CUDA device: {library.error(-count)} ({-count})")
    capability = library.capability
    if capability != 90 and capability // 10 != 8:
        major, minor = divmod(capability, 10)
        raise NoDevice(f"the CUDA kernels are for 8.x and 9.0, this device is {major}.{minor}")
    return library
