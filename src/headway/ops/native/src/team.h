// A team of threads that runs a step together: all execute the same program and meet at barriers.
//
// Between steps the workers sleep. At a barrier a thread spins for at most 20 us, then sleeps too, because the cores
// are shared with an API process and its clients. It does not spin at all on a core where another of the team has to run,
// as happens when a busy process has taken a core: there, spinning would make steps twice as long. Workers are kept off the
// core of who calls: the system likes to wake them there, where they would wait until the caller's time is up.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "common.h"

namespace headway {

class Team {
 public:
  // As many threads as can be had, up to `threads`, the caller's included.
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }

  // Run body(worker) on every thread, the caller being worker 0; returns when all are done. What a worker throws (memory
  // may be short) is thrown here, once nobody works any more; results are worth nothing then.
  void run(const std::function<void(int)>& body);

  // Run body(i) for i in [0, n) on all threads, in no order. Outside of `run` only.
  void for_each(int n, const std::function<void(int)>& body);

  // Inside `run`: wait until every worker is here.
  void barrier(int worker);

  // Inside `run`, called by every worker: share out body(i) for i in [0, n), call leave(), then wait for all.
  // Worker w starts with i = w, which it may have prepared for; the rest goes to whoever is free.
  template <class Body, class Leave>
  void share(int worker, int& phase, int n, Body&& body, Leave&& leave) {
    std::atomic<int>& next = counters_[phase % 3].value;
    // The next phase's counter was last used two phases ago, which everybody has left.
    if (worker == 0) counters_[(phase + 1) % 3].value.store(threads_, std::memory_order_relaxed);
    ++phase;
    for (int i = worker; i < n; i = next.fetch_add(1, std::memory_order_relaxed)) body(i);
    leave();
    barrier(worker);
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int> value{0};
  };

  bool sharing_core(int worker) const;

  void work(int worker);
  void attend(int worker, const std::function<void(int)>& body);

  int threads_ = 1;
  std::vector<std::thread> workers_;
  std::vector<Counter> cores_;  // where each worker was last seen
  std::vector<Counter> ids_;    // of the workers' threads; the caller has none
  int caller_core_ = -1;        // what the workers are kept off
  Counter counters_[3];

  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;

  // A worker that threw keeps coming to the barriers that the others wait at, until one ends the run.
  std::atomic<bool> done_{false}, over_{false};  // somebody has done its body; the last barrier ended the run
  std::atomic<int> thrown_{0};                   // workers that threw
  std::exception_ptr failure_;                   // the last of it, under the mutex

  const std::function<void(int)>* body_ = nullptr;
  uint64_t job_ = 0;
  bool stop_ = false;
  std::condition_variable start_;
};

}  // namespace headway
