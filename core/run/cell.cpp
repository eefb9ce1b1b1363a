#include "run/cell.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include "base/sha256.hpp"
#include "experiment/variants.hpp"
#include "host/compose.hpp"
#include "ops/paged.hpp"
#include "run/metrics.hpp"
#include "run/sampling.hpp"
#include "run/shadow.hpp"

namespace kvlab {
namespace {

using results::CellResult;
using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

template <class Interface>
Instance<Interface> make(const std::optional<PluginUse>& use, const PluginCatalog& catalog) {
  if (!use) return {};
  const PluginInfo* info = catalog.find(use->role, use->name);
  if (!info) throw Error(Errc::plugin, "got unknown " + std::string(name_of(use->role)) + " '" + use->name + "'");
  return create<Interface>(*info, use->params);
}

struct OutOfMemory {
  std::string what;
};

// First token at which two answers part; -1 = not within the shorter one.
std::int64_t divergence(const std::vector<int>& a, const std::vector<int>& b) {
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    if (a[i] != b[i]) return static_cast<std::int64_t>(i);
  return -1;
}

// One sequence of the plain pass: a conversation, question by question.
struct Row {
  const Item* item = nullptr;
  int number = 0;  // of the item in the cell
  int slot = -1;
  std::vector<int> queue;  // fed before the answer
  std::size_t fed = 0;     // of the queue
  std::int64_t seen = 0;   // tokens before the answer
  std::vector<int> output;
  std::vector<float> ms;
  double nll = 0;
  Clock::time_point start;
  double ttft = results::not_measured;
  std::string stop;

  const std::vector<int>& forced() const { return item->forced; }
};

// A later turn as a question of its own: all that was said before it is fed too.
Item after(Item item, const std::vector<int>& history) {
  item.sha256 += "/" + sha256_hex({reinterpret_cast<const char*>(history.data()), history.size() * sizeof(int)});
  item.fed.insert(item.fed.begin(), history.begin(), history.end());
  item.before = 0;
  return item;
}

class CellRun {
 public:
  CellRun(const CellInput& in, CellResult& out)
      : in_(in),
        out_(out),
        experiment_(*in.experiment),
        policy_(experiment_.policies[in.cell->policy]),
        model_(in.model),
        vocab_(model_->config.vocab),
        timed_(experiment_.metrics.count(Metric::latency) != 0),
        traced_(experiment_.metrics.count(Metric::trace) != 0) {}

  void plain();
  void fidelity();
  void summarize();

  EngineOptions options(int slots) const {
    EngineOptions o;
    o.slots = slots;
    for (const Item& item : in_.items->items) o.max_tokens = std::max(o.max_tokens, item.most_tokens());
    o.page_size = policy_.page_size;
    o.prefill_chunk = experiment_.prefill_chunk;
    o.budget = policy_.budget;
    o.device_limit = experiment_.device_memory > 0 ? experiment_.device_memory : -1;
    return o;
  }

 private:
  void start_row(Engine& engine, Row& row);
  void take_logits(Row& row, std::span<const float> logits, double ms);
  void finish_item(const Row& row);
  bool next_turn(const Engine& engine, Row& row);
  void record_step(Engine& engine, double ms, const std::array<double, part_count>& parts, bool decode,
                   const std::vector<Row*>& rows);
  void record_kept(const Engine& engine, const Row& row);
  void flatten_kept();
  void warm_up(Engine& engine);
  [[noreturn]] void no_room(const Engine& engine) const {
    throw OutOfMemory{"got a device limit of " + std::to_string(engine.store().options().device_limit) +
                      " bytes, wanted more: " + std::to_string(engine.store().ledger().total(Tier::device)) +
                      " bytes of KV were held"};
  }

  class Selected;

