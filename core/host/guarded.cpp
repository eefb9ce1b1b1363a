// Plugins' objects as the host calls them: each call goes through Callee::call, and numbers that no contract allows are
// refused where they enter (Errc::plugin).

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "host/callback.hpp"
#include "host/edits_author.hpp"
#include "host/loader.hpp"
#include "ops/paged.hpp"

namespace kvlab {
namespace {

template <class Interface>
class Guard : public Interface {
 public:
  Guard(const PluginInfo& plugin, Instance<Interface> object)
      : who_(plugin.name, plugin.library), object_(std::move(object)) {}
  ~Guard() override {
    who_.call("destructor", [&] { object_.reset(); });
  }

 protected:
  // The object's answer to a callback of this name.
  template <class Body>
  decltype(auto) ask(const char* callback, Body body) const {
    return who_.call(callback, [&]() -> decltype(auto) { return body(*object_); });
  }

  Needs checked(Needs n) const {
    for (const auto& [what, count] : {std::pair{"window_queries", n.window_queries()},
                                      {"dense_layers", n.dense_layers()},
                                      {"min_pages", n.min_pages()}})
      if (count < 0) who_.refuse("needs", fmt::format("got {} {}, wanted 0 or more", what, count));
    return n;
  }

  Pins checked(const char* callback, const Pins& p) const {
    const std::int64_t both = std::int64_t{p.first} + p.last;
    if (p.first < 0 || p.last < 0 || both > std::numeric_limits<int>::max())
      who_.refuse(callback, fmt::format("got pins of the first {} and the last {} tokens, wanted none below 0 and "
                                        "at most {} together",
                                        p.first, p.last, std::numeric_limits<int>::max()));
    return p;
  }

  Callee who_;
  Instance<Interface> object_;
};

// The first NaN among the scores of the cached tokens, as a message; empty when there is none.
std::string nan_among(const LayerKv& kv, const Scores& scores) {
  for (int row = 0; row < kv.rows(); ++row)
    for (int head = 0; head < kv.kv_heads(); ++head) {
      const int n = kv.pages.tokens(row, head);
      if (n == 0) continue;
      const float* s = &scores(row, head, 0);
      int bad = 0;
      for (int t = 0; t < n; ++t) bad += s[t] != s[t];
      if (bad == 0) continue;
      int first = 0;
      while (s[first] == s[first]) ++first;
      std::vector<std::int32_t> position(static_cast<std::size_t>(n));
      ops::token_positions(kv.pages, row, head, n, position.data());
      return fmt::format(
          "got NaN as the score of the token at position {} (layer {}, KV head {}, {} of its {} tokens), "
          "wanted numbers; -inf and inf rank below and above all others",
          position[static_cast<std::size_t>(first)], kv.layer, head, bad, n);
    }
  return {};
}

class GuardedScorer final : public Guard<Scorer>, public EditsAuthor {
 public:
  using Guard::Guard;
  std::string author() const override { return who_.where("score"); }
  Needs needs() const override {
    return checked(ask("needs", [](Scorer& s) { return s.needs(); }));
  }
  Pins pins(int tokens) const override {
    return checked("pins", ask("pins", [&](Scorer& s) { return s.pins(tokens); }));
  }
  void score(const LayerKv& kv, Scores out, Stream stream) override {
    ask("score", [&](Scorer& s) { s.score(kv, out, stream); });
    if (stream.device() != Device::cpu) return;
    if (const std::string wrong = nan_among(kv, out); !wrong.empty()) who_.refuse("score", wrong);
  }
  void observe(const LayerKv& kv, Stream stream) override {
    ask("observe", [&](Scorer& s) { s.observe(kv, stream); });
  }
  int every() const override {
    const int steps = ask("every", [](Scorer& s) { return s.every(); });
    if (steps < 0)
      who_.refuse("every",
                  fmt::format("got {} decode steps between evictions, wanted 0 (the prompt only) or more", steps));
    return steps;
  }
};

class GuardedBudget final : public Guard<Budget> {
 public:
  using Guard::Guard;
  void allot(const Allotment& a, Stream stream) override {
    ask("allot", [&](Budget& b) { b.allot(a, stream); });
    if (stream.device() == Device::cpu && a.keep.data) check(a);
  }

 private:
  void check(const Allotment& a) {
    const std::int64_t rows = a.keep.extent[0], heads = a.keep.extent[1];
    if (a.layer == 0) kept_.assign(static_cast<std::size_t>(rows), 0);
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int32_t keep = a.keep(r, h), length = a.length(r, h);
        if (keep < 0 || keep > length)
          who_.refuse("allot",
                      fmt::format("got {} tokens to keep in layer {}, KV head {}, wanted 0 to {}, which it holds", keep,
                                  a.layer, h, length));
        if (static_cast<std::size_t>(r) < kept_.size()) kept_[static_cast<std::size_t>(r)] += keep;
      }
    if (a.layer + 1 < a.layers || kept_.size() != static_cast<std::size_t>(rows)) return;
    for (std::int64_t r = 0; r < rows; ++r) {
      // A head may be short of nothing but a whole token, and pins may lie above a head's share.
      const Pins pins = a.host_pins ? a.host_pins[r] : Pins{};
      const std::int64_t places = heads * a.layers, total = a.host_total[r];
      const std::int64_t most = places * (total + 1 + pins.first + pins.last),
                         kept = kept_[static_cast<std::size_t>(r)];
      if (kept > most)
        who_.refuse("allot", fmt::format("got {} tokens to keep over all layers and KV heads, wanted about {}: {} each",
                                         kept, places * total, total));
    }
  }

