#include "run/fidelity.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include "base/sha256.hpp"
#include "run/answer.hpp"
#include "run/averages.hpp"
#include "run/device.hpp"
#include "run/nonfinite.hpp"
#include "run/sampling.hpp"
#include "run/shadow.hpp"

namespace kvlab {
namespace {

// First token at which two answers part; -1 = not within the shorter one.
std::int64_t divergence(const std::vector<int>& a, const std::vector<int>& b) {
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    if (a[i] != b[i]) return static_cast<std::int64_t>(i);
  return -1;
}

// Makes a later turn a question of its own, which also feeds the conversation before it.
Item after(Item item, const std::vector<int>& history) {
  item.sha256 += "/" + sha256_hex({reinterpret_cast<const char*>(history.data()), history.size() * sizeof(int)});
  item.fed.insert(item.fed.begin(), history.begin(), history.end());
  item.before = 0;
  return item;
}

// Appends the values of the latest step's layers; NaN when there was no step.
void add_last(const std::vector<float>& steps, std::size_t layers, std::vector<float>& out) {
  if (steps.size() >= layers)
    out.insert(out.end(), steps.end() - static_cast<std::ptrdiff_t>(layers), steps.end());
  else
    out.insert(out.end(), layers, std::nanf(""));
}

// A question on its way through the policy.
struct Row {
  std::size_t number = 0;  // of the item
  Item item;
  std::vector<Sequence::Asked> asked;
  const ReferenceCache::Entry* reference = nullptr;
  int slot = -1;
  std::size_t fed = 0;  // tokens of the question
  std::vector<double> kl, top1;
  Shadow::Rows layers;  // [answer token, layer]

  std::size_t compared() const { return kl.size(); }
  bool asks() const { return fed < item.fed.size(); }
  bool ended() const { return !asks() && compared() == reference->tokens.size(); }
  int next() const { return asks() ? item.fed[fed] : reference->tokens[compared() - 1]; }
};

class FidelityPass {
 public:
  FidelityPass(const CellInput& in, const std::vector<std::vector<int>>& outputs, results::CellResult& out)
      : in_(in),
        outputs_(outputs),
        out_(out),
        items_(in.items->items),
        options_(options(in)),
        engine_(in.model, cell_policy(in), options_),
        shadow_(*in.model, options_.page_size, engine_.store().shape().max_tokens,
                {.beside = &engine_.store(), .slots = options_.slots}),
        vocab_(static_cast<std::size_t>(in.model->config.vocab)),
        layers_(static_cast<std::size_t>(in.model->config.layers)),
        logits_(vocab_ * static_cast<std::size_t>(options_.slots)),
        full_(logits_.size()) {
    engine_.observe(&shadow_);
    out_.fidelity.layers = in.model->config.layers;
    out_.fidelity.offsets.push_back(0);
  }

  ~FidelityPass() { in_.references->release(); }
  FidelityPass(const FidelityPass&) = delete;
  FidelityPass& operator=(const FidelityPass&) = delete;

  void run() {
    std::vector<std::size_t> numbers;  // the full cache's answer is the same for all draws of a question
    for (std::size_t i = 0; i < items_.size(); ++i)
      if (items_[i].draw <= 0) numbers.push_back(i);
    compared_ = numbers.size();
    const auto rows = static_cast<std::size_t>(options_.slots);
    for (std::span<const std::size_t> left = numbers; !left.empty();) {
      const std::size_t n = std::min(left.size(), rows);
      run_batch(left.first(n));
      left = left.subspan(n);
    }
  }

