#include "aserve/team.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "aserve/memory.h"

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

using Clock = std::chrono::steady_clock;

constexpr auto spin_worker = std::chrono::microseconds(60);  // between calls that are not one step
constexpr auto spin_alone = std::chrono::microseconds(50);   // then others may have the core in turn

// Until ready() or give_up(time spun); the latter is asked about every microsecond. Answers ready().
template <class Ready, class GiveUp>
bool spin(const Ready& ready, const GiveUp& give_up) {
  const auto begin = Clock::now();
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      pause();
    }
    const auto spun = Clock::now() - begin;
    if (give_up(spun)) return ready();
    if (spun > spin_alone) std::this_thread::yield();
  }
}

}  // namespace

struct Team::State {
  // A line of its own for each group of fields: what all read during a job, what all write.
  // While the fields of a job change the ticket is closed, so a worker that comes late can never run
  // half a job.
  struct alignas(64) Job {
    std::atomic<uint32_t> number{0};
    std::atomic<bool> failed{false};
    std::atomic<int64_t> n{0};
    std::atomic<Call> call{nullptr};
    std::atomic<const void*> context{nullptr};
  } job;
  // High half: the job's number; low half: the next task, or `closed` between jobs.
  static constexpr uint64_t closed = uint64_t{1} << 30;
  struct alignas(64) Ticket {
    std::atomic<uint64_t> next{closed};
  } ticket;
  struct alignas(64) Done {
    std::atomic<int64_t> tasks{0};
  } done;
  struct alignas(64) Waiting {
    std::atomic<bool> stop{false};
    std::atomic<int> busy{0};  // scopes in which workers stay awake
    std::atomic<int> sleepers{0};
  } waiting;
  std::exception_ptr failure;  // written by whoever sets `failed`, read when all tasks are done
  std::mutex mutex;  // of the sleepers
  std::condition_variable wake;
  std::mutex callers;
  std::vector<std::thread> workers;
  int generation = fork_generation.load();

  // Takes tasks of a job until there are no more.
  void draw(uint32_t number) {
    int64_t mine = 0;
    uint64_t now = ticket.next.load(std::memory_order_acquire);
    for (;;) {
      const Call call = job.call.load(std::memory_order_acquire);
      const void* context = job.context.load(std::memory_order_acquire);
      const int64_t i = static_cast<int64_t>(now & 0xffffffffu);
      if (static_cast<uint32_t>(now >> 32) != number || i >= job.n.load(std::memory_order_acquire)) {
        break;
      }
      // Unchanged since `now` was read means that the fields read between were this job's.
      if (!ticket.next.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) continue;
      try {
        if (!job.failed.load(std::memory_order_relaxed)) call(context, i);
      } catch (...) {  // it would end the process on a worker, and leave the job open on the caller
        if (!job.failed.exchange(true)) failure = std::current_exception();
      }
      ++mine;
      now = ticket.next.load(std::memory_order_acquire);
    }
    // Once for all: the caller waits for the last of them anyway.
    if (mine > 0) done.tasks.fetch_add(mine, std::memory_order_acq_rel);
  }

  void rouse() {
    if (waiting.sleepers.load(std::memory_order_seq_cst) == 0) return;
    { std::lock_guard<std::mutex> lock(mutex); }
    wake.notify_all();
  }

  void end() {
    waiting.stop.store(true, std::memory_order_seq_cst);
    rouse();
    for (auto& worker : workers) worker.join();
  }

  void work() {
    uint32_t seen = 0;
    for (;;) {
      const auto changed = [&] {
        return job.number.load(std::memory_order_seq_cst) != seen;
      };
      const auto may_sleep = [&](Clock::duration spun) {
        if (waiting.stop.load(std::memory_order_acquire)) return true;
        return spun > spin_worker && waiting.busy.load(std::memory_order_acquire) == 0;
      };
      if (!spin(changed, may_sleep)) {
        std::unique_lock<std::mutex> lock(mutex);
        waiting.sleepers.fetch_add(1);
        wake.wait(lock, [&] {
          return changed() || waiting.busy.load() > 0 || waiting.stop.load();
        });
        waiting.sleepers.fetch_sub(1);
      }
      if (waiting.stop.load(std::memory_order_acquire)) return;
      if (!changed()) continue;
      seen = job.number.load(std::memory_order_acquire);
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
  const uint32_t number = state.job.number.load(std::memory_order_relaxed) + 1;
  state.job.call.store(call, std::memory_order_release);
  state.job.context.store(context, std::memory_order_release);
  state.job.n.store(n, std::memory_order_release);
  state.job.failed.store(false, std::memory_order_relaxed);
  state.done.tasks.store(0, std::memory_order_release);
  state.ticket.next.store(static_cast<uint64_t>(number) << 32, std::memory_order_release);
  state.job.number.store(number, std::memory_order_seq_cst);
  state.rouse();
  state.draw(number);
  spin([&] { return state.done.tasks.load(std::memory_order_acquire) == n; },
       [](Clock::duration) { return false; });
  state.ticket.next.store((static_cast<uint64_t>(number) << 32) | State::closed,
                          std::memory_order_release);
  if (state.job.failed.load()) std::rethrow_exception(std::exchange(state.failure, nullptr));
}

Team::Busy::Busy(Team& team) : state_(team.threads_ > 1 ? team.state_.get() : nullptr) {
  if (state_ == nullptr) return;
  state_->waiting.busy.fetch_add(1, std::memory_order_seq_cst);
  if (state_->generation == fork_generation.load(std::memory_order_relaxed)) state_->rouse();
}

Team::Busy::~Busy() {
  if (state_ != nullptr) state_->waiting.busy.fetch_sub(1, std::memory_order_acq_rel);
}

namespace {

struct Buffers {
  Memory at[scratch_n];
  int64_t bytes[scratch_n] = {};
};

}  // namespace

void* thread_scratch(Scratch slot, int64_t bytes) {
  static thread_local Buffers buffers;
  if (buffers.bytes[slot] < bytes) {
    buffers.bytes[slot] = 0;
    buffers.at[slot].reset();
    buffers.at[slot] = take_memory(&bytes);
    buffers.bytes[slot] = bytes;
  }
  return buffers.at[slot].get();
}

}  // namespace aserve
