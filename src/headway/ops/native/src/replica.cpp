#include "replica.h"

#include <algorithm>
#include <stdexcept>

namespace headway {

namespace {

constexpr int64_t SEGMENT = 64;             // LENGTH of segments.py
constexpr int64_t LOOK_PAST = 8;            // of prompts.py
constexpr int64_t MOST_PARTIAL = 4;         // of prompts.py
constexpr int64_t OVERTAKING_BATCHES = 2;   // of admission.py
constexpr int64_t MOST_STEPS = 1 << 20;     // of run.py
constexpr int64_t LONGEST = int64_t(1) << 62;
constexpr int64_t ANY = -1;
constexpr int64_t TABLE = 1024, WORTH = 16, MOST_TABLES = 4096;  // keys; steps of it asked for before; 32 MiB in all

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

}  // namespace

int64_t StepPrices::operator()(int64_t tokens, int64_t rows, int64_t logits, int64_t keys, int64_t pairs, int64_t decode_keys) {
  const bool steady = steady_ && tokens == rows && logits == rows && pairs == keys && decode_keys == keys;
  if (steady) {
    const std::pair key(rows, keys / TABLE);
    auto found = tables_.find(key);
    if (found == tables_.end() && tables_.size() < MOST_TABLES) found = tables_.emplace(key, Table()).first;
    if (found != tables_.end()) {
      Table& table = found->second;
      if (table.prices.empty() && ++table.asked > WORTH) table.prices = steady_(rows, key.second * TABLE, TABLE);
      if (!table.prices.empty()) return table.prices.at(keys % TABLE);
    }
  }
  return ask_(tokens, rows, logits, keys, pairs, decode_keys);
}

PlainReplica::PlainReplica(const ReplicaSetup& setup, const PlainLoad& load, StepPrices& prices, Look look)
    : setup_(setup), load_(load), prices_(prices), look_(std::move(look)), available_(setup.blocks) {
  const size_t count = load.prompt.size();
  for (auto* column : {&out_.at, &out_.admitted, &out_.first, &out_.last, &out_.ended}) column->assign(count, -1);
  for (auto* column : {&out_.tokens, &out_.preemptions, &out_.how}) column->assign(count, 0);
  out_.times.resize(count);
  next_ = std::min<int64_t>(load.open, count);
}

// ---- the loop

PlainOutcome PlainReplica::play() {
  for (;;) {
    const Arrival* arrival = next_arrival();
    if (!ends_.empty() && (!arrival || ends_.back() < arrival->first)) {
      now_ = ends_.back();
    } else if (arrival) {
      now_ = arrival->first;
      arrive();
      if (!ends_.empty()) continue;  // it is seen when the step ends
    } else {
      break;
    }
    if (now_ > LONGEST) throw std::overflow_error("the simulation takes too long");
    turn();
  }
  out_.end = now_;
  return std::move(out_);
}

const PlainReplica::Arrival* PlainReplica::next_arrival() {
  const bool stream = streamed_ < std::min<int64_t>(load_.open, load_.prompt.size());
  if (!later_.empty() && (!stream || later_.top().first < load_.at[streamed_])) return &later_.top();
  if (!stream) return nullptr;
  arrival_ = {load_.at[streamed_], streamed_};
  return &arrival_;
}

void PlainReplica::arrive() {
  const Arrival arrival = *next_arrival();
  if (!later_.empty() && later_.top() == arrival) later_.pop();
  else ++streamed_;
  out_.at[arrival.second] = arrival.first;
  ++waiting_;
  inbox_.push_back(arrival.second);
}

void PlainReplica::turn() {
  emissions_.clear();
  times_.clear();
  if (!ends_.empty()) commit();
  take();
  if (plan()) submit();
  hear();
  for (size_t i = 0; i < turned_away_.size(); ++i) follow();
  turned_away_.clear();
  if (!ends_.empty()) go_on();
}

void PlainReplica::take() {
  for (const int64_t request : inbox_) {
    if (load_.refused[request]) {
      turned_away_.push_back(request);
      out_.ended[request] = now_;
      out_.how[request] = (int64_t)Ended::refused;
      --waiting_;
      ++ended_;
      continue;
    }
    Row row;
    row.request = request;
    row.tokens = load_.prompt[request];
    rows_.push_back(row);
    wait((int)rows_.size() - 1);
  }
  inbox_.clear();
}

void PlainReplica::submit() {
  run_ = horizon(2) > 1 ? horizon(answer_left()) : 1;
  began_ = now_;
  ends_.push_back(now_ + price());
  note_plan();
}

// A plan goes on for as long as it keeps its shape, or to the step in which something arrives.
void PlainReplica::go_on() {
  const Arrival* arrival = next_arrival();
  const int64_t until = arrival ? arrival->first : LONGEST;
  for (int64_t step = 1; step < run_ && ends_.back() < until; ++step) ends_.push_back(ends_.back() + next_step());
}

void PlainReplica::note_plan() {
  int64_t tokens = 0;
  for (const Work& work : work_) {
    tokens += work.count;
    Row& row = rows_[work.row];
    if (out_.admitted[row.request] < 0) {
      out_.admitted[row.request] = now_;
      --waiting_;
      ++inside_;
    }
  }
  ++out_.steps;
  out_.step_rows += work_.size();
  out_.step_tokens += tokens;
  if (now_ < look_at_) return;
  int64_t computed = 0;
  for (const int row : running_) computed += rows_[row].computed;
  look_at_ = look_(now_, ended_, waiting_, inside_, work_.size(), setup_.blocks - available_, computed);
}

void PlainReplica::commit() {
  times_.swap(ends_);
  const int64_t steps = times_.size();
  out_.busy += times_.back() - began_;
  out_.steps += steps - 1;
  out_.step_rows += (steps - 1) * work_.size();
  out_.step_tokens += (steps - 1) * work_.size();
  if (steps > 1) {
    for (const Work& work : work_) {
      rows_[work.row].tokens += steps - 1;
      grow(rows_[work.row], work.start + steps);
    }
  }
  for (const Work& work : work_) {
    Row& row = rows_[work.row];
    row.pending -= work.count;
    if (work.sample) emit(work.row);
    else row.computed = work.start + work.count;
  }
}

// One more token of a row; it may be its last.
void PlainReplica::emit(int index) {
  Row& row = rows_[index];
  const bool stop = row.tokens >= load_.prompt[row.request] + load_.output[row.request] - 1;
  row.computed = row.tokens++;
  const bool finished = stop || row.tokens >= load_.max_len[row.request];
  emissions_.push_back({index, finished, stop ? Ended::stop : Ended::length});
  if (finished) stop_row(index);
}

// What clients hear of the steps that were committed.
void PlainReplica::hear() {
  for (const Emission& emission : emissions_) {
    const Row& row = rows_[emission.row];
    const int64_t request = row.request;
    if (out_.first[request] < 0) out_.first[request] = times_.front();
    out_.last[request] = times_.back();
    out_.tokens[request] += times_.size();
    if (load_.detailed[request]) out_.times[request].insert(out_.times[request].end(), times_.begin(), times_.end());
    if (!emission.finished) continue;
    out_.ended[request] = now_;
    out_.how[request] = (int64_t)emission.how;
    out_.preemptions[request] = row.preemptions;
    --inside_;
    ++ended_;
    follow();
  }
}

// One has ended: in a closed loop the next one comes.
void PlainReplica::follow() {
  if (next_ < (int64_t)load_.prompt.size()) later_.push({now_ + load_.think, next_++});
}

// ---- a step

bool PlainReplica::plan() {
  work_.clear();
  partial_.clear();
  new_ = preempted_ = passing_ = false;
  promised_ = -1;
  kept_ = row_for_first_ = tokens_ = 0;
  first_ = -1;
  left_ = setup_.step_tokens;
  ++step_;
  decodes();
  left_ = std::min(setup_.max_tokens_per_step - tokens_, std::max({setup_.step_tokens - tokens_, setup_.prompt_tokens, int64_t(1)}));
  if (setup_.shortest_first) {
    prompts();
  } else {
    for (const int row : running_) {
      if (left_ <= 0) break;
      if (todo(rows_[row]) > 1) chunk(row);
    }
    while (!queue_.empty() && admit(*queue_.begin(), true) == Reason::none) {
    }
  }
  otherwise_ = (int64_t)running_.size() >= setup_.max_rows ? Reason::rows : Reason::budget;
  drops_ = gone_;
  gone_ = false;
  return drops_ || !work_.empty();
}

void PlainReplica::decodes() {
  for (size_t index = 0; index < running_.size(); ++index) {
    const int row = running_[index];
    if (todo(rows_[row]) != 1) {
      partial_.push_back(row);
      continue;
    }
    while (!grow(rows_[row], rows_[row].computed + 1)) {
      const int victim = running_.back();
      preempt(victim);
      preempted_ = true;
      if (victim == row) return;
    }
    add_work(row, 1);
  }
}

void PlainReplica::prompts() {
  partial_.erase(std::remove_if(partial_.begin(), partial_.end(), [&](int row) { return !rows_[row].running; }), partial_.end());
  look_for_rows_ = (int64_t)running_.size() < setup_.max_rows && !queue_.empty();
  const int first = look_for_rows_ ? *queue_.begin() : -1;
  if (first < 0 && partial_.empty()) return;
  oldest_ = first < 0 ? partial_[0] : first;
  for (const int row : partial_) oldest_ = std::min(oldest_, row);
  std::sort(partial_.begin(), partial_.end(), [&](int a, int b) {
    return std::make_pair(todo(rows_[a]), a) < std::make_pair(todo(rows_[b]), b);
  });
  pieces_ = partial_.size();
  most_pieces_ = std::max<int64_t>(1, std::min(MOST_PARTIAL, setup_.max_rows / 2));
  if (first >= 0) keep_for(first, first == oldest_);
  const int64_t rest = left_of(rows_[oldest_]);
  if (shortest(0, rest / 2) >= 0) {
    const int64_t left = left_, used = tokens_;
    left_ -= std::min(rest, (left + 1) / 2);
    serve(rest / 2);
    left_ = left - (tokens_ - used);
  }
  if (!rows_[oldest_].running) {
    if (admit(oldest_, true) == Reason::none) pieces_ += todo(rows_[oldest_]) > 1;
  } else if (std::find(partial_.begin(), partial_.end(), oldest_) != partial_.end()) {
    piece(oldest_);
  }
  serve(ANY);
}

void PlainReplica::serve(int64_t most) {
  int64_t passed = 0, missed = 0;
  while (left_ > 0) {
    const int row = shortest(passed, most);
    if (row < 0) return;
    if (rows_[row].running) {
      piece(row);
      continue;
    }
    const Reason reason = admit(row, row == oldest_ || pieces_ < most_pieces_);
    if (reason == Reason::none) {
      pieces_ += todo(rows_[row]) > 1;
      continue;
    }
    missed += reason == Reason::blocks;
    passed = reason == Reason::blocks && missed < LOOK_PAST ? passed + 1 : ranked_.size();
  }
}

// The prompt with the least to compute; -1 if there is none, or none with so little.
int PlainReplica::shortest(int64_t passed, int64_t most) const {
  int row = partial_.empty() ? -1 : partial_[0];
  if (look_for_rows_ && passed < (int64_t)ranked_.size()) {
    const auto& waiting = *std::next(ranked_.begin(), passed);
    if (row < 0 || waiting < std::make_pair(todo(rows_[row]), row)) row = waiting.second;
  }
  return row >= 0 && most != ANY && left_of(rows_[row]) > most ? -1 : row;
}

void PlainReplica::piece(int row) {
  partial_.erase(std::find(partial_.begin(), partial_.end(), row));
  chunk(row);
  pieces_ -= todo(rows_[row]) <= 1;
}

void PlainReplica::chunk(int index) {
  const Row& row = rows_[index];
  const int64_t planned = row.computed + row.pending;
  const int64_t room = setup_.block_size * (row.blocks + available_) - planned;
  if (promised_ >= 0) promised_ -= promise(row);
  plan_chunk(index, std::min({todo(row), room, left_}));
}

void PlainReplica::plan_chunk(int index, int64_t count) {
  Row& row = rows_[index];
  if (count > 0) {
    grow(row, row.computed + row.pending + count);
    add_work(index, count);
  }
  if (promised_ >= 0) promised_ += promise(row);
}

void PlainReplica::add_work(int index, int64_t count) {
  Row& row = rows_[index];
  const int64_t start = row.computed + row.pending;
  new_ |= !row.held;
  row.held = true;
  row.pending += count;
  work_.push_back({index, start, count, start + count >= row.tokens});
  left_ -= count;
  tokens_ += count;
}

PlainReplica::Reason PlainReplica::admit(int index, bool partly) {
  const Reason reason = admission(index, partly);
  rows_[index].reason = reason;
  rows_[index].asked = step_;
  return reason;
}

PlainReplica::Reason PlainReplica::admission(int index, bool partly) {
  Row& row = rows_[index];
  if (row.asked == step_ && row.reason == Reason::blocks) return Reason::blocks;  // for the whole step
  if (preempted_) return Reason::preempting;
  if ((int64_t)running_.size() + (index == first_ ? 0 : row_for_first_) >= setup_.max_rows) return Reason::rows;
  if (left_ <= 0) return Reason::budget;
  if (!fits(index)) return Reason::blocks;
  const int64_t count = std::min(row.tokens, left_);
  if (count < row.tokens && !partly) return Reason::budget;
  run_row(index);
  if (index == first_) {
    row_for_first_ = kept_ = 0;
    passing_ = false;
  } else if (passing_ && first_ >= 0 && index > first_) {
    ++rows_[first_].overtaken;
  }
  plan_chunk(index, count);
  return Reason::none;
}

bool PlainReplica::fits(int index) {
  if (promised_ < 0) {
    promised_ = 0;
    for (const int row : running_) promised_ += promise(rows_[row]);
  }
  const bool room = setup_.headroom && setup_.block_size < setup_.max_model_len && !running_.empty();
  const int64_t headroom = room ? running_.size() + 1 : 0;
  return available_ - promised_ - (index == first_ ? 0 : kept_) - headroom >= needs(rows_[index]);
}

void PlainReplica::keep_for(int row, bool oldest) {
  first_ = row;
  row_for_first_ = oldest;
  const bool fit = fits(row);
  passing_ = !fit;
  if (fit || rows_[row].overtaken >= OVERTAKING_BATCHES * setup_.max_rows) kept_ = needs(rows_[row]);
}

// Why the first waiting request has to wait.
PlainReplica::Reason PlainReplica::blocked() const {
  if (queue_.empty()) return Reason::none;
  if (preempted_) return Reason::preempting;
  const Row& first = rows_[*queue_.begin()];
  return first.asked == step_ ? first.reason : otherwise_;
}

// ---- rows and blocks

int64_t PlainReplica::todo(const Row& row) const {
  const int64_t planned = row.computed + row.pending, known = row.tokens - planned;
  return known > 0 ? known : planned < load_.max_len[row.request] - 1;
}

// Blocks that a row takes when it is admitted, or for all there can ever be of it.
int64_t PlainReplica::needs(const Row& row) const {
  return blocks_of(row.strict ? load_.max_len[row.request] - 1 : row.tokens);
}

// Blocks promised to a row at its admission that it has not taken yet.
int64_t PlainReplica::promise(const Row& row) const {
  if (row.running && todo(row) <= 1 && !row.strict) return 0;
  return std::max<int64_t>(0, needs(row) - row.blocks);
}

bool PlainReplica::grow(Row& row, int64_t end) {
  const int64_t missing = blocks_of(end) - row.blocks;
  if (missing <= 0) return true;
  if (missing > available_) return false;
  row.blocks += missing;
  available_ -= missing;
  return true;
}

void PlainReplica::run_row(int row) {
  queue_.erase(row);
  ranked_.erase({rows_[row].tokens, row});
  rows_[row].running = true;
  rows_[row].computed = 0;
  running_.insert(std::lower_bound(running_.begin(), running_.end(), row, [&](int a, int b) { return before(a, b); }), row);
}

void PlainReplica::stop_row(int index) {
  Row& row = rows_[index];
  running_.erase(std::lower_bound(running_.begin(), running_.end(), index, [&](int a, int b) { return before(a, b); }));
  row.running = false;
  available_ += row.blocks;
  row.blocks = 0;
  gone_ |= row.held;
  row.held = false;
}

void PlainReplica::wait(int row) {
  queue_.insert(row);
  ranked_.insert({rows_[row].tokens, row});
}

void PlainReplica::preempt(int index) {
  stop_row(index);
  Row& row = rows_[index];
  row.computed = 0;
  ++row.preemptions;
  row.strict = setup_.strict_after >= 0 && row.preemptions >= setup_.strict_after;
  wait(index);
}

// ---- runs

// For how many steps, at most `most`, plans keep their shape: the same rows, one new token each.
int64_t PlainReplica::horizon(int64_t most) const {
  const Reason why = blocked();
  if (why == Reason::budget || why == Reason::preempting || new_ || work_.empty() || work_.size() != running_.size()) return 1;
  int64_t longest = std::min(most, MOST_STEPS);
  for (size_t i = 0; i < work_.size(); ++i) {
    const Work& work = work_[i];
    if (work.row != running_[i] || work.count != 1 || !work.sample) return 1;
    longest = std::min(longest, load_.max_len[rows_[work.row].request] - rows_[work.row].tokens);
  }
  return within_blocks(longest);
}

// Steps to the first end of an answer.
int64_t PlainReplica::answer_left() const {
  int64_t left = MOST_STEPS;
  for (const Work& work : work_) {
    const int64_t request = rows_[work.row].request;
    left = std::min(left, load_.prompt[request] + load_.output[request] - 1 - work.start);
  }
  return left;
}

// The most steps, up to `steps`, for which the blocks available now suffice.
int64_t PlainReplica::within_blocks(int64_t steps) const {
  if ((int64_t)running_.size() * (1 + steps / setup_.block_size) <= available_) return steps;
  const auto enough = [&](int64_t count) {
    int64_t taken = 0;
    for (const int row : running_) {
      const int64_t more = count - (rows_[row].blocks * setup_.block_size - rows_[row].computed);
      if (more > 0) taken += blocks_of(more);
    }
    return taken <= available_;
  };
  if (enough(steps)) return steps;
  int64_t fits = 1, too_many = steps + 1;
  while (too_many - fits > 1) {
    const int64_t middle = (fits + too_many) / 2;
    (enough(middle) ? fits : too_many) = middle;
  }
  return fits;
}

// Picoseconds of the step planned now.
int64_t PlainReplica::price() {
  if (work_.empty()) return setup_.idle_step;
  const auto same = [](const Work& a, const Work& b) { return a.row == b.row && b.count == 1; };
  if (!priced_.empty() && !new_ && !drops_ && priced_.size() == work_.size() &&
      work_[0].start == priced_[0].start + now_segment_.offset + now_segment_.done &&
      std::equal(priced_.begin(), priced_.end(), work_.begin(), same)) {
    return next_step();
  }
  keys_ = pairs_ = decode_keys_ = new_tokens_ = logits_ = 0;
  priced_rows_ = work_.size();
  bool steady = true;
  for (const Work& work : work_) {
    const int64_t end = work.start + work.count;
    keys_ += end;
    pairs_ += work.count * work.start + work.count * (work.count + 1) / 2;
    if (work.count == 1) decode_keys_ += end;
    new_tokens_ += work.count;
    logits_ += work.sample;
    steady = steady && work.count == 1 && work.sample;
  }
  if (steady) priced_ = work_;
  else priced_.clear();
  now_segment_ = {0, ask(0), 1, -1};
  return now_segment_.first;
}

// Picoseconds of the step after those priced, if the plan keeps its shape.
int64_t PlainReplica::next_step() {
  Segment& segment = now_segment_;
  if (segment.done == SEGMENT) {
    if (segment.after < 0) segment.after = ask(segment.offset + SEGMENT);
    segment = {segment.offset + SEGMENT, segment.after, 0, -1};
  }
  if (segment.after < 0) segment.after = ask(segment.offset + SEGMENT);
  return segment.first + segment.done++ * floor_div(segment.after - segment.first, SEGMENT);
}

// Picoseconds of the step so many steps after the plan that was priced, by the step-time model.
int64_t PlainReplica::ask(int64_t ahead) {
  const int64_t more = ahead * priced_rows_;  // every row reads one key more in every step
  return prices_(new_tokens_, priced_rows_, logits_, keys_ + more, pairs_ + more, decode_keys_ + more);
}

}  // namespace headway