  std::vector<std::int64_t> kept_;  // [row] of the layers so far
};

class GuardedSelector final : public Guard<Selector>, public EditsAuthor {
 public:
  using Guard::Guard;
  std::string author() const override { return who_.where("select"); }
  Needs needs() const override {
    return checked(ask("needs", [](Selector& s) { return s.needs(); }));
  }
  void select(const LayerStep& step, PageList out, Stream stream) override {
    ask("select", [&](Selector& s) { s.select(step, out, stream); });
  }
  Pins pins() const override {
    return checked("pins", ask("pins", [](Selector& s) { return s.pins(); }));
  }
};

class GuardedCodec final : public Guard<Codec> {
 public:
  using Guard::Guard;
  CodecSpec spec() const override {
    return ask("spec", [](Codec& c) { return c.spec(); });
  }
};

class GuardedPolicy final : public Guard<Policy>, public EditsAuthor {
 public:
  using Guard::Guard;
  std::string author() const override { return who_.where(latest_); }
  Needs needs() const override {
    return checked(ask("needs", [](Policy& p) { return p.needs(); }));
  }
  Demand demand(int prompt, int most) const override {
    return ask("demand", [&](Policy& p) { return p.demand(prompt, most); });
  }
  CodecSpec codec() const override {
    return ask("codec", [](Policy& p) { return p.codec(); });
  }
  CodecSpec host_codec() const override {
    return ask("host_codec", [](Policy& p) { return p.host_codec(); });
  }
  void attach(const Shape& shape, const BudgetAmount& amount, Workspace& w) override {
    ask("attach", [&](Policy& p) { p.attach(shape, amount, w); });
  }
  void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
    edit("prefill", edits, [&](Policy& p) { p.prefill(kv, edits, s); });
  }
  void select(const LayerStep& step, Edits& edits, Stream s) override {
    edit("select", edits, [&](Policy& p) { p.select(step, edits, s); });
  }
  void observe(const LayerStep& step, Edits& edits, Stream s) override {
    edit("observe", edits, [&](Policy& p) { p.observe(step, edits, s); });
  }
  void finish_step(const Step& step, Edits& edits, Stream s) override {
    edit("finish_step", edits, [&](Policy& p) { p.finish_step(step, edits, s); });
  }
  void release(int slot) override {
    ask("release", [&](Policy& p) { p.release(slot); });
  }

 private:
  template <class Body>
  void edit(const char* callback, const Edits& edits, Body body) {
    ask(callback, body);
    if (edits.all().empty()) return;
    latest_ = callback;
    for (const Edit& e : edits.all()) checked(callback, e.pins);
  }

  const char* latest_ = "edits";
};

class GuardedProfiler final : public Guard<Profiler> {
 public:
  using Guard::Guard;
  Needs needs() const override {
    return checked(ask("needs", [](Profiler& p) { return p.needs(); }));
  }
  void attach(const Shape& shape, Workspace& w) override {
    ask("attach", [&](Profiler& p) { p.attach(shape, w); });
  }
  void prefill(const LayerPrefill& kv, Stream s) override {
    ask("prefill", [&](Profiler& p) { p.prefill(kv, s); });
  }
  void observe(const LayerStep& step, Stream s) override {
    ask("observe", [&](Profiler& p) { p.observe(step, s); });
  }
  void release(int slot) override {
    ask("release", [&](Profiler& p) { p.release(slot); });
  }
  void finish(Profile& out) override {
    ask("finish", [&](Profiler& p) { p.finish(out); });
  }
};

class GuardedTask final : public Guard<Task> {
 public:
  using Guard::Guard;
  int samples(const TaskEnv& env) const override {
    return ask("samples", [&](const Task& t) { return t.samples(env); });
  }
  TaskSample sample(int index, const TaskEnv& env) const override {
    return ask("sample", [&](const Task& t) { return t.sample(index, env); });
  }
  std::string metric() const override {
    return ask("metric", [](const Task& t) { return t.metric(); });
  }
};

template <class Interface, class GuardOf>
Instance<Interface> behind(const PluginInfo& plugin, Instance<Interface> object) {
  Interface* guard = new GuardOf(plugin, std::move(object));
  return Instance<Interface>(guard, PluginDeleter{nullptr, [](void* p) { delete static_cast<Interface*>(p); }});
}

}  // namespace

Instance<Scorer> guarded(const PluginInfo& plugin, Instance<Scorer> object) {
  return behind<Scorer, GuardedScorer>(plugin, std::move(object));
}
Instance<Budget> guarded(const PluginInfo& plugin, Instance<Budget> object) {
  return behind<Budget, GuardedBudget>(plugin, std::move(object));
}
Instance<Selector> guarded(const PluginInfo& plugin, Instance<Selector> object) {
  return behind<Selector, GuardedSelector>(plugin, std::move(object));
}
Instance<Codec> guarded(const PluginInfo& plugin, Instance<Codec> object) {
  return behind<Codec, GuardedCodec>(plugin, std::move(object));
}
Instance<Policy> guarded(const PluginInfo& plugin, Instance<Policy> object) {
  return behind<Policy, GuardedPolicy>(plugin, std::move(object));
}
Instance<Profiler> guarded(const PluginInfo& plugin, Instance<Profiler> object) {
  return behind<Profiler, GuardedProfiler>(plugin, std::move(object));
}
Instance<Task> guarded(const PluginInfo& plugin, Instance<Task> object) {
  return behind<Task, GuardedTask>(plugin, std::move(object));
}

}  // namespace kvlab
