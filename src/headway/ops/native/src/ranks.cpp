#include "ranks.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>

#include "common.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headway {
namespace {

constexpr size_t PIECE = 32768;           // floats of a worker that are summed at once
constexpr size_t FEW = 4096;              // floats that are added by all rather than handed round a second time
constexpr size_t MAILBOX = 1 << 20;       // bytes
constexpr auto SPIN = std::chrono::microseconds(50);
constexpr long NAP = 50'000'000;          // ns asleep at most before looking whether a rank has left

HW_INLINE void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

size_t head_bytes(int flags, size_t head, size_t flag) { return round_up(head, 64) + flags * flag; }

}  // namespace

#ifdef __linux__

size_t Ranks::bytes(int ranks, int threads) {
  const size_t fixed = round_up(head_bytes(ranks * (threads + 1), sizeof(Head), sizeof(Flag)), 4096);
  return fixed + (size_t)2 * ranks * threads * PIECE * sizeof(float) + MAILBOX;
}

Ranks::Ranks(int file, int rank, int ranks, int threads) : rank_(rank), ranks_(ranks), threads_(threads) {
  if (ranks < 1 || rank < 0 || rank >= ranks || threads < 1) throw std::invalid_argument("no such rank");
  const size_t size = bytes(ranks, threads);
  struct stat found;
  if (fstat(file, &found) != 0 || (size_t)found.st_size < size) throw std::invalid_argument("the ranks' memory is too small");
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) throw std::runtime_error("the ranks' memory cannot be mapped");
  memory_ = static_cast<uint8_t*>(mapped);
  head_ = reinterpret_cast<Head*>(memory_);
  flags_ = reinterpret_cast<Flag*>(memory_ + round_up(sizeof(Head), 64));
  slots_ = reinterpret_cast<float*>(memory_ + round_up(head_bytes(ranks * (threads + 1), sizeof(Head), sizeof(Flag)), 4096));
  mailbox_ = reinterpret_cast<uint8_t*>(slots_ + (size_t)2 * ranks * threads * PIECE);
  counts_.resize(threads);
}

Ranks::~Ranks() { munmap(memory_, bytes(ranks_, threads_)); }

void Ranks::raise(Flag& flag, uint32_t value) {
  flag.value.store(value, std::memory_order_seq_cst);
  if (flag.waiting.load(std::memory_order_seq_cst) > 0) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&flag.value), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }
}

void Ranks::wait(Flag& flag, uint32_t value) const {
  const auto reached = [&](uint32_t now) { return (int32_t)(now - value) >= 0; };  // counters may wrap
  for (int i = 0; i < 64; ++i) {
    if (reached(flag.value.load(std::memory_order_acquire))) return;
    pause_briefly();
  }
  const auto end = std::chrono::steady_clock::now() + SPIN;
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 16; ++i) {
      if (reached(flag.value.load(std::memory_order_acquire))) return;
      pause_briefly();
    }
  }
  flag.waiting.fetch_add(1, std::memory_order_seq_cst);
  bool left = false;
  while (true) {
    const uint32_t now = flag.value.load(std::memory_order_seq_cst);
    if (reached(now)) break;
    left = head_->left.load(std::memory_order_acquire) != 0;
    if (left) break;
    const timespec nap{0, NAP};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&flag.value), FUTEX_WAIT, now, &nap, nullptr, 0);
  }
  flag.waiting.fetch_sub(1, std::memory_order_seq_cst);
  if (left) throw std::runtime_error("a rank has left");
}

#else  // the planner and the rest of the kernels do without

size_t Ranks::bytes(int, int) { return 0; }
Ranks::Ranks(int, int rank, int ranks, int threads) : rank_(rank), ranks_(ranks), threads_(threads) {
  throw std::runtime_error("ranks need Linux");
}
Ranks::~Ranks() = default;
void Ranks::raise(Flag&, uint32_t) {}
void Ranks::wait(Flag&, uint32_t) const {}

#endif

float* Ranks::slot(int rank, int worker, int turn) const {
  return slots_ + (((size_t)turn * ranks_ + rank) * threads_ + worker) * PIECE;
}

// Wait until this worker's peers in all ranks are here.
void Ranks::meet(int worker) {
  const uint32_t round = ++counts_[worker].met;
  raise(summed(rank_, worker), round);
  for (int other = 0; other < ranks_; ++other) {
    if (other != rank_) wait(summed(other, worker), round);
  }
}

void Ranks::all_reduce(float* x, size_t n, int worker) {
  const size_t lines = ceil_div(n, 16);  // of a cache line each
  const size_t end = std::min(n, lines * (worker + 1) / threads_ * 16);
  const auto add = [&](int turn, size_t from, size_t to, float* out) {
    const float* first = slot(0, worker, turn);
    const float* second = slot(1, worker, turn);
    for (size_t i = from; i < to; ++i) out[i] = first[i] + second[i];
    for (int other = 2; other < ranks_; ++other) {
      const float* more = slot(other, worker, turn);
      for (size_t i = from; i < to; ++i) out[i] += more[i];
    }
  };
  if (ranks_ == 1) return;
  for (size_t at = std::min(n, lines * worker / threads_ * 16); at < end; at += PIECE) {
    const size_t count = std::min(PIECE, end - at);
    const int turn = counts_[worker].pieces++ & 1;
    float* own = slot(rank_, worker, turn);
    memcpy(own, x + at, count * sizeof(float));
    meet(worker);
    if (ranks_ == 2 || count < FEW) {
      add(turn, 0, count, x + at);
      continue;
    }
    const auto border = [&](int segment) { return std::min<size_t>(count, ceil_div(count, 16) * segment / ranks_ * 16); };
    // Nobody else reads this rank's own segment in its own slot before the second meeting.
    const size_t from = border(rank_), to = border(rank_ + 1);
    add(turn, from, to, x + at);
    memcpy(own + from, x + at + from, (to - from) * sizeof(float));
    meet(worker);
    for (int other = 0; other < ranks_; ++other) {
      if (other == rank_) continue;
      memcpy(x + at + border(other), slot(other, worker, turn) + border(other), (border(other + 1) - border(other)) * sizeof(float));
    }
  }
}

void Ranks::tell(const uint8_t* message, size_t size) {
  size_t at = 0;
  do {
    for (int other = 1; other < ranks_; ++other) wait(heard(other), messages_);  // the last piece is read
    head_->size = std::min(MAILBOX, size - at);
    head_->rest = size - at - head_->size;
    memcpy(mailbox_, message + at, head_->size);
    at += head_->size;
    raise(head_->told, ++messages_);
  } while (at < size);
}

std::string Ranks::hear() {
  std::string message;
  uint64_t rest = 0;
  do {
    wait(head_->told, ++messages_);
    message.append(reinterpret_cast<const char*>(mailbox_), head_->size);
    rest = head_->rest;
    raise(heard(rank_), messages_);
  } while (rest > 0);
  return message;
}

void Ranks::leave() { head_->left.store(1, std::memory_order_seq_cst); }

}  // namespace headway
