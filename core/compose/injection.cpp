#include "compose/injection.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "compose/forwarding.hpp"

namespace kvlab {

Injector::Injector(Injection injection, const Shape& shape, Workspace& w)
    : injection_(std::move(injection)), shape_(shape), words_(ops::inject_words(shape.max_pages())) {
  const auto bytes = static_cast<std::size_t>(words_) * sizeof(std::uint32_t) * static_cast<std::size_t>(shape.layers) *
                     static_cast<std::size_t>(shape.kv_heads);
  if (injection_.lists()) state_ = static_cast<std::uint32_t*>(w.state("injected pages", bytes, shape.max_slots));
  if (injection_.correction)
    calls_ = static_cast<std::uint32_t*>(
        w.state("injected turns", static_cast<std::size_t>(shape.layers) * sizeof(std::uint32_t), shape.max_slots));
  sequence_ = static_cast<std::uint32_t*>(w.state("injected sequence", sizeof(std::uint32_t), shape.max_slots));
}

namespace {

// Index of the recorded layer that a layer follows: its own if that was recorded, else one by the layer's number.
int layer_of(const std::vector<int>& recorded, int layer) {
  const auto own = std::lower_bound(recorded.begin(), recorded.end(), layer);
  if (own != recorded.end() && *own == layer) return static_cast<int>(own - recorded.begin());
  return layer % static_cast<int>(recorded.size());
}

}  // namespace

void Injector::begin(const LayerPrefill& kv, Stream s) {
  if (kv.layer > 0) return;
  if (injection_.recorded && !recorded_.first) upload(s);
  for (int row = 0; row < kv.rows(); ++row)
    copy_memory(sequence_ + kv.slots[row], kv.sequence + row, sizeof *sequence_, s);
}

void Injector::replace(const LayerStep& step, const PageList& list, const Pins& pins, Stream s) {
  ops::InjectArgs a = lists(step);
  a.pages = step.pages;
  a.list = list;
  a.pins = pins;
  ops::inject_pages(a, s);
}

ops::InjectArgs Injector::lists(const LayerKv& kv) const {
  const std::int64_t layer = shape_.kv_heads * words_;
  ops::InjectArgs a;
  a.state = {
      state_ + layer * kv.layer, {shape_.max_slots, shape_.kv_heads, words_}, {layer * shape_.layers, words_, 1}};
  a.sequence = sequence_;
  a.question = kv.question;
  a.layer = kv.layer;
  a.seed = injection_.seed;
  a.overlap = injection_.overlap.value_or(0);
  a.rerank_overlap = injection_.rerank_overlap.value_or(0);
  a.recorded = recorded_;
  if (injection_.recorded) a.recorded.layer = layer_of(injection_.recorded->layers, kv.layer);
  return a;
}

ops::InjectedTurns Injector::turns(const LayerKv& kv) const {
  ops::InjectedTurns t;
  t.share = injection_.correction.value_or(0);
  t.sequence = sequence_;
  t.calls = {calls_ + kv.layer, {shape_.max_slots}, {shape_.layers}};
  t.layer = kv.layer;
  t.seed = injection_.seed;
  return t;
}

ops::InjectedDrift Injector::drift(const LayerKv& kv) const {
  return {injection_.drift.value_or(0), sequence_, kv.layer, injection_.seed};
}

// Scales recorded page numbers to a sequence's room. The whole run has one factor, so shared pages of two lists stay
// shared.
void Injector::upload(Stream s) {
  const RecordedTrace& r = *injection_.recorded;
  std::vector<std::int32_t> page;
  page.reserve(r.page.size());
  for (const std::int32_t p : r.page)
    page.push_back(static_cast<std::int32_t>(std::int64_t{p} * shape_.max_pages() / r.pages));
  const auto put = [&](StreamMemory& to, const auto& from) {
    to = StreamMemory(s, from.size() * sizeof from[0]);
    copy_memory(to.as<>(), from.data(), to.bytes(), s);
  };
  std::vector<std::int32_t> first, steps;
  for (const std::int32_t question : injection_.follows) {
    first.push_back(r.questions[static_cast<std::size_t>(question)].first);
    steps.push_back(r.questions[static_cast<std::size_t>(question)].steps);
  }
  put(first_, first), put(steps_, steps), put(begin_, r.begin), put(page_, page);
  synchronize(s);
  recorded_.first = first_.as<std::int32_t>(), recorded_.steps = steps_.as<std::int32_t>();
  recorded_.begin = begin_.as<std::int64_t>(), recorded_.page = page_.as<std::int32_t>();
  recorded_.questions = static_cast<int>(first.size());
  recorded_.layers = static_cast<int>(r.layers.size()), recorded_.heads = r.heads;
}

namespace {

// Points PagedKv::injected of every callback to what replaces the policy's choices.
class InjectedPolicy final : public ForwardingPolicy {
 public:
  InjectedPolicy(std::shared_ptr<Policy> policy, std::string name, Injection injection)
      : ForwardingPolicy(std::move(policy)), name_(std::move(name)), injection_(std::move(injection)) {}