 private:
  // Rows of a GPU run beside each other, and with the bits of one alone: the full cache's logits are of single rows.
  static EngineOptions options(const CellInput& in) {
    const bool gpu = device_of(*in.experiment) == Device::cuda;
    int slots = 1;
    if (gpu) {
      const auto conversations = std::ranges::count_if(
          in.items->items, [](const Item& item) { return !item.follows && item.draw <= 0; });  // as in the plain pass
      const int want = std::min(in.experiment->batch, static_cast<int>(conversations));
      slots = Shadow::most_slots(*in.model, in.policy().page_size, engine_options(in, 1).max_tokens, want);
    }
    EngineOptions o = limited_options(in, slots);
    o.batch_invariant |= gpu;
    return o;
  }

  void run_batch(std::span<const std::size_t> numbers) {
    std::vector<Row> rows;
    std::set<int> samples;
    for (const std::size_t number : numbers) {
      rows.push_back(make_row(number));
      samples.insert(rows.back().item.sample);
    }
    if (in_.full_runs) in_.full_runs->prepare(in_, samples, in_.experiment->fidelity_tokens);
    std::vector<Row*> active;
    for (Row& row : rows) {
      start(row);
      active.push_back(&row);
    }
    const auto leave = [&](Row* row) {
      if (!row->ended()) return false;
      engine_.close(row->slot);
      if (in_.progress) in_.progress("fidelity", static_cast<int>(++ended_), static_cast<int>(compared_));
      return true;
    };
    for (std::erase_if(active, leave); !active.empty(); std::erase_if(active, leave)) step(active);
    for (const Row& row : rows) note(row);
  }

  // A later turn also feeds the conversation before it, with the full cache's answers.
  Row make_row(std::size_t i) {
    Row row{.number = i, .item = items_[i].follows ? after(items_[i], history_) : items_[i]};
    row.reference =
        &in_.references->get(in_.model, row.item, options_.page_size, in_.experiment->fidelity_tokens, options_.device);
    if (!items_[i].follows) asked_ = {{0, 0}};
    asked_.back().question = static_cast<std::uint32_t>(i);
    row.asked = asked_;
    history_ = row.item.fed;
    history_.insert(history_.end(), row.reference->tokens.begin(), row.reference->tokens.end());
    asked_.push_back({history_.size() - 1, 0});  // the answer's last token is fed with the next turn, if at all
    if (ends_answer(row.item, history_.back(), *in_.model->tokenizer)) history_.pop_back();
    return row;
  }

  // Prefills the prompt, or restores the context that the sample's questions share.
  void start(Row& row) {
    const Item& item = row.item;
    row.slot = engine_.open(static_cast<std::uint32_t>(item.sample));
    shadow_.reset(row.slot);
    shadow_.skip(static_cast<int>(item.fed.size()) - 1, row.slot);  // a question's last step yields the first token
    ask(row);
    if (item.shared && context_ && context_->sample == item.sample) {
      want_room(shadow_.restore(context_->shadow, row.slot), engine_);
      want_room(engine_.restore(row.slot, context_->sequence), engine_);
    } else {
      want_room(engine_.prefill(row.slot, item.prompt, true, logits(1)), engine_);
      context_.reset();
      if (item.shared && !item.fed.empty()) context_ = {item.sample, engine_.save(row.slot), shadow_.save(row.slot)};
    }
    ask(row);
    if (!row.asks()) compare({&row});
  }

  // Names the questions that begin with the row's next token.
  void ask(Row& row) {
    while (!row.asked.empty() && row.asked.front().fed <= row.fed) {
      engine_.ask(row.slot, row.asked.front().question);
      row.asked.erase(row.asked.begin());
    }
  }

  void step(const std::vector<Row*>& active) {
    std::vector<std::int32_t> slots;
    std::vector<int> tokens;
    for (const Row* row : active) {
      slots.push_back(row->slot);
      tokens.push_back(row->next());
    }
    want_room(engine_.step(slots, tokens, logits(active.size())), engine_);
    for (Row* row : active)
      if (row->asks()) {
        ++row->fed;
        ask(*row);
      }
    compare(active);
  }