  const CellInput& in_;
  CellResult& out_;
  const Experiment& experiment_;
  const PolicySpec& policy_;
  std::shared_ptr<const Model> model_;
  int vocab_;
  bool timed_, traced_;
  std::vector<float> logits_;
  std::vector<std::vector<std::vector<std::int32_t>>> kept_;  // by item, then layer and KV head
  std::map<int, std::vector<std::byte>> contexts_;            // sample -> cache after its context
  std::map<std::pair<int, int>, std::int64_t> moved_;
  double device_bytes_ = 0, full_bytes_ = 0;
  std::int64_t decode_steps_ = 0;
  double decode_ms_ = 0;
  std::int64_t decode_tokens_ = 0;
  std::vector<std::vector<int>> outputs_;  // by item
  double nll_ = 0, nll_tokens_ = 0;
  int passes_done_ = 0;
};

// Records which pages attention read, when a trace is asked for.
class CellRun::Selected final : public EngineObserver {
 public:
  Selected(CellResult& out, const std::vector<Row*>& rows) : out_(out), rows_(rows) {}
  void attended(const DecodeLayer& l, const Store& store) override {
    if (!l.pages) return;
    auto& t = out_.trace;
    for (std::size_t r = 0; r < rows_.size(); ++r)
      for (int head = 0; head < store.shape().kv_heads; ++head) {
        results::TraceEvent e;
        e.sample = rows_[r]->number;
        e.token = static_cast<std::int32_t>(rows_[r]->output.size());
        e.layer = l.layer;
        e.kv_head = head;
        e.begin = static_cast<std::int64_t>(t.selected.size());
        e.count = l.pages->count(static_cast<std::int64_t>(r), head);
        for (int i = 0; i < e.count; ++i) t.selected.push_back(l.pages->index(static_cast<std::int64_t>(r), head, i));
        t.events.push_back(e);
      }
  }

