#include "aserve/team.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace aserve {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A forked child has this object but not its threads.
std::atomic<int> fork_generation{0};

int watch_forks() {
#if defined(__unix__) || defined(__APPLE__)
  pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1); });
#endif
  return 0;
}

constexpr auto spin_worker = std::chrono::microseconds(60);
constexpr auto spin_caller = std::chrono::microseconds(200);

template <class Ready>
bool spin(std::chrono::microseconds limit, const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

}  // namespace

struct Team::State {
  // High half: the job's number; low half: the next task, or `closed` between jobs. While the fields
  // of a job change the ticket is closed, so a worker that comes late can never run half a job.
  static constexpr uint64_t closed = uint64_t{1} << 30;
  std::atomic<uint64_t> ticket{closed};
  std::atomic<int64_t> n{0};
  std::atomic<int64_t> done{0};
  std::atomic<Call> call{nullptr};
  std::atomic<const void*> context{nullptr};
  std::atomic<uint32_t> job{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;  // written by whoever sets `failed`, read when all tasks are done
  std::atomic<bool> stop{false};
  std::atomic<int> sleepers{0};
  std::mutex mutex;  // of the sleepers
  std::condition_variable wake;
  std::mutex callers;
  std::vector<std::thread> workers;
  int generation = fork_generation.load();

  void draw(uint32_t number) {
    uint64_t now = ticket.load(std::memory_order_acquire);
    for (;;) {
      const Call call_now = call.load(std::memory_order_acquire);
      const void* context_now = context.load(std::memory_order_acquire);
      const int64_t i = static_cast<int64_t>(now & 0xffffffffu);
      if (static_cast<uint32_t>(now >> 32) != number || i >= n.load(std::memory_order_acquire)) {
        return;
      }
      // Unchanged since `now` was read means that the fields read between were this job's.
      if (!ticket.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) continue;
      try {
        if (!failed.load(std::memory_order_relaxed)) call_now(context_now, i);
      } catch (...) {  // it would end the process on a worker, and leave the job open on the caller
        if (!failed.exchange(true)) failure = std::current_exception();
      }
      done.fetch_add(1, std::memory_order_acq_rel);
      now = ticket.load(std::memory_order_acquire);
    }
  }

  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stop.store(true);
    }
    wake.notify_all();
    for (auto& worker : workers) worker.join();
  }

  void work() {
    uint32_t seen = 0;
    for (;;) {
      const auto changed = [&] {
        return job.load(std::memory_order_seq_cst) != seen || stop.load(std::memory_order_acquire);
      };
      if (!spin(spin_worker, changed)) {
        std::unique_lock<std::mutex> lock(mutex);
        sleepers.fetch_add(1);
        wake.wait(lock, changed);
        sleepers.fetch_sub(1);
      }
      if (stop.load(std::memory_order_acquire)) return;
      seen = job.load(std::memory_order_acquire);
      draw(seen);
    }
  }
};

Team::Team(int threads) : threads_(threads), state_(std::make_shared<State>()) {
  static const int watching = watch_forks();
  (void)watching;
  state_->workers.reserve(static_cast<size_t>(threads));
  try {
    for (int i = 1; i < threads; ++i) {
      state_->workers.emplace_back([state = state_.get()] { state->work(); });
    }
  } catch (...) {  // the system has no more threads to give; handles of running ones must not go
    state_->end();
    throw;
  }
}

Team::~Team() {
  if (state_->generation != fork_generation.load()) {
    // The threads are the parent's; joining or destroying their handles would end the process.
    new std::shared_ptr<State>(state_);
    return;
  }
  state_->end();
}

void Team::run_erased(int64_t n, Call call, const void* context) {
  State& state = *state_;
  if (state.generation != fork_generation.load(std::memory_order_relaxed)) {
    for (int64_t i = 0; i < n; ++i) call(context, i);
    return;
  }
  std::lock_guard<std::mutex> one(state.callers);
  const uint32_t number = state.job.load(std::memory_order_relaxed) + 1;
  state.call.store(call, std::memory_order_release);
  state.context.store(context, std::memory_order_release);
  state.n.store(n, std::memory_order_release);
  state.done.store(0, std::memory_order_release);
  state.failed.store(false, std::memory_order_relaxed);
  state.ticket.store(static_cast<uint64_t>(number) << 32, std::memory_order_release);
  state.job.store(number, std::memory_order_seq_cst);
  if (state.sleepers.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard<std::mutex> lock(state.mutex); }
    state.wake.notify_all();
  }
  state.draw(number);
  const auto finished = [&] { return state.done.load(std::memory_order_acquire) == n; };
  while (!spin(spin_caller, finished)) std::this_thread::yield();
  state.ticket.store((static_cast<uint64_t>(number) << 32) | State::closed,
                     std::memory_order_release);
  if (state.failed.load()) std::rethrow_exception(std::exchange(state.failure, nullptr));
}

namespace {

struct Buffers {
  void* at[scratch_n] = {};
  int64_t bytes[scratch_n] = {};
  ~Buffers() {
    for (void* p : at) std::free(p);
  }
};

}  // namespace

void* thread_scratch(Scratch slot, int64_t bytes) {
  static thread_local Buffers buffers;
  if (buffers.bytes[slot] < bytes) {
    std::free(buffers.at[slot]);
    buffers.bytes[slot] = 0;
    const int64_t rounded = (bytes + 4095) / 4096 * 4096;
    buffers.at[slot] = std::aligned_alloc(64, static_cast<size_t>(rounded));
    if (buffers.at[slot] == nullptr) throw std::bad_alloc();
    buffers.bytes[slot] = rounded;
  }
  return buffers.at[slot];
}

}  // namespace aserve
