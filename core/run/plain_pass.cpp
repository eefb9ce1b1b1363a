#include "run/plain_pass.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/over_rows.hpp"
#include "run/averages.hpp"
#include "run/disturbance.hpp"
#include "run/nonfinite.hpp"
#include "run/warm_up.hpp"

namespace kvlab {
namespace {

double ms_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

std::vector<std::size_t> conversations(const std::vector<Item>& items) {
  std::vector<std::size_t> heads;
  for (std::size_t i = 0; i < items.size(); ++i)
    if (!items[i].follows) heads.push_back(i);
  return heads;
}

}  // namespace

PlainPass::PlainPass(const CellInput& in, results::CellResult& out)
    : in_(in),
      out_(out),
      items_(in.items->items),
      heads_(conversations(items_)),
      vocab_(in.model->config.vocab),
      timed_(in.wants(Metric::latency)),
      batch_(std::min(static_cast<std::size_t>(std::max(1, in.experiment->batch)), heads_.size())),
      engine_(warmed_engine(in, static_cast<int>(batch_))),
      logits_(batch_ * static_cast<std::size_t>(vocab_)),
      token_ms_(items_.size()) {
  if (in.wants(Metric::trace)) trace_.emplace(items_, out.trace);
  if (in.wants(Metric::parts) && engine_.store().stream().device() == Device::cuda)
    events_.emplace(engine_.store().stream());
  out_.samples.resize(items_.size());
  answers_.outputs.resize(items_.size());
}

PlainPass::Answers PlainPass::run() {
  if (timed_) touch(engine_, items_[0]);
  const std::int64_t replays = engine_.replays();
  std::optional<TimedPart> timed;
  if (timed_) timed.emplace(engine_.store().stream().device());
  StepLog log(engine_, in_.wants(Metric::parts), out_);
  for (std::size_t begin = 0; begin < heads_.size(); begin += batch_)
    run_batch(begin, std::min(heads_.size(), begin + batch_), log);
  if (trace_) trace_->finish(engine_.store().shape());
  write_tokens();
  log.finish(timed_);
  if (timed_) out_.summary.tokens_per_s = log.tokens_per_s();
  if (engine_.replays() > replays) add_label(out_.summary, "graph");  // decode steps ran as graphs
  if (timed) timed->note(out_.summary);
  return std::move(answers_);
}

void PlainPass::run_batch(std::size_t begin, std::size_t end, StepLog& log) {
  if (in_.full_runs) {
    std::set<int> samples;
    for (std::size_t i = begin; i < end; ++i) samples.insert(items_[heads_[i]].sample);
    in_.full_runs->prepare(in_, samples);
  }
  std::vector<Row> rows;
  rows.reserve(end - begin);  // `active` points into it
  std::vector<Row*> active;
  for (std::size_t i = begin; i < end; ++i) {
    rows.push_back(row_of(heads_[i]));
    start(rows.back(), log);
    if (goes_on(rows.back())) active.push_back(&rows.back());
  }
  std::erase_if(contexts_,
                [&](const auto& c) { return end >= heads_.size() || c.first.first != items_[heads_[end]].sample; });
  if (trace_) engine_.observe(&*trace_);
  while (!active.empty()) step(active, log);
  engine_.observe(nullptr);
}

PlainPass::Row PlainPass::row_of(std::size_t number) const {
  return {items_[number], static_cast<int>(number), draws_of(in_.experiment->sampling, in_.cell->seed, items_[number])};
}

// Whether the row is one of several draws to the same prompt.
bool PlainPass::asked_again(const Row& row) const { return row.item->draw >= 0 && in_.experiment->sampling.draws > 1; }

// Prefills the prompt, or restores the sample's context as another question or draw left it.
void PlainPass::start(Row& row, StepLog& log) {
  row.slot = engine_.open(static_cast<std::uint32_t>(row.item->sample));
  engine_.ask(row.slot, static_cast<std::uint32_t>(row.number));
  row.start = Clock::now();
  row.queue = row.item->fed;
  row.seen = static_cast<std::int64_t>(row.item->prompt.size() + row.item->fed.size());
  PartClock clock(events());
  const bool keeps = row.item->shared || asked_again(row);
  const std::pair key{row.item->sample, row.item->shared ? -1 : row.item->question};
  const auto known = contexts_.find(key);
  const bool restored = keeps && known != contexts_.end();
  if (restored) {
    want_room(engine_.restore(row.slot, known->second.sequence), engine_);
    std::copy(known->second.logits.begin(), known->second.logits.end(), logits_.begin());
  } else {
    want_room(engine_.prefill(row.slot, row.item->prompt, true, logits_view(1)), engine_);
  }
  const double ms = ms_since(row.start);
  const PartSeconds parts = clock.take().parts;
  if (keeps && !restored) {
    const auto before = Clock::now();
    contexts_[key] = {engine_.save(row.slot), {logits_.begin(), logits_.begin() + vocab_}};
    row.start += Clock::now() - before;  // it is for the others
  }
  if (trace_) trace_->kept(engine_, row.slot, row.number);
  if (!restored) log.prompt(ms, parts);
  take(row, logits_of(0), ms);
  if (restored) row.ttft = results::not_measured;
  if (!row.item->shared && row.item->draw + 1 == in_.experiment->sampling.draws) contexts_.erase(key);
}

// Runs one decode step of the active rows. Conversations that end leave.
void PlainPass::step(std::vector<Row*>& active, StepLog& log) {
  std::vector<std::int32_t> slots;
  std::vector<int> tokens;
  std::vector<TraceRecorder::Row> traced;
  for (const Row* row : active) {
    slots.push_back(row->slot);
    tokens.push_back(row->asking() ? row->queue[row->fed] : row->answer.tokens().back());
    traced.push_back({row->number, static_cast<int>(row->answer.tokens().size())});
  }
  if (trace_) trace_->rows(std::move(traced));
  const auto start = Clock::now();
  PartClock clock(events());
  const bool reads_logits = std::any_of(active.begin(), active.end(), [&](const Row* r) {
    return !r->item->forced.empty() || (r->item->draw >= 0 && in_.experiment->sampling.on());
  });
  likeliest_.resize(active.size());
  const auto result = reads_logits ? StepResult(logits_view(active.size())) : StepResult(likeliest_);
  want_room(engine_.step(slots, tokens, result), engine_);
  if (reads_logits) choose(active);
  const double ms = ms_since(start);
  log.decode(ms, clock.take().parts, slots);
  for (std::size_t r = 0; r < active.size(); ++r) {
    if (active[r]->asking()) ++active[r]->fed;
    active[r]->item->forced.empty() ? take(*active[r], likeliest_[r], ms) : take(*active[r], logits_of(r), ms);
  }
  std::erase_if(active, [&](Row* row) { return !goes_on(*row); });
}

// Fills likeliest_ with each row's next token. Rows whose question is still being fed take none: a drawn answer has one
// random number for each of its own tokens.
void PlainPass::choose(const std::vector<Row*>& active) {
  over_rows(static_cast<std::int64_t>(active.size()), [&](std::int64_t row) {
    const auto r = static_cast<std::size_t>(row);
    if (active[r]->fed + 1 >= active[r]->queue.size()) likeliest_[r] = active[r]->answer.choose(logits_of(r));
  });
}

// Takes the row's next answer token. There is none while the question is being fed.
template <class Logits>
void PlainPass::take(Row& row, Logits logits, double ms) {
  if (row.asking()) return;
  const bool first = row.answer.tokens().empty();
  if (first) row.ttft = ms_since(row.start);
  row.ms.push_back(static_cast<float>(first ? row.ttft : ms));
  if (row.item->follows) row.ttft = results::not_measured;  // its prompt was there already
  const int token = row.answer.take(logits, *in_.model->tokenizer);
  if constexpr (!std::is_integral_v<Logits>)
    if (!row.item->forced.empty()) row.nll += negative_log_likelihood(logits, token);
}

// Whether the row stays active. A row whose answer ended takes its next question, or leaves.
bool PlainPass::goes_on(Row& row) {
  if (!row.answer.ended()) return true;
  finish_item(row);
  if (next_turn(row)) return true;
  engine_.close(row.slot);
  return false;
}

void PlainPass::finish_item(Row& row) {
  const Answer& answer = row.answer;
  results::SampleRow s = sample_row(*row.item, row.number);
  s.prompt_tokens = row.seen;
  std::vector<int> text = answer.tokens();
  if (answer.stop() == Answer::Stop::eos) text.pop_back();
  s.output = answer_text(*row.item, text, *in_.model->tokenizer);
  s.output_tokens = static_cast<std::int64_t>(answer.tokens().size());
  s.stop = name_of(answer.stop());
  if (timed_) s.ttft_ms = row.ttft;
  if (row.item->forced.empty()) {
    s.score = in_.items->score(*row.item, s.output);
    if (!row.item->references.empty()) want_finite(s.score, "a score by '" + in_.items->metric + "'", row.number);
  } else {
    const auto tokens = static_cast<double>(row.item->forced.size());
    s.score = std::exp(row.nll / tokens);
    want_finite(s.score, "a perplexity", row.number);
    answers_.forced.nll.resize(items_.size());
    answers_.forced.nll[static_cast<std::size_t>(row.number)] = row.nll;
  }
  const auto i = static_cast<std::size_t>(row.number);
  if (trace_) trace_->answered(row.number, row.queue, answer.tokens());
  out_.samples[i] = s;
  answers_.outputs[i] = answer.tokens();
  token_ms_[i] = std::move(row.ms);
  ++done_;
  if (in_.progress) in_.progress("running", done_, static_cast<int>(items_.size()));
}

// Gives the row the next question of its conversation, if there is one. The answer stays in the cache. The question
// begins with the template's end of an answer, so the model's own end token is not fed.
bool PlainPass::next_turn(Row& row) {
  const auto next = static_cast<std::size_t>(row.number) + 1;
  if (next == items_.size() || !items_[next].follows) return false;
  Row turn = row_of(next);
  turn.slot = row.slot;
  turn.seen = row.seen + static_cast<std::int64_t>(row.answer.tokens().size() + turn.item->fed.size());
  if (row.answer.stop() == Answer::Stop::eos)
    --turn.seen;
  else
    turn.queue.push_back(row.answer.tokens().back());
  turn.queue.insert(turn.queue.end(), turn.item->fed.begin(), turn.item->fed.end());
  row = std::move(turn);
  engine_.ask(row.slot, static_cast<std::uint32_t>(row.number));
  if (trace_) trace_->kept(engine_, row.slot, row.number);
  return true;
}

void PlainPass::write_tokens() {
  out_.token_offsets.push_back(0);
  for (const auto& ms : token_ms_) {
    if (timed_) out_.token_ms.insert(out_.token_ms.end(), ms.begin(), ms.end());
    out_.token_offsets.push_back(out_.token_offsets.back() + static_cast<std::int64_t>(ms.size()));
  }
}

}  // namespace kvlab