 private:
  CellResult& out_;
  const std::vector<Row*>& rows_;
};

void CellRun::record_kept(const Engine& engine, const Row& row) {
  const Shape& s = engine.store().shape();
  auto& kept = kept_[static_cast<std::size_t>(row.number)];
  for (int layer = 0; layer < s.layers; ++layer)
    for (int head = 0; head < s.kv_heads; ++head) kept.push_back(engine.store().positions(layer, row.slot, head));
}

void CellRun::flatten_kept() {
  auto& t = out_.trace;
  for (const auto& item : kept_) {
    t.layers = model_->config.layers;
    t.kv_heads = model_->config.kv_heads;
    ++t.samples;
    for (const auto& kept : item) {
      t.kept_offsets.push_back(static_cast<std::int64_t>(t.kept.size()));
      t.kept.insert(t.kept.end(), kept.begin(), kept.end());
      t.kept_offsets.push_back(static_cast<std::int64_t>(t.kept.size()));
    }
  }
}

void CellRun::record_step(Engine& engine, double ms, const std::array<double, part_count>& parts, bool decode,
                          const std::vector<Row*>& rows) {
  const std::int64_t step = static_cast<std::int64_t>(out_.step_ms.size());
  out_.step_ms.push_back(static_cast<float>(ms));
  for (double seconds : parts) out_.step_parts.push_back(static_cast<float>(seconds * 1000));
  const Ledger& ledger = engine.ledger();
  for (Tier tier : {Tier::device, Tier::host})
    for (int tag = 0; tag < tag_count; ++tag) {
      const std::int64_t held = ledger.held(tier)[static_cast<std::size_t>(tag)],
                         all_moved = ledger.moved(tier)[static_cast<std::size_t>(tag)];
      std::int64_t& before = moved_[{static_cast<int>(tier), tag}];
      if (held == 0 && all_moved == before) continue;
      out_.ledger.push_back(
          {step, tier == Tier::host ? "host" : "device", name_of(static_cast<Tag>(tag)), held, all_moved - before});
      before = all_moved;
    }
  if (!decode) return;
  ++decode_steps_;
  device_bytes_ += static_cast<double>(ledger.total(Tier::device));
  const Shape& s = engine.store().shape();
  for (const Row* row : rows)
    full_bytes_ += static_cast<double>(engine.store().position(row->slot)) * s.layers * s.kv_heads * 2 * s.head_dim *
                   static_cast<double>(size_of(s.dtype));
}

// What the logits after this row's latest token mean: nothing yet, an answer token, or the end.
void CellRun::take_logits(Row& row, std::span<const float> logits, double ms) {
  if (row.fed < row.queue.size()) return;  // the question is still being fed
  if (row.output.empty()) row.ttft = ms_since(row.start);
  row.ms.push_back(static_cast<float>(row.output.empty() ? row.ttft : ms));
  if (row.item->follows) row.ttft = results::not_measured;  // its prompt was there already
  if (!row.forced().empty()) {
    const int token = row.forced()[row.output.size()];
    row.nll += negative_log_likelihood(logits, token);
    row.output.push_back(token);
    if (row.output.size() == row.forced().size()) row.stop = "forced";
    return;
  }
  const int token = argmax(logits);
  row.output.push_back(token);
  if (model_->tokenizer->is_eos(token))
    row.stop = "eos";
  else if (static_cast<int>(row.output.size()) == row.item->max_new)
    row.stop = "length";
}

void CellRun::start_row(Engine& engine, Row& row) {
  row.slot = engine.open();
  row.start = Clock::now();
  row.queue = row.item->fed;
  row.seen = static_cast<std::int64_t>(row.item->prompt.size() + row.item->fed.size());
  PartClock clock;
  const auto logits = View<float, 2>::dense(logits_.data(), {1, vocab_});
  const auto shared = contexts_.find(row.item->sample);
  const bool restored = row.item->shared && shared != contexts_.end();
  if (restored) {
    if (engine.restore(row.slot, shared->second) != Fit::ok) no_room(engine);
  } else {
    if (engine.prefill(row.slot, row.item->prompt, true, logits) != Fit::ok) no_room(engine);
    if (row.item->shared) contexts_[row.item->sample] = engine.save(row.slot);
  }
  const double ms = ms_since(row.start);
  if (traced_) record_kept(engine, row);
  if (!restored) record_step(engine, ms, clock.take(), false, {});
  take_logits(row, {logits_.data(), static_cast<std::size_t>(vocab_)}, ms);
  if (restored) row.ttft = results::not_measured;
}

// The question after this answer, when the conversation goes on: its answer stays in the cache. The template's end of
// an answer comes with the question; the model's own is not fed.
bool CellRun::next_turn(const Engine& engine, Row& row) {
  const auto& items = in_.items->items;
  const auto next = static_cast<std::size_t>(row.number) + 1;
  if (next == items.size() || !items[next].follows) return false;
  Row turn;
  turn.item = &items[next];
  turn.number = static_cast<int>(next);
  turn.slot = row.slot;
  turn.start = Clock::now();
  turn.seen = row.seen + static_cast<std::int64_t>(row.output.size() + turn.item->fed.size());
  if (row.stop == "eos")
    --turn.seen;
  else
    turn.queue.push_back(row.output.back());
  turn.queue.insert(turn.queue.end(), turn.item->fed.begin(), turn.item->fed.end());
  row = std::move(turn);
  if (traced_) record_kept(engine, row);
  return true;
}

void CellRun::finish_item(const Row& row) {
  results::SampleRow s;
  s.sample = row.number;
  s.prompt_sha256 = row.item->sha256;
  s.prompt_tokens = row.seen;
  std::vector<int> text = row.output;
  if (row.stop == "eos") text.pop_back();
  s.output = model_->tokenizer->decode(text);
  s.output_tokens = static_cast<std::int64_t>(row.output.size());
  s.stop = row.stop;
  if (timed_) s.ttft_ms = row.ttft;
  if (row.forced().empty()) {
    s.score = score(in_.items->metric, s.output, row.item->references);
  } else {
    s.score = std::exp(row.nll / static_cast<double>(row.forced().size()));
    nll_ += row.nll;
    nll_tokens_ += static_cast<double>(row.forced().size());
  }
  out_.samples[static_cast<std::size_t>(row.number)] = s;
  outputs_[static_cast<std::size_t>(row.number)] = row.output;
}

// First calls pay for page faults, thread start and primitive creation; they are not what is timed.
void CellRun::warm_up(Engine& engine) {
  const int slot = engine.open();
  const auto& prompt = in_.items->items[0].prompt;
  const std::size_t n = std::min<std::size_t>(prompt.size(), 16);
  engine.prefill(slot, {prompt.data(), n}, true, {});
  for (int i = 0; i < 2 && static_cast<int>(n) + i < engine.store().shape().max_tokens; ++i)
    engine.step({slot}, {prompt.data(), 1}, View<float, 2>::dense(logits_.data(), {1, vocab_}));
  engine.close(slot);
}

void CellRun::plain() {
  const auto& items = in_.items->items;
  std::vector<std::size_t> heads;  // the first items of the conversations
  for (std::size_t i = 0; i < items.size(); ++i)
    if (!items[i].follows) heads.push_back(i);
  const int batch = std::min<int>(std::max(1, experiment_.batch), static_cast<int>(heads.size()));
  Engine engine(model_, build_policy(policy_, *in_.catalog), options(batch));
  logits_.resize(static_cast<std::size_t>(batch) * static_cast<std::size_t>(vocab_));
  out_.samples.resize(items.size());
  outputs_.resize(items.size());
  if (traced_) kept_.resize(items.size());
  for (int p = 0; p < part_count; ++p) out_.parts.push_back(name_of(static_cast<Part>(p)));
  if (timed_) {
    warm_up(engine);
    engine.ledger().reset_peak();
  }
  const std::int64_t fired_before = engine.fired();
  for (int tier = 0; tier < 2; ++tier)
    for (int tag = 0; tag < tag_count; ++tag)
      moved_[{tier, tag}] = engine.ledger().moved(static_cast<Tier>(tier))[static_cast<std::size_t>(tag)];

  std::vector<std::vector<float>> token_ms(items.size());
  for (std::size_t begin = 0; begin < heads.size(); begin += static_cast<std::size_t>(batch)) {
    const std::size_t end = std::min(heads.size(), begin + static_cast<std::size_t>(batch));
    std::vector<Row> rows(end - begin);
    std::vector<Row*> active;
    // Is the row still active? One whose answer ended takes its next question, or leaves.
    const auto goes_on = [&](Row& row) {
      if (row.stop.empty()) return true;
      token_ms[static_cast<std::size_t>(row.number)] = row.ms;
      finish_item(row);
      ++passes_done_;
      if (in_.progress) in_.progress("running", passes_done_, static_cast<int>(items.size()));
      if (next_turn(engine, row)) return true;
      engine.close(row.slot);
      return false;
    };
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i].item = &items[heads[begin + i]];
      rows[i].number = static_cast<int>(heads[begin + i]);
      start_row(engine, rows[i]);
      if (goes_on(rows[i])) active.push_back(&rows[i]);
    }
    std::erase_if(contexts_, [&](const auto& c) { return end >= heads.size() || c.first != items[heads[end]].sample; });
    Selected selected(out_, active);
    if (traced_) engine.observe(&selected);
    std::vector<std::int32_t> slots;
    std::vector<int> tokens;
    while (!active.empty()) {
      slots.clear();
      tokens.clear();
      for (Row* row : active) {
        slots.push_back(row->slot);
        tokens.push_back(row->fed < row->queue.size() ? row->queue[row->fed] : row->output.back());
      }
      const auto start = Clock::now();
      PartClock clock;
      const auto logits = View<float, 2>::dense(logits_.data(), {static_cast<std::int64_t>(active.size()), vocab_});
      if (engine.step(slots, tokens, logits) != Fit::ok) no_room(engine);
      const double ms = ms_since(start);
      record_step(engine, ms, clock.take(), true, active);
      decode_ms_ += ms;
      decode_tokens_ += static_cast<std::int64_t>(active.size());
      for (std::size_t r = 0; r < active.size(); ++r) {
        if (active[r]->fed < active[r]->queue.size()) ++active[r]->fed;
        take_logits(*active[r],
                    {logits_.data() + r * static_cast<std::size_t>(vocab_), static_cast<std::size_t>(vocab_)}, ms);
      }
      std::erase_if(active, [&](Row* row) { return !goes_on(*row); });
    }
    engine.observe(nullptr);
  }

