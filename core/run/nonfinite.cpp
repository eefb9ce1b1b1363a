#include "run/nonfinite.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <exception>
#include <optional>
#include <vector>

namespace kvlab {
namespace {

// Counts the numbers of a call's layers that are not finite, and remembers where the first ones were.
class Watch final : public EngineObserver {
 public:
  void prompt(const PromptLayer& l, const Store& store) override {
    look(l.layer, store.position(l.slot), l);
    if (l.mass) {  // the mass of all tokens together
      const int last = store.position(l.slot) + static_cast<int>(l.keys.extent[0]) - 1;
      add(l.layer, last, l.mass.data, l.mass.extent[0], l.mass.extent[1], mass, 0);
    }
  }
  void attended(const DecodeLayer& l, const Store& store) override {
    const int position = store.position((*l.slots)[0]);
    look(l.layer, position, l);
    if (l.mass) add(l.layer, position, l.mass.data, l.mass.extent[1], l.mass.extent[2], mass, 0);
  }

  void begin() { *this = Watch(); }
  void logits(const std::vector<float>& row) {
    logits_ = count_nonfinite(row.data(), static_cast<std::int64_t>(row.size()));
    count_ += logits_;
  }
  std::int64_t count() const { return count_; }
  // E.g. "3 of the queries, 2 of the keys in layer 4", for the latest call.
  std::string what(int layers) const {
    if (layer_ < 0) return fmt::format("{} logits behind layer {}", logits_, layers - 1);
    std::vector<std::string> parts;
    for (std::size_t i = 0; i < first_.size(); ++i)
      if (first_[i] > 0) parts.push_back(fmt::format("{} of the {}", first_[i], names[i]));
    return fmt::format("{} in layer {}", fmt::join(parts, ", "), layer_);
  }
  // The text position of the first such token; -1 = only logits. Queries, keys and values come first: a prompt's
  // outputs may be NaN at tokens before the entry that caused it.
  int position() const {
    for (const auto& kinds : {std::array{queries, keys, values}, std::array{mass, output, output}}) {
      int first = -1;
      for (const What what : kinds)
        if (first_[what] > 0 && (first < 0 || at_[what] < first)) first = at_[what];
      if (first >= 0) return first;
    }
    return -1;
  }

 private:
  enum What : std::uint8_t { queries, keys, values, mass, output };
  static constexpr std::array<const char*, 5> names = {"queries", "keys", "values", "attention mass",
                                                       "attention output"};

  template <class Layer>
  void look(int layer, int position, const Layer& l) {
    rows(layer, position, l.queries, queries);
    rows(layer, position, l.keys, keys);
    rows(layer, position, l.values, values);
    rows(layer, position, l.output, output);
  }
  void rows(int layer, int position, const View<const float, 3>& v, What what) {
    if (v) add(layer, position, v.data, v.extent[0], v.extent[1] * v.extent[2], what, 1);
  }
  // each: positions from one row to the next.
  void add(int layer, int position, const float* data, std::int64_t rows, std::int64_t width, What what, int each) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t found = count_nonfinite(data + r * width, width);
      if (found == 0) continue;
      count_ += found;
      if (layer_ < 0) layer_ = layer;
      if (layer_ != layer) continue;
      if (first_[what] == 0) at_[what] = position + each * static_cast<int>(r);
      first_[what] += found;
    }
  }

  std::array<std::int64_t, 5> first_{};  // counts in layer_
  std::array<int, 5> at_{};              // text position of the first one
  std::int64_t count_ = 0, logits_ = 0;
  int layer_ = -1;
};

// Feeds the row's tokens again, call by call. Returns the error of the call whose numbers are not finite again.
std::optional<NonFinite> replay(const std::shared_ptr<const Model>& model, std::shared_ptr<Policy> policy,
                                const EngineOptions& options, const NonFiniteStep::Row& row) {
  Engine engine(model, std::move(policy), options);
  Watch watch;
  engine.observe(&watch);
  std::vector<float> logits(static_cast<std::size_t>(model->config.vocab));
  const auto view = View<float, 2>::dense(logits.data(), {1, model->config.vocab});
  const int slot = engine.open(row.sequence);
  engine.ask(slot, row.question);
  int position = 0, prompt = 0;  // tokens before the call; of the prompt
  try {
    for (const Given& g : row.given) {
      if (g.prompt) {
        watch.begin();
        prompt = position + static_cast<int>(g.tokens.size());
        if (engine.prefill(slot, g.tokens, g.end, view) != Fit::ok) return std::nullopt;
        position = prompt;
        continue;
      }
      for (const int token : g.tokens) {
        watch.begin();
        if (engine.step({slot}, {&token, 1}, view) != Fit::ok) return std::nullopt;
        ++position;
      }
    }
  } catch (const NonFiniteStep&) {
    watch.logits(logits);
    const int at = watch.position() >= 0 ? watch.position() : position < prompt ? prompt - 1 : position;
    const std::string step = at < prompt ? "of the prompt" : fmt::format("of decode step {}", at - prompt);
    return NonFinite(watch.count(),
                     Error(Errc::model,
                           fmt::format("got {} numbers that are not finite, the first of them {}; wanted none",
                                       watch.count(), watch.what(model->config.layers)),
                           fmt::format("sample {}, token {} ({})", row.question, at, step)));
  }
  return std::nullopt;
}

}  // namespace

NonFinite located(const std::shared_ptr<const Model>& model, const std::function<std::shared_ptr<Policy>()>& policy,
                  EngineOptions options, const NonFiniteStep& seen) {
  options.slots = 1;
  try {
    for (const auto& row : seen.rows())
      if (const auto found = replay(model, policy(), options, row)) return *found;
  } catch (const std::exception&) {  // `seen` is the error to report
  }
  return seen;
}

void want_finite(double value, const std::string& what, std::int64_t sample) {
  if (std::isfinite(value)) return;
  throw NonFinite(1, Error(Errc::data, fmt::format("got {} of {}, wanted a finite number", what, value),
                           fmt::format("sample {}", sample)));
}

}  // namespace kvlab
