// thread_block.cuh on a GPU: a Local is a register, a phase is straight code.
#pragma once

#include <cuda_runtime.h>

namespace aserve {

// The error code of a launch, as cudaError_t.
using Stream = cudaStream_t;

template <int Threads>
class Block {
 public:
  static constexpr int threads = Threads;
  static constexpr int warps = Threads / 32;

  template <class T>
  struct Local {
    T value;
    __device__ __forceinline__ explicit Local(Block&) {}
    __device__ __forceinline__ T& operator[](int) { return value; }
  };

  __device__ __forceinline__ explicit Block(char* memory) : shared(memory) {}

  char* shared;  // 128-byte aligned
  __device__ __forceinline__ int64_t x() const { return blockIdx.x; }
  __device__ __forceinline__ int64_t y() const { return blockIdx.y; }
  __device__ __forceinline__ int64_t z() const { return blockIdx.z; }

  template <class Phase>
  __device__ __forceinline__ void each(const Phase& phase) {
    phase(static_cast<int>(threadIdx.x));
    sync();
  }
  template <class Phase>
  __device__ __forceinline__ void each_alone(const Phase& phase) {
    phase(static_cast<int>(threadIdx.x));
  }
  __device__ __forceinline__ void sync() { __syncthreads(); }

  // The same bits on every thread, and as the host's: butterflies in a warp, then warps in order.
  template <class T, class Op>
  __device__ __forceinline__ T reduce(Local<T>& local, Op op) {
    reduce_warps(local, op);
    if (Threads == 32) return local.value;
    __shared__ T parts[warps];
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = local.value;
    __syncthreads();
    T total = parts[0];
#pragma unroll
    for (int warp = 1; warp < warps; ++warp) total = op(total, parts[warp]);
    __syncthreads();
    return total;
  }
  // Every thread of a warp gets what its warp has together.
  template <class T, class Op>
  __device__ __forceinline__ void reduce_warps(Local<T>& local, Op op) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
      local.value = op(local.value, __shfl_xor_sync(~0u, local.value, step));
    }
  }
  // The same for groups of four threads, which share two rows of a fragment.
  template <class Op>
  __device__ __forceinline__ void reduce_quads(Local<Two>& local, Op op) {
#pragma unroll
    for (int step = 1; step < 4; step <<= 1) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        local.value.v[i] = op(local.value.v[i], __shfl_xor_sync(~0u, local.value.v[i], step));
      }
    }
  }

  // Two bfloat16, rounded to nearest, ties to even.
  static __device__ __forceinline__ uint32_t pair_of(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }

  // c[16, 8] += a[16, 16] b[16, 8] in each warp, bfloat16 into float32 (PTX ISA, mma.m16n8k16).
  template <class C, class A, class B>
  __device__ __forceinline__ void mma(const C& c_of, const A& a_of, const B& b_of) {
    float* c = c_of(threadIdx.x);
    const uint32_t* a = a_of(threadIdx.x);
    const uint32_t* b = b_of(threadIdx.x);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }

  // Four 8x8 matrices of 16-bit numbers from shared memory into four registers (PTX ISA, ldmatrix);
  // row r of matrix i is where thread 8 i + r says.
  template <bool Transposed, class To, class From>
  __device__ __forceinline__ void load_matrices(const To& to_of, const From& from_of) {
    uint32_t* to = to_of(threadIdx.x);
    const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(from_of(threadIdx.x)));
    if (Transposed) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(from)
                   : "memory");
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(from)
                   : "memory");
    }
  }

  // Bytes (4 or 16) to shared memory, or zeros; there after `commit` and `wait`. `from` is not read
  // where `there` is false.
  template <int Bytes>
  __device__ __forceinline__ void copy(void* to, const void* from, bool there) {
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    const int bytes = there ? Bytes : 0;
    if (Bytes == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(at), "l"(from),
                   "r"(bytes)
                   : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(at), "l"(from),
                   "r"(bytes)
                   : "memory");
    }
  }
  __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
  // Until all but the latest `Groups` commits of every thread are there.
  template <int Groups>
  __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(Groups) : "memory");
    __syncthreads();
  }

  // Adds to a number in shared memory; returns what was there.
  __device__ __forceinline__ uint64_t add(uint64_t* at, uint64_t value) {
    return atomicAdd(reinterpret_cast<unsigned long long*>(at),
                     static_cast<unsigned long long>(value));
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::threads) run(const __grid_constant__ Kernel kernel) {
  extern __shared__ __align__(128) char memory[];
  Block<Kernel::threads> block(memory);
  kernel(block);
}

// Returns a cudaError_t; an empty grid is no launch.
template <class Kernel>
int launch(const Kernel& kernel, const Grid& grid, int64_t shared_bytes, void* stream) {
  if (grid.empty()) return cudaSuccess;
  if (grid.y > 65535 || grid.z > 65535 || grid.x > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(
        run<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                    static_cast<unsigned>(grid.z));
  run<Kernel><<<blocks, Kernel::threads, static_cast<size_t>(shared_bytes),
                static_cast<Stream>(stream)>>>(kernel);
  return cudaGetLastError();
}

}  // namespace aserve