  flatten_kept();
  out_.token_offsets.push_back(0);
  for (auto& ms : token_ms) {
    if (timed_) out_.token_ms.insert(out_.token_ms.end(), ms.begin(), ms.end());
    out_.token_offsets.push_back(out_.token_offsets.back() + static_cast<std::int64_t>(ms.size()));
  }
  auto& s = out_.summary;
  s.device_bytes_peak = engine.ledger().peak(Tier::device);
  s.host_bytes_peak = engine.ledger().peak(Tier::host);
  s.disk_bytes_peak = 0;
  s.fired = engine.fired() - fired_before;
  if (decode_steps_ > 0) {
    s.device_bytes_decode = device_bytes_ / static_cast<double>(decode_steps_);
    s.compression = full_bytes_ / device_bytes_;
  }
  if (!timed_) {
    out_.step_ms.clear();
    out_.step_parts.clear();
    out_.parts.clear();
  }
}

void CellRun::fidelity() {
  const auto& items = in_.items->items;
  Engine engine(model_, build_policy(policy_, *in_.catalog), options(1));
  Shadow shadow(*model_, policy_.page_size, options(1).max_tokens);
  engine.observe(&shadow);
  std::vector<float> mine(static_cast<std::size_t>(vocab_)), full(static_cast<std::size_t>(vocab_));
  const auto view = View<float, 2>::dense(mine.data(), {1, vocab_});
  const int layers = model_->config.layers;
  auto& f = out_.fidelity;
  f.layers = layers;
  f.offsets.push_back(0);
  std::vector<int> history;  // of the conversation after its prompt, with the full cache's answers
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Item item = items[i].follows ? after(items[i], history) : items[i];
    const auto& reference = in_.references->get(model_, item, policy_.page_size, experiment_.fidelity_tokens);
    shadow.reset();
    const int slot = engine.open();
    if (engine.prefill(slot, item.prompt, true, view) != Fit::ok) no_room(engine);
    for (int token : item.fed)
      if (engine.step({slot}, {&token, 1}, view) != Fit::ok) no_room(engine);
    Shadow::Rows rows =
        shadow.take();  // the question's steps do not count, but for the last, which yields the first token
    const std::size_t width = static_cast<std::size_t>(layers);
    const auto last_row = [&](std::vector<float>& from, std::vector<float>& to) {
      if (from.size() >= width)
        to.insert(to.end(), from.end() - layers, from.end());
      else
        to.insert(to.end(), width, std::nanf(""));
    };
    std::vector<double> kl, top1;
    for (std::size_t t = 0; t < reference.tokens.size(); ++t) {
      last_row(rows.mass, f.mass);
      last_row(rows.page_recall, f.page_recall);
      last_row(rows.output_error, f.output_error);
      in_.references->read(reference, static_cast<int>(t), vocab_, full.data());
      kl.push_back(kl_divergence(full, mine));
      top1.push_back(argmax(full) == argmax(mine));
      if (t + 1 == reference.tokens.size()) break;
      if (engine.step({slot}, {&reference.tokens[t], 1}, view) != Fit::ok) no_room(engine);
      rows = shadow.take();
    }
    engine.close(slot);
    history = item.fed;
    history.insert(history.end(), reference.tokens.begin(), reference.tokens.end());
    if (model_->tokenizer->is_eos(history.back())) history.pop_back();
    f.kl.insert(f.kl.end(), kl.begin(), kl.end());
    f.top1.insert(f.top1.end(), top1.begin(), top1.end());
    f.offsets.push_back(static_cast<std::int64_t>(f.kl.size()));
    auto& sample = out_.samples[i];
    sample.kl = mean(kl);
    sample.top1 = mean(top1);
    if (item.forced.empty()) sample.first_divergence = divergence(outputs_[i], reference.tokens);
    if (in_.progress) in_.progress("fidelity", static_cast<int>(i) + 1, static_cast<int>(items.size()));
  }
}

