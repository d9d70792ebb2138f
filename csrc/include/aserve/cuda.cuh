// The C ABI of the CUDA kernels: the operations of aserve/tensor/ops.py and sampler.py on pointers to
// device memory. Every function queues its work on `stream` and returns a cudaError_t, 0 for success;
// shapes and indices are checked by the caller (aserve/tensor/cuda.py, which has the same structs).
// Activations are float32 unless a call says otherwise. Types: 0 float32, 1 bfloat16, 2 int8.
//
// A row's bits depend on that row (and its sequence) alone, never on the rows beside it: sums run over
// fixed strides, keys in blocks and splits of fixed length from position 0, tiles of fixed shape.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// x [rows, heads, dim], rows x_stride apart, each head by itself. With `residual` (heads is 1) first
// total = x + residual. y and y_bf16 [rows, heads, dim]; either may be null.
typedef struct {
  const float* x;
  int64_t x_stride;
  const float* residual;
  float* total;
  const float* weight;
  float* y;
  uint16_t* y_bf16;
  int64_t rows, heads, dim;
  float eps;
} aserve_norm;
int aserve_cuda_rms_norm(const aserve_norm* call, void* stream);

// In place: q and k normed head by head if their weights are not null, then the first `rot` of `dim`
// turned, pairs (i, i + rot / 2). cos_sin [positions, rot].
typedef struct {
  float* q;
  float* k;
  int64_t q_stride, k_stride, q_heads, k_heads, rows, dim, rot;
  const int32_t* positions;
  const float* cos_sin;
  const float* q_weight;
  const float* k_weight;
  float eps;
} aserve_rope;
int aserve_cuda_rope(const aserve_rope* call, void* stream);

int aserve_cuda_add(const float* x, const float* y, float* out, int64_t n, void* stream);

// gate_up [rows, 2 dim] -> silu(gate) * up [rows, dim]; out or out_bf16 may be null.
typedef struct {
  const float* gate_up;
  float* out;
  uint16_t* out_bf16;
  int64_t rows, dim;
} aserve_silu_mul;
int aserve_cuda_silu_mul(const aserve_silu_mul* call, void* stream);

// Rows of table [vocab, dim] of type 0 or 1; NaN for an id outside it.
typedef struct {
  const void* table;
  const int64_t* ids;
  float* out;
  int64_t vocab, dim, rows;
  int32_t type;
} aserve_embed;
int aserve_cuda_embed(const aserve_embed* call, void* stream);

// One layer's pages: k and v [pages, page_size, heads, head_len], pages k_stride and v_stride elements
// apart. head_len is dim; in type 2 dim + 4: a head is dim int8 and then their scale, a float32.
typedef struct {
  void* k;
  void* v;
  int64_t pages, page_size, heads, dim, head_len;
  int64_t k_stride, v_stride;
  int32_t type;
} aserve_pages;

// k and v [rows, heads, dim], rows k_stride and v_stride apart. A slot outside the pages is left out.
// int8: the scale is the largest magnitude / 127; values over it, to nearest, ties to even.
typedef struct {
  const float* k;
  const float* v;
  int64_t k_stride, v_stride;
  const int32_t* slots;
  int64_t rows;
} aserve_append;
int aserve_cuda_kv_append(const aserve_pages* pages, const aserve_append* call, void* stream);

// Whole tokens of one pool as bytes: rows_at [rows, heads, head_bytes] = pool[slots], and back. A slot
// outside the pages is left out. page_stride is in bytes.
typedef struct {
  void* pool;
  int64_t pages, page_size, heads, head_bytes, page_stride;
  void* rows_at;
  const int32_t* slots;
  int64_t rows;
} aserve_tokens;
int aserve_cuda_kv_gather(const aserve_tokens* call, void* stream);
int aserve_cuda_kv_scatter(const aserve_tokens* call, void* stream);

// Tokens [begin, end) of a sequence, `heads` of their heads, between pools of one head_bytes. Page
// tables from position 0; strides in bytes.
typedef struct {
  const void* from;
  void* to;
  const int32_t* from_pages;
  const int32_t* to_pages;
  int64_t from_page_size, from_heads, from_stride, from_head;
  int64_t to_page_size, to_heads, to_stride, to_head;
  int64_t heads, head_bytes, begin, end;
} aserve_kv_copy;
int aserve_cuda_kv_copy(const aserve_kv_copy* call, void* stream);