  // Compares the logits of the rows that answer with the full cache's.
  void compare(const std::vector<Row*>& rows) {
    struct Pair {
      std::span<const float> full, ours;
      double kl = 0, top1 = 0;
    };
    std::vector<Pair> pairs(rows.size());
    for (std::size_t r = 0; r < rows.size(); ++r) {
      Row& row = *rows[r];
      const Shadow::Rows layers = shadow_.take(row.slot);
      if (row.asks()) continue;
      if (layers.nonfinite > 0)
        throw NonFinite(
            layers.nonfinite,
            Error(Errc::model,
                  "got " + std::to_string(layers.nonfinite) +
                      " numbers of attention over all tokens that are not finite, the first of them in layer " +
                      std::to_string(layers.layer) + "; wanted none",
                  "sample " + std::to_string(row.number) + ", answer token " + std::to_string(row.compared())));
      add_last(layers.mass, layers_, row.layers.mass);
      add_last(layers.page_recall, layers_, row.layers.page_recall);
      add_last(layers.output_error, layers_, row.layers.output_error);
      float* const full = full_.data() + r * vocab_;
      in_.references->read(*row.reference, static_cast<int>(row.compared()), in_.model->config.vocab, full);
      pairs[r].full = {full, vocab_}, pairs[r].ours = {logits_.data() + r * vocab_, vocab_};
    }
#pragma omp parallel for schedule(dynamic)
    for (std::size_t r = 0; r < pairs.size(); ++r) {
      if (pairs[r].full.empty()) continue;
      pairs[r].kl = kl_divergence(pairs[r].full, pairs[r].ours);
      pairs[r].top1 = top1_agreement(pairs[r].full, pairs[r].ours);
    }
    for (std::size_t r = 0; r < pairs.size(); ++r) {
      if (pairs[r].full.empty()) continue;
      want_finite(pairs[r].kl, "a KL divergence", static_cast<std::int64_t>(rows[r]->number));
      rows[r]->kl.push_back(pairs[r].kl);
      rows[r]->top1.push_back(pairs[r].top1);
    }
  }

  void note(const Row& row) {
    auto& f = out_.fidelity;
    const auto add = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
    add(f.kl, row.kl), add(f.top1, row.top1);
    add(f.mass, row.layers.mass), add(f.page_recall, row.layers.page_recall);
    add(f.output_error, row.layers.output_error);
    std::size_t next = row.number;
    do f.offsets.push_back(static_cast<std::int64_t>(f.kl.size()));
    while (++next < items_.size() && items_[next].draw > 0);  // other draws have no figures of their own
    auto& sample = out_.samples[row.number];
    sample.kl = mean(row.kl);
    sample.top1 = mean(row.top1);
    if (row.item.forced.empty() && !in_.experiment->sampling.on())
      sample.first_divergence = divergence(outputs_[row.number], row.reference->tokens);
  }

  View<float, 2> logits(std::size_t rows) {
    return View<float, 2>::dense(logits_.data(), {static_cast<std::int64_t>(rows), static_cast<std::int64_t>(vocab_)});
  }

  // The context that the questions of a sample share, as its prompt left it.
  struct Context {
    int sample = 0;
    SavedSequence sequence;
    std::vector<std::byte> shadow;
  };

  const CellInput& in_;
  const std::vector<std::vector<int>>& outputs_;
  results::CellResult& out_;
  const std::vector<Item>& items_;
  EngineOptions options_;
  Engine engine_;
  Shadow shadow_;
  std::size_t vocab_, layers_, compared_ = 0, ended_ = 0;
  std::vector<float> logits_, full_;    // [row, vocab]
  std::vector<int> history_;            // the conversation after its prompt, with the full cache's answers
  std::vector<Sequence::Asked> asked_;  // of the conversation
  std::optional<Context> context_;
};

}  // namespace

void measure_fidelity(const CellInput& in, const std::vector<std::vector<int>>& outputs, results::CellResult& out) {
  FidelityPass(in, outputs, out).run();
}

}  // namespace kvlab
