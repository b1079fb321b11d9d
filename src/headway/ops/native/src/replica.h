// One replica in virtual time under a plain load: requests of one class, blocks that are only counted. The specification
// is headway/simulate/driver.py with headway/scheduling and headway/executor/segments.py, which play every load; both
// give the same times, always.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <queue>
#include <set>
#include <utility>
#include <vector>

namespace headway {

// How a replica is set up; see `Capabilities`, `Budget` and `Policy`.
struct ReplicaSetup {
  int64_t block_size, blocks, max_rows, max_tokens_per_step, max_model_len;
  int64_t step_tokens, prompt_tokens;  // what a step aims for, and what it leaves to prompts at least
  bool shortest_first;                 // the policy `chunked`; else `fcfs`
  bool headroom;
  int64_t strict_after;  // preemptions; -1 = never
  int64_t idle_step;     // ps of a step that only drops rows
};

// A request per entry. The first `open` come at their times; the others when one ends, `think` ps later.
struct PlainLoad {
  std::vector<int64_t> at, prompt, output, max_len;  // output: tokens of the answer, which the scheduler is not told
  std::vector<uint8_t> refused, detailed;            // turned away at once; times of all its tokens are kept
  int64_t open, think;
};

enum class Ended : int64_t { refused, stop, length };

// What happened to each request, ps; -1 = never.
struct PlainOutcome {
  std::vector<int64_t> at, admitted, first, last, tokens, ended, preemptions, how;
  std::vector<std::vector<int64_t>> times;  // of its tokens, where asked for
  int64_t steps = 0, step_tokens = 0, step_rows = 0, busy = 0, end = 0;
};

// Picoseconds of a step of (new tokens, rows, rows with logits, keys read, pairs of query and key, the keys of rows with
// one new token).
using AskStep = std::function<int64_t(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t)>;
// Sees (now, ended, waiting, running, rows of the step, blocks owned, tokens computed) -> when it looks again, ps.
using Look = std::function<int64_t(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t)>;

// The same of steps in which each of so many rows has one new token, for so many numbers of keys from the first one on.
using AskSteady = std::function<std::vector<int64_t>(int64_t rows, int64_t first, int64_t count)>;

// What steps take. Most of a load's are steady, and of few sizes: these are asked for by the tableful, and kept.
class StepPrices {
 public:
  StepPrices(AskStep ask, AskSteady steady) : ask_(std::move(ask)), steady_(std::move(steady)) {}
  int64_t operator()(int64_t tokens, int64_t rows, int64_t logits, int64_t keys, int64_t pairs, int64_t decode_keys);

 private:
  struct Table {
    int64_t asked = 0;  // for steps of it one by one, before it was worth while
    std::vector<int64_t> prices;
  };

  AskStep ask_;
  AskSteady steady_;  // null = steps are priced one by one
  std::map<std::pair<int64_t, int64_t>, Table> tables_;  // by rows, and keys / TABLE
};

class PlainReplica {
 public:
  PlainReplica(const ReplicaSetup& setup, const PlainLoad& load, StepPrices& prices, Look look);
  PlainOutcome play();

 private:
  enum class Reason : uint8_t { none, rows, budget, blocks, preempting, policy };

  struct Row {
    int64_t request, tokens, computed = 0, pending = 0, blocks = 0, overtaken = 0, preemptions = 0;
    bool strict = false, running = false, held = false;
    Reason reason = Reason::none;  // why it was not admitted, in step `asked`
    int64_t asked = -1;
  };

  struct Work {
    int row;
    int64_t start, count;
    bool sample;
  };

  struct Emission {
    int row;
    bool finished;
    Ended how;
  };

  // A `Segment` of executor/segments.py; after = -1: not asked for yet.
  struct Segment {
    int64_t offset = 0, first = 0, done = 0, after = -1;
  };

  using Arrival = std::pair<int64_t, int64_t>;  // (when, request)

  // The loop of driver.py.
  const Arrival* next_arrival();
  void arrive();
  void turn();
  void take();
  void submit();
  void note_plan();
  void go_on();
  void commit();
  void emit(int row);
  void hear();
  void follow();

  // A step while it is planned: planning.py, admission.py, prompts.py.
  bool plan();
  void decodes();
  void prompts();
  void serve(int64_t most);
  int shortest(int64_t passed, int64_t most) const;
  void piece(int row);
  void chunk(int row);
  void plan_chunk(int row, int64_t count);
  void add_work(int row, int64_t count);
  Reason admit(int row, bool partly);
  Reason admission(int row, bool partly);
  bool fits(int row);
  void keep_for(int row, bool oldest);
  Reason blocked() const;

  // Rows and blocks: state.py, table.py.
  int64_t todo(const Row& row) const;
  int64_t left_of(const Row& row) const { return row.running ? todo(row) : row.tokens; }
  int64_t needs(const Row& row) const;
  int64_t promise(const Row& row) const;
  int64_t blocks_of(int64_t tokens) const { return (tokens + setup_.block_size - 1) / setup_.block_size; }
  bool grow(Row& row, int64_t end);
  bool before(int a, int b) const { return rows_[a].strict != rows_[b].strict ? rows_[a].strict : a < b; }
  void run_row(int row);
  void stop_row(int row);
  void wait(int row);
  void preempt(int row);

  // Runs of equal steps: run.py, segments.py.
  int64_t horizon(int64_t most) const;
  int64_t answer_left() const;
  int64_t within_blocks(int64_t steps) const;
  int64_t price();
  int64_t next_step();
  int64_t ask(int64_t ahead);

  const ReplicaSetup setup_;
  const PlainLoad& load_;
  StepPrices& prices_;
  Look look_;
  PlainOutcome out_;

  std::vector<Row> rows_;  // by order of arrival, which is their rank
  std::vector<int> running_;
  std::set<int> queue_;
  std::set<std::pair<int64_t, int>> ranked_;  // the queue by tokens to compute
  int64_t available_;
  bool gone_ = false;  // the executor has rows to drop

  int64_t now_ = 0, look_at_ = 0, waiting_ = 0, inside_ = 0, ended_ = 0;
  int64_t streamed_ = 0, next_ = 0;  // requests that came by their time, and that have a time
  std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> later_;
  Arrival arrival_;
  std::vector<int64_t> inbox_, turned_away_;
  std::vector<Emission> emissions_;

  std::vector<int64_t> ends_, times_;  // of the steps in flight, and of those just committed; ps
  int64_t began_ = 0, run_ = 1;  // when the steps in flight began, and how many plans may keep their shape
  Segment now_segment_;
  std::vector<Work> priced_;  // the plan that the segments began with; empty = it does not go on
  int64_t keys_ = 0, pairs_ = 0, decode_keys_ = 0, new_tokens_ = 0, logits_ = 0, priced_rows_ = 0;

  int64_t step_ = 0;
  std::vector<Work> work_;
  std::vector<int> partial_;
  bool new_ = false, drops_ = false, preempted_ = false, passing_ = false;
  int64_t left_ = 0, tokens_ = 0, promised_ = -1, kept_ = 0, row_for_first_ = 0, pieces_ = 0, most_pieces_ = 0;
  int first_ = -1, oldest_ = -1;
  bool look_for_rows_ = false;  // waiting rows may be admitted in this pass
  Reason otherwise_ = Reason::policy;
};

}  // namespace headway