  Needs needs() const override {
    Needs n = inner().needs();
    return injection_.recorded || injection_.rerank_overlap ? n.steps(true) : n;
  }
  void attach(const Shape& shape, const BudgetAmount& budget, Workspace& w) override {
    inner().attach(shape, budget, w);
    injector_.emplace(injection_, shape, w);
  }
  void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
    injector_->begin(kv, s);
    inner().prefill(with_injection(kv, nullptr), edits, s);
  }
  void select(const LayerStep& step, Edits& edits, Stream s) override {
    inner().select(with_injection(step, step.steps), edits, s);
  }
  void observe(const LayerStep& step, Edits& edits, Stream s) override {
    inner().observe(with_injection(step, step.steps), edits, s);
  }
  void finish_step(const Step& step, Edits& edits, Stream s) override {
    if (!checked_) check();
    inner().finish_step(step, edits, s);
  }

 private:
  // steps: of the device; null = a prompt.
  template <class Kv>
  Kv with_injection(const Kv& kv, const std::int32_t* steps) {
    injected_ = {.used = &used_};
    if (injection_.overlap || (injection_.recorded && steps)) {
      lists_ = injector_->lists(kv);
      if (injection_.recorded) lists_.steps = steps;
      if (injection_.rerank_overlap) lists_.clock = steps;
      injected_.lists = &lists_;
    }
    if (injection_.correction) {
      turns_ = injector_->turns(kv);
      injected_.turns = &turns_;
    }
    if (injection_.drift) {
      drift_ = injector_->drift(kv);
      injected_.drift = &drift_;
    }
    Kv with = kv;
    with.pages.injected = &injected_;
    return with;
  }

  // A policy has called in its first decode step what it ever calls.
  void check() {
    checked_ = true;
    std::string keys, ops;
    const auto add = [](std::string& to, const char* between, const std::string& name) {
      to += (to.empty() ? "" : between) + name;
    };
    const auto look = [&](bool injects, bool used, const std::string& key, const char* op) {
      if (injects && !used) add(keys, " and ", key), add(ops, " and no ", op);
    };
    const std::string lists = injection_.recorded         ? "trace"
                              : injection_.rerank_overlap ? "overlap and rerank_overlap"
                                                          : "overlap";
    look(injection_.lists(), used_.lists, lists, "ops::score_pages");
    look(injection_.correction.has_value(), used_.turns, "correction", "ops::turned_heads");
    look(injection_.drift.has_value(), used_.drift, "drift", "ops::drifted_by_logits");
    if (!used_.lists && !used_.turns && !used_.drift)
      throw Error(Errc::config,
                  "got inject with policy '" + name_ + "', whose decode step called no " + ops +
                      ", wanted one that does: inject replaces what these ops find",
                  injection_.where);
    if (!keys.empty())
      log::warn("got inject of " + keys + " with policy '" + name_ + "', whose decode step called no " + ops +
                ", wanted one that does: these keys change nothing in it");
  }

  std::string name_;
  Injection injection_;
  std::optional<Injector> injector_;
  ops::InjectArgs lists_;
  ops::InjectedTurns turns_;
  ops::InjectedDrift drift_;
  ops::Injected injected_;
  ops::InjectedUse used_;
  bool checked_ = false;
};

}  // namespace

std::unique_ptr<Policy> injected(std::shared_ptr<Policy> policy, const std::string& name, Injection injection) {
  return std::make_unique<InjectedPolicy>(std::move(policy), name, std::move(injection));
}

}  // namespace kvlab
