#include "engine/scheduler.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "base/over_rows.hpp"

namespace kvlab {
namespace {

double steady_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Scheduler::Scheduler(Engine& engine, std::vector<Request> requests, SchedulerOptions options)
    : engine_(engine),
      requests_(std::move(requests)),
      options_(std::move(options)),
      served_(requests_.size()),
      order_(requests_.size()),
      most_active_(static_cast<std::size_t>(engine.store().shape().max_slots)),
      growth_(engine.step_bytes()),
      logits_(static_cast<std::size_t>(engine.model().config.vocab) * (options_.choose ? most_active_ : 1)) {
  const int room = engine.store().shape().max_tokens;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const Request& r = requests_[i];
    if (r.prompt.empty() || r.max_new < 1)
      throw Error(Errc::data, "got a request of " + std::to_string(r.prompt.size()) + " prompt tokens and " +
                                  std::to_string(r.max_new) + " new ones, wanted at least one of each");
    const std::size_t tokens = r.prompt.size() + r.fed.size() + static_cast<std::size_t>(r.max_new);
    if (tokens > static_cast<std::size_t>(room))
      throw Error(Errc::data, "got a request of " + std::to_string(tokens) +
                                  " tokens with its answer, wanted at most " + std::to_string(room));
    served_[i].arrival_ms = r.arrival_ms;
  }
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  std::stable_sort(order_.begin(), order_.end(),
                   [&](std::size_t a, std::size_t b) { return requests_[a].arrival_ms < requests_[b].arrival_ms; });
  if (!options_.clock) options_.clock = steady_ms;
  start_ = options_.clock();
}

double Scheduler::now() const { return options_.clock() - start_ + skipped_; }

int Scheduler::next_token(const Active& a) const {
  const auto& fed = request(a).fed;
  return a.given < fed.size() ? fed[a.given] : served_[index(a)].tokens[a.given - fed.size()];
}

std::vector<std::int32_t> Scheduler::slots() const {
  std::vector<std::int32_t> out;
  for (const Active& a : active_) out.push_back(a.slot);
  return out;
}

Fit Scheduler::iterate() {
  arrive();
  if (const Fit fit = prompts(); fit != Fit::ok) return fit;
  return decode();
}

void Scheduler::arrive() {
  if (active_.empty() && waiting_.empty() && arrived_ < order_.size())
    skipped_ += std::max(0., requests_[order_[arrived_]].arrival_ms - now());
  for (const double at = now(); arrived_ < order_.size(); ++arrived_) {
    const bool due = requests_[order_[arrived_]].arrival_ms <= at;
    if (!due && (!active_.empty() || !waiting_.empty())) break;  // rounding may leave the first one not due
    waiting_.insert(waiting_.end(), arrived_);
  }
}

// The bytes that a prompt leaves are at most those of a shorter prompt, grown in proportion. Budgets are amounts or
// shares, so the kept part grows no faster than the prompt. One page of each head is added for rounding. What the
// policy says of the host holds for the whole sequence.
Scheduler::Left Scheduler::left_by(std::size_t prompt, const Engine::Demanded& says) const {
  Left least{prompt, says.prompt, std::max<std::int64_t>(0, says.host)};
  for (const Left& l : left_) {
    const double ratio = std::max(1., static_cast<double>(prompt) / static_cast<double>(l.tokens));
    const auto grown = [&](std::int64_t bytes) {
      return static_cast<std::int64_t>(ratio * static_cast<double>(bytes)) + engine_.full_bytes(1);
    };
    if (grown(l.bytes) >= least.bytes) continue;
    least.bytes = grown(l.bytes);
    if (says.host < 0) least.below = grown(l.below);
  }
  return least;
}

bool Scheduler::fits(std::size_t index) const {
  const std::int64_t free = engine_.free_bytes();
  if (free == Engine::no_limit && !engine_.fills_host()) return true;
  const Request& request = requests_[index];
  const std::size_t prompt = request.prompt.size(), more = known(index);
  const std::int64_t all = engine_.full_bytes(static_cast<int>(prompt));
  const Engine::Demanded says =
      engine_.demanded(static_cast<int>(prompt), static_cast<int>(request.fed.size()) + request.max_new);
  const Left least = left_by(prompt, says);
  const bool leaves = least.below <= engine_.host_room_bytes();
  if (!leaves && engine_.fills_host()) return false;
  if (free == Engine::no_limit) return true;
  const std::int64_t kept = leaves ? least.bytes : all;
  // A whole prompt is compressed in each layer before the next layer runs, a chunked one at its end.
  const bool whole = !engine_.compresses_at_end() &&
                     (options_.prefill_chunk == 0 || prompt <= static_cast<std::size_t>(options_.prefill_chunk));
  std::int64_t peak = whole ? std::min(all, kept + all / engine_.store().shape().layers) : all;
  // A chunk that attends to listed pages adds its own.
  if (const int listed = engine_.prompt_chunk(); listed > 0)
    peak = std::min(all, kept + engine_.full_bytes(listed + engine_.store().shape().page_size));
  std::int64_t after = kept + (more ? engine_.full_bytes(static_cast<int>(more)) : 0);
  if (more && leaves && says.decode >= 0) after = std::min(after, says.decode);
  return free >= std::max(peak, after) + growth_ * static_cast<std::int64_t>(active_.size() + 1);
}

// Continues a request whose cache waits. Pages for some steps of all requests stay free, so that it is not preempted
// again at once. A large cache takes long to move, so it needs more of them.
bool Scheduler::resume(std::size_t rank) {
  const auto waits = aside_.find(rank);
  const AsideSequence& sequence = waits->second.sequence;
  Active a = waits->second.state;
  const std::int64_t bytes = sequence.bytes(Tier::device), most = std::clamp<std::int64_t>(bytes / growth_ / 8, 1, 4);
  // Pages of each KV head by which a request may grow.
  const auto ahead = [&](const Active& of) {
    const std::size_t left = request(of).fed.size() + static_cast<std::size_t>(request(of).max_new) - of.given;
    return std::min(most, static_cast<std::int64_t>(left) / engine_.store().shape().page_size + 1);
  };
  std::int64_t pages = ahead(a);
  for (const Active& other : active_) pages += ahead(other);
  if (!active_.empty() && engine_.free_bytes() < bytes + pages * growth_) return false;
  a.slot = engine_.open(request(a).sequence);
  if (a.slot < 0) return false;
  engine_.ask(a.slot, request(a).question);
  if (engine_.bring_back(a.slot, sequence) != Fit::ok) {
    engine_.close(a.slot);
    full_ = !active_.empty();
    if (full_) return false;
    engine_.drop(sequence);
    aside_.erase(waits);
    return admit();
  }
  aside_.erase(waits);
  waiting_.erase(rank);
  active_.push_back(a);
  return true;
}

// Admits the first waiting request when there is room. A request that would run alone is always admitted: only a try
// shows whether it fits.
bool Scheduler::admit() {
  if (waiting_.empty()) return false;
  const std::size_t rank = *waiting_.begin(), request = order_[rank];
  if (!active_.empty() && (full_ || active_.size() >= most_active_)) return false;
  if (aside_.contains(rank)) return resume(rank);
  if (!active_.empty() && !fits(request)) return false;
  Active a;
  a.rank = rank;
  a.slot = engine_.open(requests_[request].sequence);
  if (a.slot < 0) return false;
  engine_.ask(a.slot, requests_[request].question);
  waiting_.erase(waiting_.begin());
  active_.push_back(a);
  if (served_[request].admitted_ms != served_[request].admitted_ms) served_[request].admitted_ms = now();
  return true;
}

Fit Scheduler::prompts() {
  // Whole chunks of a policy that chooses what each of them attends to.
  const int own = std::max(1, engine_.prompt_chunk());
  const auto chunk = static_cast<std::size_t>((options_.prefill_chunk + own - 1) / own * own);
  for (std::size_t spent = 0;;) {
    if (active_.empty() || !prompting(active_.back())) {
      if (!admit()) return Fit::ok;
      if (!prompting(active_.back())) continue;
    }
    Active& a = active_.back();
    const std::vector<int>& prompt = request(a).prompt;
    // Chunks begin at multiples of their size whatever else runs, so a prompt has the same chunks in every schedule.
    const std::size_t left = prompt.size() - a.prefilled, count = chunk ? std::min(chunk, left) : left;
    if (chunk && spent > 0 && spent + count > chunk) return Fit::ok;
    const bool last = count == left, asks = last && known(index(a)) == 0;
    const bool limited = engine_.free_bytes() != Engine::no_limit, learns = limited || engine_.fills_host();
    const auto free = [&] { return limited ? engine_.free_bytes() : -engine_.used_bytes(); };
    const std::int64_t before = learns ? free() : 0, below = engine_.fills_host() ? engine_.host_used_bytes() : 0;
    const double begin = now();
    const Fit fit = engine_.prefill(a.slot, {prompt.data() + a.prefilled, count}, last,
                                    asks ? View<float, 2>::dense(logits_.data(), {1, vocab()}) : View<float, 2>());
    if (fit != Fit::ok) {
      if (active_.size() == 1) return fit;
      put_back(active_.size() - 1, Cache::of_no_use);
      full_ = true;
      return Fit::ok;
    }
    const double end = now();
    if (options_.prompted) options_.prompted(end - begin);
    a.prefilled += count;
    spent += count;
    if (learns) a.kept += before - free();
    if (engine_.fills_host()) a.below += engine_.host_used_bytes() - below;
    if (last && learns)
      left_.push_back({prompt.size(), std::max<std::int64_t>(0, a.kept),
                       engine_.fills_host() ? a.below : engine_.host_needed_bytes(a.slot)});
    if (!asks) continue;
    const std::span<const float> logits(logits_.data(), static_cast<std::size_t>(vocab()));
    const int token = options_.choose
                          ? options_.choose(index(a), logits)
                          : static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    if (take(a, token, end)) finish(active_.size() - 1);
  }
}

// Puts back the latest requests until the next step of the others fits, and returns the slots of that step. The last
// request stays: its pages may have room for the token.
std::vector<std::int32_t> Scheduler::make_room() {
  std::vector<std::int32_t> slots = decoding();
  const auto missing = [&] {
    if (!engine_.room_for_step(slots)) return true;
    return !engine_.growth_known() && engine_.free_bytes() < growth_ * static_cast<std::int64_t>(slots.size());
  };
  while (active_.size() > 1 && missing()) {
    put_back(active_.size() - 1, Cache::of_use);
    full_ = true;  // frames of one codec may be few while bytes are free, so it would come and go with each step
    slots = decoding();
  }
  return slots;
}

std::vector<std::int32_t> Scheduler::decoding() const {
  std::vector<std::int32_t> out;
  for (const Active& a : active_)
    if (!prompting(a)) out.push_back(a.slot);
  return out;
}

// Rows whose pages are under way sit a step out, unless all rows would.
std::vector<std::size_t> Scheduler::rows_of_step() {
  std::vector<std::size_t> ready, paused;
  for (std::size_t i = 0; i < active_.size(); ++i)
    if (!prompting(active_[i])) (engine_.reloading(active_[i].slot) ? paused : ready).push_back(i);
  if (ready.empty()) return paused;
  for (const std::size_t i : paused) ++served_[index(active_[i])].pauses;
  return ready;
}

Fit Scheduler::decode() {
  if (make_room().empty()) return Fit::ok;
  const std::vector<std::size_t> rows = rows_of_step();
  std::vector<std::int32_t> slots;
  std::vector<int> tokens;
  for (const std::size_t i : rows) {
    slots.push_back(active_[i].slot);
    tokens.push_back(next_token(active_[i]));
  }
  std::vector<std::int32_t> tokens_of_rows(slots.size());
  const auto result =
      options_.choose
          ? StepResult(View<float, 2>::dense(logits_.data(), {static_cast<std::int64_t>(slots.size()), vocab()}))
          : StepResult(tokens_of_rows);
  const bool learns = !engine_.growth_known();
  const std::int64_t used = learns ? engine_.used_bytes() : 0;
  const double begin = now();
  if (engine_.step(slots, tokens, result) != Fit::ok) {
    // The rows' caches are of no use after a step that did not fit. Fewer rows try again.
    if (active_.size() == 1) return Fit::out_of_memory;
    most_active_ = active_.size() - 1;
    while (!active_.empty()) put_back(active_.size() - 1, Cache::of_no_use);
    return Fit::ok;
  }
  if (options_.choose) tokens_of_rows = chosen(rows);
  const double end = now();
  if (options_.stepped) options_.stepped(end - begin, slots);
  if (learns) growth_ = std::max(growth_, (engine_.used_bytes() - used) / static_cast<std::int64_t>(slots.size()));
  std::vector<std::size_t> ended;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    Active& a = active_[rows[row]];
    ++a.given;
    if (a.given == known(index(a)) && take(a, tokens_of_rows[row], end)) ended.push_back(rows[row]);
  }
  for (; !ended.empty(); ended.pop_back()) finish(ended.back());
  return Fit::ok;
}

