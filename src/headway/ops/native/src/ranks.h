// Processes of one host that compute every step together: their sums, and what the first tells the others, in shared memory.
//
// Workers of one number, one in each rank, sum their share of a message without the others:
//
//   each writes its numbers into its slot | raises its flag | waits for the flags | adds all slots, rank 0's first
//
// With more than two ranks and many numbers each rank adds one segment only, and a second round hands the segments out;
// the order of the sums is the same, so every rank has the same bits however many numbers a message has. There are two
// slots in turn: whoever writes into one has seen everybody begin with the other, hence be done with this.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace headway {

class Ranks {
 public:
  // Joins `ranks` of `threads` workers each. file: shared memory of `bytes` zeros that all of them map.
  // Throws std::invalid_argument or std::runtime_error.
  Ranks(int file, int rank, int ranks, int threads);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  static size_t bytes(int ranks, int threads);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int threads() const { return threads_; }

  // Called by every worker of every rank: this worker's share of x[0, n) becomes its sum over ranks. A sum over all of x
  // is complete when all workers of this rank are back. Throws std::runtime_error: a rank has left.
  void all_reduce(float* x, size_t n, int worker);

  // Rank 0 tells, and every other rank hears each message, in order. Throw as `all_reduce`.
  void tell(const uint8_t* message, size_t size);
  std::string hear();

  // Whoever waits for a rank now or later throws.
  void leave();

 private:
  struct alignas(64) Flag {
    std::atomic<uint32_t> value{0}, waiting{0};
  };
  struct Head {
    std::atomic<uint32_t> left;
    Flag told;
    uint64_t rest, size;  // bytes of the message that follow, and that the mailbox holds
  };

  Flag& summed(int rank, int worker) const { return flags_[rank * threads_ + worker]; }
  Flag& heard(int rank) const { return flags_[ranks_ * threads_ + rank]; }
  float* slot(int rank, int worker, int turn) const;
  void meet(int worker);
  void wait(Flag& flag, uint32_t value) const;
  static void raise(Flag& flag, uint32_t value);

  int rank_, ranks_, threads_;
  uint8_t* memory_ = nullptr;
  Head* head_ = nullptr;
  Flag* flags_ = nullptr;
  float* slots_ = nullptr;
  uint8_t* mailbox_ = nullptr;
  struct alignas(64) Count {
    uint32_t met = 0, pieces = 0;
  };
  std::vector<Count> counts_;  // per worker
  uint32_t messages_ = 0;
};

}  // namespace headway
