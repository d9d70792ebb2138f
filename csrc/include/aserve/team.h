// A persistent team of threads that shares out numbered tasks. Workers spin briefly, then sleep.
// Between the calls of one step they stay awake.
#pragma once

#include <cstdint>
#include <memory>

namespace aserve {

class Team {
 public:
  explicit Team(int threads);  // counts the caller: threads - 1 workers, or std::system_error
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }

  // Calls task(i) once for each i in [0, n), in any order, on any thread; returns when all are done.
  // One caller at a time: a second waits. When a task throws, no further one is begun, and the first
  // exception is thrown here once those under way have ended.
  template <class Task>
  void run(int64_t n, const Task& task) {
    if (n <= 1 || threads_ == 1) {
      for (int64_t i = 0; i < n; ++i) task(i);
      return;
    }
    run_erased(n, [](const void* context, int64_t i) { (*static_cast<const Task*>(context))(i); },
               &task);
  }

 private:
  struct State;

 public:
  // While one lives, workers wait for the next call awake: for the length of a step, whose calls
  // follow each other within microseconds. Wakes them at once.
  class Busy {
   public:
    explicit Busy(Team& team);
    ~Busy();
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    State* state_;
  };

 private:
  using Call = void (*)(const void*, int64_t);
  void run_erased(int64_t n, Call call, const void* context);

  int threads_;
  std::shared_ptr<State> state_;
};

// Memory of the calling thread, 64-byte aligned, at least `bytes` long, kept until the thread ends.
// Each purpose has its own slot; a second request for a slot invalidates the first.
enum Scratch { scratch_rows, scratch_scores, scratch_keys, scratch_values, scratch_out,
               scratch_gate_up, scratch_hidden, scratch_tiles, scratch_slots,
               scratch_n };
void* thread_scratch(Scratch slot, int64_t bytes);

}  // namespace aserve