// A row that is being fed known tokens chooses none: a drawn answer has one random number for each of its own.
std::vector<std::int32_t> Scheduler::chosen(const std::vector<std::size_t>& rows) const {
  std::vector<std::int32_t> out(rows.size());
  const auto size = static_cast<std::size_t>(vocab());
  over_rows(static_cast<std::int64_t>(rows.size()), [&](std::int64_t i) {
    const auto row = static_cast<std::size_t>(i);
    const Active& a = active_[rows[row]];
    if (a.given + 1 == known(index(a))) out[row] = options_.choose(index(a), {logits_.data() + row * size, size});
  });
  return out;
}

// Adds a token to the answer. Returns true when it is the last one.
bool Scheduler::take(Active& a, int token, double at) {
  Served& s = served_[index(a)];
  s.tokens.push_back(token);
  s.token_ms.push_back(at);
  s.ended = options_.ends && options_.ends(token);
  s.stopped = !s.ended && options_.stops && options_.stops(index(a), s.tokens);
  return s.ended || s.stopped || s.tokens.size() == static_cast<std::size_t>(request(a).max_new);
}

void Scheduler::put_back(std::size_t active, Cache cache) {
  const Active a = active_[active];
  std::optional<AsideSequence> sequence;
  if (cache == Cache::of_use && options_.preemption == Preemption::swap && !prompting(a))
    sequence = engine_.set_aside(a.slot);
  if (sequence)
    aside_.emplace(a.rank, Aside{std::move(*sequence), a});
  else
    engine_.close(a.slot);
  active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(active));
  waiting_.insert(a.rank);
  ++served_[index(a)].preemptions;
}

void Scheduler::finish(std::size_t active) {
  const std::size_t request = index(active_[active]);
  engine_.close(active_[active].slot);
  active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(active));
  ++finished_;
  full_ = false;
  most_active_ = std::min(most_active_ + 1, static_cast<std::size_t>(engine_.store().shape().max_slots));
  if (options_.finished) options_.finished(request);
}

}  // namespace kvlab
