#include "team.h"

#include <chrono>
#include <stdexcept>
#include <system_error>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headway {

namespace {

constexpr auto LONGEST_SPIN = std::chrono::microseconds(20);

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int current_core() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Let thread `id` run on any core but `core` of those that this process may use, if at least `others` are left.
void keep_off(int core, int id, int others) {
#if defined(__linux__)
  cpu_set_t cores;
  if (core < 0 || core >= CPU_SETSIZE || sched_getaffinity(getpid(), sizeof cores, &cores) != 0) return;
  CPU_CLR(core, &cores);
  if (CPU_COUNT(&cores) >= others) sched_setaffinity(id, sizeof cores, &cores);
#else
  (void)core, (void)id, (void)others;
#endif
}

int thread_id() {
#if defined(__linux__)
  return (int)syscall(SYS_gettid);
#else
  return 0;
#endif
}

}  // namespace

Team::Team(int threads) : cores_(threads > 0 ? threads : 0), ids_(threads > 0 ? threads : 0) {
  if (threads < 1) throw std::invalid_argument("a team has at least one thread");
  workers_.reserve(threads - 1);
  try {
    for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { work(worker); });
  } catch (const std::system_error&) {  // no more threads, or no memory for their stacks
  }
  threads_ = 1 + (int)workers_.size();  // workers look at it in their first run only
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : workers_) thread.join();
}

void Team::work(int worker) {
  ids_[worker].value.store(thread_id());
  for (uint64_t seen = 0;;) {
    const std::function<void(int)>* body;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      start_.wait(lock, [&] { return stop_ || job_ != seen; });
      if (stop_) return;
      seen = job_;
      body = body_;
    }
    attend(worker, *body);
  }
}

void Team::attend(int worker, const std::function<void(int)>& body) {
  try {
    body(worker);
  } catch (...) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      failure_ = std::current_exception();
    }
    thrown_.fetch_add(1);
    do barrier(worker);
    while (!over_.load());
    return;
  }
  done_.store(true);
  barrier(worker);
}

void Team::run(const std::function<void(int)>& body) {
  counters_[0].value.store(threads_);
  if (threads_ == 1) return body(0);
  if (const int core = current_core(); core != caller_core_) {
    caller_core_ = core;
    for (const Counter& id : ids_) {
      if (id.value.load() > 0) keep_off(core, id.value.load(), threads_ - 1);
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    done_.store(false);
    thrown_.store(0);
    failure_ = nullptr;
    body_ = &body;
    ++job_;
  }
  start_.notify_all();
  attend(0, body);
  if (thrown_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }
}

void Team::for_each(int n, const std::function<void(int)>& body) {
  std::exception_ptr failure;
  std::mutex guard;
  run([&](int worker) {
    int phase = 0;
    const auto guarded = [&](int i) {
      try {
        body(i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(guard);
        failure = std::current_exception();
      }
    };
    share(worker, phase, n, guarded, [] {});
  });
  if (failure) std::rethrow_exception(failure);
}

bool Team::sharing_core(int worker) const {
  const int mine = cores_[worker].value.load(std::memory_order_relaxed);
  for (int other = 0; other < threads_ && mine >= 0; ++other) {
    if (other != worker && cores_[other].value.load(std::memory_order_relaxed) == mine) return true;
  }
  return false;
}

void Team::barrier(int worker) {
  if (threads_ == 1) return;
  cores_[worker].value.store(current_core(), std::memory_order_relaxed);
  const uint32_t generation = generation_.load();
  if (arrived_.fetch_add(1) == threads_ - 1) {
    arrived_.store(0);
    over_.store(done_.load() || thrown_.load() == threads_);
    generation_.store(generation + 1);
    // A sleeper counts itself before it looks at the generation for the last time, so one of us sees the other.
    if (sleepers_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  for (int round = 1; generation_.load() == generation; ++round) {
    relax();
    const bool useless = round == 8 && sharing_core(worker);
    if (useless || (round % 64 == 0 && std::chrono::steady_clock::now() - start > LONGEST_SPIN)) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [&] { return generation_.load() != generation; });
      sleepers_.fetch_sub(1);
      return;
    }
  }
}

}  // namespace headway
