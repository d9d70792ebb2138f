// thread_block.cuh on the host: threads take turns in each phase, blocks one after the other. Strict
// where a GPU is silent: shared memory starts as NaN, asynchronous copies arrive only when waited for,
// and `host_order` turns the order of threads and blocks about, so that a phase in which one thread
// needs what another does in the same phase gives another result.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "aserve/number.h"

namespace aserve {

inline bool& host_backwards() {
  static bool backwards = false;
  return backwards;
}

template <int Threads>
class Block {
 public:
  static constexpr int threads = Threads;
  static constexpr int warps = Threads / 32;

  template <class T>
  struct Local {
    std::vector<T> values;
    explicit Local(Block&) : values(Threads) {
      std::memset(static_cast<void*>(values.data()), 0xff, Threads * sizeof(T));
    }
    T& operator[](int thread) { return values[static_cast<size_t>(thread)]; }
  };

  Block(char* memory, const Grid& place) : shared(memory), place_(place) {}

  char* shared;
  int64_t x() const { return place_.x; }
  int64_t y() const { return place_.y; }
  int64_t z() const { return place_.z; }

  template <class Phase>
  void each(const Phase& phase) {
    for (int i = 0; i < Threads; ++i) phase(host_backwards() ? Threads - 1 - i : i);
  }
  template <class Phase>
  void each_alone(const Phase& phase) {
    each(phase);
  }
  void sync() {}

  template <class T, class Op>
  T reduce(Local<T>& local, Op op) {
    reduce_warps(local, op);
    T total = local[0];
    for (int warp = 1; warp < warps; ++warp) total = op(total, local[warp * 32]);
    return total;
  }
  template <class T, class Op>
  void reduce_warps(Local<T>& local, Op op) {
    for (int step = 16; step > 0; step >>= 1) {
      const std::vector<T> before = local.values;
      for (int t = 0; t < Threads; ++t) local[t] = op(before[t], before[t ^ step]);
    }
  }
  template <class Op>
  void reduce_quads(Local<Two>& local, Op op) {
    for (int step = 1; step < 4; step <<= 1) {
      const std::vector<Two> before = local.values;
      for (int t = 0; t < Threads; ++t) {
        for (int i = 0; i < 2; ++i) local[t].v[i] = op(before[t].v[i], before[t ^ step].v[i]);
      }
    }
  }

  static uint32_t pair_of(float low, float high) {
    return static_cast<uint32_t>(narrow(low)) | static_cast<uint32_t>(narrow(high)) << 16;
  }

  // Fragments as the PTX ISA lays them out over a warp.
  template <class C, class A, class B>
  void mma(const C& c_of, const A& a_of, const B& b_of) {
    for (int warp = 0; warp < warps; ++warp) {
      float a[16][16], b[16][8];
      for (int lane = 0; lane < 32; ++lane) {
        const uint32_t* from_a = a_of(warp * 32 + lane);
        const uint32_t* from_b = b_of(warp * 32 + lane);
        const int row = lane / 4, pair = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) {
          for (int j = 0; j < 2; ++j) {
            a[row + i % 2 * 8][pair + i / 2 * 8 + j] = half_of(from_a[i], j);
          }
        }
        for (int i = 0; i < 2; ++i) {
          for (int j = 0; j < 2; ++j) b[pair + i * 8 + j][row] = half_of(from_b[i], j);
        }
      }
      for (int lane = 0; lane < 32; ++lane) {
        float* c = c_of(warp * 32 + lane);
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
          for (int k = 0; k < 16; ++k) c[i] = std::fma(a[row][k], b[k][column], c[i]);
        }
      }
    }
  }

  template <bool Transposed, class To, class From>
  void load_matrices(const To& to_of, const From& from_of) {
    for (int warp = 0; warp < warps; ++warp) {
      uint16_t matrix[4][8][8];
      for (int lane = 0; lane < 32; ++lane) {
        std::memcpy(matrix[lane / 8][lane % 8], from_of(warp * 32 + lane), 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        uint32_t* to = to_of(warp * 32 + lane);
        const int row = lane / 4, pair = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) {
          const uint32_t low = Transposed ? matrix[i][pair][row] : matrix[i][row][pair];
          const uint32_t high = Transposed ? matrix[i][pair + 1][row] : matrix[i][row][pair + 1];
          to[i] = low | high << 16;
        }
      }
    }
  }

  template <int Bytes>
  void copy(void* to, const void* from, bool there) {
    std::memset(to, 0xff, Bytes);
    begun_.push_back({to, there ? from : nullptr, Bytes});
  }
  void commit() {
    groups_.push_back(begun_);
    begun_.clear();
  }
  template <int Groups>
  void wait() {
    while (groups_.size() > Groups) {
      for (const Copy& copy : groups_.front()) {
        copy.from == nullptr ? std::memset(copy.to, 0, copy.bytes)
                             : std::memcpy(copy.to, copy.from, copy.bytes);
      }
      groups_.erase(groups_.begin());
    }
  }

  uint64_t add(uint64_t* at, uint64_t value) {
    const uint64_t before = *at;
    *at += value;
    return before;
  }

 private:
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };

  static float half_of(uint32_t pair, int which) {
    return widen(static_cast<uint16_t>(which == 0 ? pair & 0xffffu : pair >> 16));
  }

  Grid place_;
  std::vector<Copy> begun_;
  std::vector<std::vector<Copy>> groups_;
};

template <class Kernel>
int launch(const Kernel& kernel, const Grid& grid, int64_t shared_bytes, void*) {
  if (grid.empty()) return 0;
  struct alignas(128) Line {
    char bytes[128];
  };
  std::vector<Line> memory(static_cast<size_t>(shared_bytes / 128 + 1));
  const int64_t blocks = grid.x * grid.y * grid.z;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t at = host_backwards() ? blocks - 1 - i : i;
    std::memset(static_cast<void*>(memory.data()), 0xff, memory.size() * sizeof(Line));
    Block<Kernel::threads> block(memory[0].bytes,
                                 {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y});
    kernel(block);
  }
  return 0;
}

}  // namespace aserve