// out[i] = x[index[i]] or out[index[i]] = x[i]; rows of row_bytes, those of x x_stride bytes apart.
typedef struct {
  const void* x;
  void* out;
  const int32_t* index;
  int64_t x_stride, row_bytes, rows;
} aserve_rows;
int aserve_cuda_gather_rows(const aserve_rows* call, void* stream);
int aserve_cuda_scatter_rows(const aserve_rows* call, void* stream);

// The rows of a group that a context-parallel rank holds (context_parallel.h). Of sequence n the rows
// start at starts[n] in the group and at places[n] in `rows`.
typedef struct {
  const int64_t* starts;
  const int64_t* lengths;
  const int64_t* places;
  int32_t* rows;
  int64_t sequences, cp, rank;
  int32_t kind;
} aserve_cp_index;
int aserve_cuda_cp_index(const aserve_cp_index* call, void* stream);

// softmax(q k^T scale) v over paged keys of type 1 or 2; dim a multiple of 8, at most 128. q [rows, heads, dim], rows q_stride apart; out contiguous. Sequence n owns rows row_start[n] to
// row_start[n + 1]; row t sees its keys up to positions[t], and of them the last `window` (0: all).
// `sinks` [heads] or null: a logit each head always attends, with no value. path_start [rows + 1] and
// paths, or null: a row of a tree sees the keys before the tree, and in it those on its path, places
// paths[path_start[t]] to paths[path_start[t + 1] - 1] counted from the tree's first key, which is
// positions[t] + 1 - the path's length. A row without a path goes by position; a sequence has rows of
// one kind.
//
// Keys go in blocks of 64 (of 32 where dim > 64) and splits of 256, each from zero, splits added in order: neither the tile a
// row is in, nor whether splits are shared out to blocks changes a bit. For few rows they
// should be: `partials` then has rows * heads * splits * (dim + 2) floats, and splits * 256 reaches every
// kv_len; else it is null.
typedef struct {
  const float* q;
  float* out;
  const int32_t* row_start;
  const int32_t* positions;
  const int32_t* kv_len;
  const int32_t* page_table;
  const int32_t* path_start;
  const int32_t* paths;
  const float* sinks;
  float* partials;
  int64_t q_stride, rows, heads, sequences, pages_max, splits, window;
  float scale;
} aserve_attend;
int aserve_cuda_attention(const aserve_pages* pages, const aserve_attend* call, void* stream);

// x float32 [rows, k], rows x_stride apart, to bfloat16 [rows, blocks, k_pad], each of the `blocks`
// parts of k padded with zeros.
typedef struct {
  const float* x;
  uint16_t* out;
  int64_t x_stride, rows, k, k_pad, blocks;
} aserve_narrow;
int aserve_cuda_narrow(const aserve_narrow* call, void* stream);

// parts[block, m, n] = x[m, block, k] w[n, block, k]^T: bfloat16, summed in float32 on tensor cores. k
// (of a block) is a multiple of 8, n of 4. One tile shape whatever m. Compute capability 9.0 or 8.x.
typedef struct {
  const uint16_t* x;
  const uint16_t* w;
  float* parts;
  void* workspace;
  int64_t workspace_bytes, m, n, k, blocks;
} aserve_gemm;
int aserve_cuda_gemm(const aserve_gemm* call, void* stream);
int64_t aserve_cuda_gemm_workspace(const aserve_gemm* call);

// y[m, n] = parts[0] + parts[1] + ... + bias, parts [blocks, m, n_pad]; bias may be null.
typedef struct {
  const float* parts;
  const float* bias;
  float* y;
  int64_t m, n, n_pad, blocks;
} aserve_sum;
int aserve_cuda_sum_parts(const aserve_sum* call, void* stream);

// One row's draw, in the order of sample.h. Arrays live on the device; ids within each are distinct,
// and ids outside the vocabulary are ignored.
typedef struct {
  const uint32_t* mask;
  const int32_t* bias_ids;
  const double* bias;
  const int32_t* seen_ids;
  const int32_t* seen;
  const int32_t* banned;
  int64_t bias_n, seen_n, banned_n, top_k;
  double temperature, top_p, min_p, presence, frequency, repetition;
  uint64_t key;
} aserve_draw_row;
// logits [n, vocab], rows logits_stride apart; rows [n]; `edited` [n, vocab] floats of room. Out:
// status[n] (sample.h, Drawn) and token[n].
typedef struct {
  const float* logits;
  const aserve_draw_row* rows;
  float* edited;
  int32_t* status;
  int32_t* token;
  int64_t logits_stride, vocab, n;
} aserve_draw;
int aserve_cuda_draw(const aserve_draw* call, void* stream);