void CellRun::summarize() {
  auto& s = out_.summary;
  std::vector<double> scores, ttft;
  std::int64_t tokens = 0;
  for (const auto& sample : out_.samples) {
    scores.push_back(sample.score);
    tokens += sample.output_tokens;
    if (std::isfinite(sample.ttft_ms)) ttft.push_back(sample.ttft_ms);
  }
  s.samples = static_cast<std::int64_t>(out_.samples.size());
  s.output_tokens = tokens;
  if (experiment_.metrics.count(Metric::score)) {
    s.score = nll_tokens_ > 0 ? std::exp(nll_ / nll_tokens_) : mean(scores);
    const Interval interval = mean_interval(scores);
    s.score_lo = interval.low;
    s.score_hi = interval.high;
  }
  const auto mean_of = [](const std::vector<float>& v) { return mean(std::vector<double>(v.begin(), v.end())); };
  s.kl = mean_of(out_.fidelity.kl);
  s.top1 = mean_of(out_.fidelity.top1);
  s.mass = mean_of(out_.fidelity.mass);
  if (!timed_) return;
  s.ttft_ms = percentile(ttft, 0.5);
  std::vector<double> tpot;  // answer tokens after each sample's first
  for (std::size_t i = 0; i + 1 < out_.token_offsets.size(); ++i)
    for (std::int64_t t = out_.token_offsets[i] + 1; t < out_.token_offsets[i + 1]; ++t)
      tpot.push_back(out_.token_ms[static_cast<std::size_t>(t)]);
  s.tpot_ms_p50 = percentile(tpot, 0.50);
  s.tpot_ms_p95 = percentile(tpot, 0.95);
  s.tpot_ms_p99 = percentile(tpot, 0.99);
  if (decode_ms_ > 0) s.tokens_per_s = static_cast<double>(decode_tokens_) / (decode_ms_ / 1000);
}