// log softmax of row i at tokens[i], and of its top_n <= 128 best, best first and the lower id first
// among equals. ok[i] is 0 where a logit is NaN or +inf, or all are -inf.
typedef struct {
  const float* logits;
  const int32_t* tokens;
  double* logprobs;
  int32_t* top_ids;
  double* top_logprobs;
  int32_t* ok;
  int64_t logits_stride, vocab, n, top_n;
} aserve_logprobs;
int aserve_cuda_logprobs(const aserve_logprobs* call, void* stream);

// The candidates of n trees (tree.h), trees `capacity` apart.
typedef struct {
  float* scores;
  int32_t* tokens;
  int32_t* parents;
  int64_t capacity, n;
} aserve_tree_pool;

// The m <= 4096 likeliest tokens of n rows under the target's noise (tree.h), and the first k of them.
typedef struct {
  const float* logprobs;
  const int32_t* tokens;
  const uint64_t* seeds;
  const int32_t* positions;
  const float* temperatures;
  float* out_logprobs;
  int32_t* out_tokens;
  int64_t n, m, k;
} aserve_noise;
int aserve_cuda_under_noise(const aserve_noise* call, void* stream);

// logprobs and top_tokens [n, beams, k] become candidates begin to begin + beams * k of each tree, below
// its candidates beam [n, beams] or, where that is null, below the root; places, tokens and rows
// [n, width] are the best of them.
typedef struct {
  const float* logprobs;
  const int32_t* top_tokens;
  const int32_t* beam;
  int32_t* places;
  int32_t* tokens;
  int32_t* rows;
  int64_t begin, beams, k, width;
} aserve_expand;
int aserve_cuda_expand(const aserve_tree_pool* pool, const aserve_expand* call, void* stream);

// The start[i + 1] - start[i] best of tree i's `count` <= 8192 candidates, in their order.
typedef struct {
  const int32_t* start;
  int32_t* tokens;
  int32_t* parents;
  float* scores;
  int64_t count;
} aserve_select;
int aserve_cuda_select(const aserve_tree_pool* pool, const aserve_select* call, void* stream);

// Of rows row_start[i] to row_start[i + 1] of n trees; mask [rows, words].
typedef struct {
  const int32_t* row_start;
  const int32_t* parents;
  const int32_t* starts;
  int32_t* positions;
  int32_t* first_child;
  int32_t* next_sibling;
  uint64_t* mask;
  int64_t n, words;
} aserve_lay_out;
int aserve_cuda_lay_out(const aserve_lay_out* call, void* stream);

// The path each of n trees keeps (tree.h): rows row_start[i] to row_start[i + 1] of parents, tokens
// and drawn; path and kept [rows] from row_start[i] on, -1 behind the path; lengths[n], and next[n],
// the token after the path. Where slots is not null, from_slots and to_slots [rows] say which KV
// moves: -1 where none does.
typedef struct {
  const int32_t* row_start;
  const int32_t* parents;
  const int32_t* tokens;
  const int32_t* drawn;
  const int32_t* slots;
  int32_t* path;
  int32_t* kept;
  int32_t* lengths;
  int32_t* next;
  int32_t* from_slots;
  int32_t* to_slots;
  int64_t n;
} aserve_accept;
int aserve_cuda_accept(const aserve_accept* call, void* stream);

// Pairs starts[i] to starts[i + 1] of sequence i move one after the other, in each of n pools of
// page_size tokens of token_bytes; pools [n] are addresses, page_stride is in bytes. A slot outside the
// pages is left out.
typedef struct {
  const uint64_t* pools;
  const int32_t* starts;
  const int32_t* from_slots;
  const int32_t* to_slots;
  int64_t n, sequences, pages, page_size, token_bytes, page_stride, alignment;
} aserve_compact;
int aserve_cuda_compact(const aserve_compact* call, void* stream);

// 0: CUDA. 1: the same kernels compiled for the host, for tests; pointers are to host memory then.
int aserve_cuda_backend(void);
// Devices, or minus the cudaError_t that says why there are none.
int aserve_cuda_devices(void);
// 10 * major + minor of the current device, or minus an error.
int aserve_cuda_capability(void);
const char* aserve_cuda_error(int code);

#ifdef __cplusplus
}
#endif