// Columns that are known before anything runs.
void describe(const CellInput& in, CellResult& out) {
  const Experiment& e = *in.experiment;
  const PolicySpec& policy = e.policies[in.cell->policy];
  auto& s = out.summary;
  out.id = s.cell = in.cell->id;
  s.model = in.model->name;
  s.policy = policy.name;
  s.params = in.cell->params;
  s.task = task_label(e.tasks[in.cell->task]);
  s.seed = in.cell->seed;
  s.repeat = in.cell->repeat;
  for (const Item& item : in.items->items)
    s.context_tokens = std::max<std::int64_t>(s.context_tokens, item.most_tokens());
  if (policy.budget.kind == BudgetAmount::tokens) s.budget_tokens = policy.budget.value;
  if (policy.budget.kind == BudgetAmount::ratio)
    s.budget_tokens = policy.budget.value * static_cast<double>(s.context_tokens);
  if (policy.budget.kind == BudgetAmount::bytes) s.budget_bytes = static_cast<std::int64_t>(policy.budget.value);
}

}  // namespace

std::shared_ptr<Policy> build_policy(const PolicySpec& spec, const PluginCatalog& catalog) {
  if (spec.policy) return make<Policy>(spec.policy, catalog);
  Composition parts;
  parts.scorer = make<Scorer>(spec.scorer, catalog);
  parts.split = make<Budget>(spec.split, catalog);
  parts.selector = make<Selector>(spec.selector, catalog);
  parts.codec = make<Codec>(spec.codec, catalog);
  parts.host_codec = make<Codec>(spec.placement.codec, catalog);
  parts.compress_prompt = spec.schedule.prefill;
  parts.every = spec.schedule.every;
  parts.host = spec.placement.tier == Tier::host;
  parts.resident_tokens = spec.placement.resident;
  parts.name = spec.name;
  return compose(std::move(parts));
}

void check_cell(const CellInput& in) {
  CellResult nothing;
  const CellRun run(in, nothing);
  const Engine engine(in.model, build_policy(in.experiment->policies[in.cell->policy], *in.catalog), run.options(1));
}

CellResult run_cell(const CellInput& in) {
  CellResult out;
  describe(in, out);
  try {
    CellRun run(in, out);
    run.plain();
    if (in.experiment->metrics.count(Metric::fidelity)) run.fidelity();
    run.summarize();
    return out;
  } catch (const OutOfMemory& e) {
    out.summary.status = "oom";
    out.summary.error = e.what;
  } catch (const std::bad_alloc&) {
    out.summary.status = "oom";
    out.summary.error = "the operating system refused memory";
  } catch (const std::exception& e) {
    out.summary.status = "failed";
    out.summary.error = e.what();
  }
  // Half of a cell is no result: what was measured before it broke is not kept.
  CellResult broken;
  describe(in, broken);
  broken.summary.status = out.summary.status;
  broken.summary.error = out.summary.error;
  return broken;
}

}  // namespace kvlab
