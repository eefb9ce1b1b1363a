// Guards around plugins' objects. Each call goes through Callee::call. A number that no contract allows is refused
// where it enters (Errc::plugin).

#include <fmt/format.h>
#include <kvlab/error.hpp>
#include <kvlab/row_codec.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/stream_memory.hpp"
#include "base/text.hpp"
#include "ops/score/verify.hpp"
#include "plugin/before_step.hpp"
#include "plugin/callback.hpp"
#include "plugin/edits_author.hpp"
#include "plugin/in_prompts.hpp"
#include "plugin/loader.hpp"
#include "plugin/no_pruner.hpp"
#include "plugin/steady_split.hpp"
#include "plugin/tokens_stay.hpp"
#include "plugin/verified.hpp"

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
  // Calls the object with this callback on record.
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

  // Profile::at throws std::out_of_range, which names nothing.
  void load(const Profile& profile) {
    ask("load_profile", [&](Interface& object) {
      try {
        object.load_profile(profile);
      } catch (const std::out_of_range&) {
        std::vector<std::string> names;
        for (const auto& [name, array] : profile) names.push_back(name);
        throw Error(Errc::config,
                    "got a profile without an array that the plugin reads, wanted one that has it; this one measured " +
                        (names.empty() ? "nothing" : join(names)));
      }
    });
  }

  Pins checked(const char* callback, const Pins& p) const {
    const std::int64_t both = std::int64_t{p.first} + p.last;
    if (p.first < 0 || p.last < 0 || both > std::numeric_limits<int>::max())
      who_.refuse(callback, fmt::format("got pins of the first {} and the last {} tokens, wanted none below 0 and "
                                        "at most {} together",
                                        p.first, p.last, std::numeric_limits<int>::max()));
    return p;
  }

  double check_score(double score) const {
    if (!(score >= 0 && score <= 1)) who_.refuse("score", fmt::format("got {}, wanted 0 to 1", score));
    return score;
  }

  // Tells the object of a decode step that begins, if it asks for that.
  int prepare(const StepCounters& c) const {
    return ask("prepare_step", [&](Interface& object) {
      auto* prepares = dynamic_cast<PreparesSteps*>(&object);
      if (!prepares) return 0;
      prepares->prepare_step(c);
      return prepares->step_variant();
    });
  }

  Callee who_;
  Instance<Interface> object_;
};

// Memory in which ops note wrong numbers of callbacks, one on the host and one on the device.
class Note {
 public:
  // A graph may repeat the notes of a decode step without a call.
  ops::Finding* on(Stream s, bool of_step) {
    if (s.device() == Device::cpu) return &here_;
    if (!there_) {
      there_ = StreamMemory(s, sizeof(ops::Finding));
      zero_memory(there_.as(), there_.bytes(), s);
    }
    stream_ = s;
    repeats_ = repeats_ || of_step;
    return there_.as<ops::Finding>();
  }

  // Returns the findings since the last call. Waits for their stream.
  ops::Finding take() {
    if (stream_) {
      copy_memory(&here_, there_.as(), sizeof here_, *stream_);
      zero_memory(there_.as(), there_.bytes(), *stream_);
      synchronize(*stream_);
      if (!repeats_) stream_.reset();
    }
    return std::exchange(here_, {});
  }

 private:
  ops::Finding here_;
  StreamMemory there_;
  std::optional<Stream> stream_;  // of the latest note on a GPU
  bool repeats_ = false;
};

class GuardedScorer final : public Guard<Scorer>, public EditsAuthor, public Verified, public BeforeStep {
 public:
  using Guard::Guard;
  int before_step(const StepCounters& c) override { return prepare(c); }
  std::string author() const override { return who_.where("score"); }
  Needs needs() const override {
    return checked(ask("needs", [](Scorer& s) { return s.needs(); }));
  }
  void load_profile(const Profile& profile) override { load(profile); }
  void attach(const Shape& shape, const BudgetAmount& amount, Workspace& w) override {
    ask("attach", [&](Scorer& s) { s.attach(shape, amount, w); });
  }
  Pins pins(int tokens) const override {
    return checked("pins", ask("pins", [&](Scorer& s) { return s.pins(tokens); }));
  }
  void score(const LayerKv& kv, Scores out, Stream stream) override {
    ask("score", [&](Scorer& s) { s.score(kv, out, stream); });
    ops::find_nan(kv.pages, kv.layer, out, note_.on(stream, !kv.chunk_queries), stream);
  }
  void observe(const LayerKv& kv, Stream stream) override {
    ask("observe", [&](Scorer& s) { s.observe(kv, stream); });
  }
  void release(int slot) override {
    ask("release", [&](Scorer& s) { s.release(slot); });
  }
  bool steady_score() const override {
    return ask("steady_score", [](Scorer& s) { return s.steady_score(); });
  }
  bool by_age() const override {
    return ask("by_age", [](Scorer& s) { return s.by_age(); });
  }
  const char* column() const override {
    return ask("column", [](Scorer& s) { return s.column(); });
  }
  int every() const override {
    const int steps = ask("every", [](Scorer& s) { return s.every(); });
    if (steps < 0)
      who_.refuse("every",
                  fmt::format("got {} decode steps between evictions, wanted 0 (the prompt only) or more", steps));
    return steps;
  }
  void verify() override {
    const ops::Finding found = note_.take();
    if (found.count > 0)
      who_.refuse("score",
                  fmt::format("got NaN as the score of the token at position {} (layer {}, KV head {}){}, wanted "
                              "numbers; -inf and inf rank below and above all others",
                              found.number(), found.layer(), found.kv_head(),
                              found.count > 1 ? fmt::format(" and of {} others", found.count - 1) : ""));
  }
  void forget() override { note_.take(); }
  ops::Finding* finding(Stream s) override { return note_.on(s, true); }

 private:
  Note note_;
};

class GuardedBudget final : public Guard<Budget>, public Verified, public SteadySplit {
 public:
  using Guard::Guard;
  bool steady() const override { return dynamic_cast<const SteadyBudget*>(object_.get()); }
  bool counted() const override { return dynamic_cast<const CountedBudget*>(object_.get()); }
  int tokens(const CountedBudget::Counters& c) const override {
    return at_least_0("tokens", ask("tokens", [&](Budget& b) { return dynamic_cast<CountedBudget&>(b).tokens(c); }));
  }
  bool uniform_heads() const override {
    return ask("uniform_heads", [](Budget& b) { return b.uniform_heads(); });
  }
  int numbers() const override {
    return at_least_0("numbers", ask("numbers", [](Budget& b) { return b.numbers(); }));
  }
  int window_queries() const override {
    return at_least_0("window_queries", ask("window_queries", [](Budget& b) { return b.window_queries(); }));
  }
  bool reads_profile() const override {
    return ask("reads_profile", [](Budget& b) { return b.reads_profile(); });
  }
  void load_profile(const Profile& profile) override { load(profile); }
  void attach(const Shape& shape) override {
    slots_ = static_cast<std::size_t>(shape.max_slots);
    ask("attach", [&](Budget& b) { b.attach(shape); });
  }
  void measure(const LayerKv& kv, Scores scores, Pins pins, View<float, 3> out, Stream s) override {
    ask("measure", [&](Budget& b) { b.measure(kv, scores, pins, out, s); });
  }
  std::vector<std::int32_t> divide(const Division& d) const override {
    std::vector<std::int32_t> keep = ask("divide", [&](Budget& b) { return b.divide(d); });
    if (keep.size() != d.length.size())
      who_.refuse("divide",
                  fmt::format("got numbers for {} KV heads of the layers, wanted {}", keep.size(), d.length.size()));
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < keep.size(); ++i) {
      const auto heads = static_cast<std::size_t>(d.kv_heads);
      if (keep[i] < 0 || keep[i] > d.length[i])
        who_.refuse("divide", fmt::format("got {} tokens to keep in divided layer {}, KV head {}, wanted none below 0 "
                                          "and at most the {} that it holds",
                                          keep[i], i / heads, i % heads, d.length[i]));
      sum += keep[i];
    }
    // Pins stay even where they exceed the budget.
    if (const std::int64_t most = std::int64_t{d.layers} * d.kv_heads * std::max(d.tokens, d.pinned); sum > most)
      who_.refuse("divide",
                  fmt::format("got {} tokens to keep over all layers and KV heads, wanted at most {}", sum, most));
    return keep;
  }
  void allot(const Allotment& a, Stream stream) override {
    ask("allot", [&](Budget& b) { b.allot(a, stream); });
    // A graph of fewer rows writes there, too.
    const auto bytes = std::max(slots_, static_cast<std::size_t>(a.keep.extent[0])) * sizeof(std::int64_t);
    if (a.keep.extent[0] == 0) return;
    if (a.layer == 0 && kept_.bytes() < bytes) kept_ = StreamMemory(stream, bytes);
    ops::find_keep(a, kept_.as<std::int64_t>(), note_.on(stream, !a.kv->chunk_queries), stream);
  }
  void verify() override {
    const ops::Finding found = note_.take();
    if (found.count > 0)
      who_.refuse("allot", fmt::format("got {} tokens to keep in layer {}, KV head {}, wanted none below 0 and no more "
                                       "than it holds",
                                       found.number(), found.layer(), found.kv_head()));
    if (found.over > 0)
      who_.refuse("allot", fmt::format("got {} tokens to keep over all layers and KV heads, wanted about {}",
                                       found.kept(), found.total()));
  }
  void forget() override { note_.take(); }

 private:
  int at_least_0(const char* callback, int n) const {
    if (n < 0) who_.refuse(callback, fmt::format("got {}, wanted 0 or more", n));
    return n;
  }

  Note note_;
  std::size_t slots_ = 0;
  StreamMemory kept_;  // i64 [row]: sum of tokens to keep over the layers so far
};

class GuardedSelector final : public Guard<Selector>, public EditsAuthor, public BeforeStep {
 public:
  using Guard::Guard;
  int before_step(const StepCounters& c) override { return prepare(c); }
  std::string author() const override { return who_.where("select"); }
  Needs needs() const override {
    return checked(ask("needs", [](Selector& s) { return s.needs(); }));
  }
  void load_profile(const Profile& profile) override { load(profile); }
  void attach(const Shape& shape, const BudgetAmount& amount, Workspace& w) override {
    ask("attach", [&](Selector& s) { s.attach(shape, amount, w); });
  }
  void prefill(const LayerPrefill& kv, Stream stream) override {
    ask("prefill", [&](Selector& s) { s.prefill(kv, stream); });
  }
  void select(const LayerStep& step, PageList out, Stream stream) override {
    ask("select", [&](Selector& s) { s.select(step, out, stream); });
  }
  void observe(const LayerStep& step, Stream stream) override {
    ask("observe", [&](Selector& s) { s.observe(step, stream); });
  }
  void release(int slot) override {
    ask("release", [&](Selector& s) { s.release(slot); });
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
  int residual() const override {
    return ask("residual", [](Codec& c) { return c.residual(); });
  }
};

class GuardedRowCodec final : public RowCodec {
 public:
  GuardedRowCodec(const PluginInfo& plugin, Instance<Codec> object, RowCodec& rows)
      : who_(plugin.name, plugin.library), object_(std::move(object)), rows_(rows) {}
  ~GuardedRowCodec() override {
    who_.call("destructor", [&] { object_.reset(); });
  }
  int residual() const override {
    return who_.call("residual", [&] { return rows_.residual(); });
  }
  void attach(const Shape& shape) override {
    who_.call("attach", [&] { rows_.attach(shape); });
  }
  int coded(KvSide side, int tokens) const override {
    const int n = who_.call("coded", [&] { return rows_.coded(side, tokens); });
    if (n < 0 || n > tokens)
      who_.refuse("coded", fmt::format("got {} of {} tokens, wanted none below 0 and at most all", n, tokens));
    return n;
  }
  std::vector<std::byte> encode(KvSide side, View<const float, 2> rows) const override {
    return who_.call("encode", [&] { return rows_.encode(side, rows); });
  }
  void decode(KvSide side, const std::vector<std::byte>& codes, View<float, 2> rows) const override {
    who_.call("decode", [&] { rows_.decode(side, codes, rows); });
  }

 private:
  Callee who_;
  Instance<Codec> object_;
  RowCodec& rows_;  // the same object
};

class GuardedPolicy final : public Guard<Policy>,
                            public EditsAuthor,
                            public BeforeStep,
                            public ChoosesInPrompts,
                            public TokensStay,
                            public TakesNoPruner {
 public:
  using Guard::Guard;
  bool tokens_stay() const override { return kvlab::tokens_stay(*object_); }
  const char* takes_no_pruner() const override {
    return ask("takes_no_pruner", [](const Policy& p) { return says_no_pruner(p); });
  }
  int before_step(const StepCounters& c) override { return prepare(c); }
  std::string author() const override { return who_.where(latest_); }
  Needs needs() const override {
    return checked(ask("needs", [](Policy& p) { return p.needs(); }));
  }
  void load_profile(const Profile& profile) override { load(profile); }
  Demand demand(int prompt, int most) const override {
    return ask("demand", [&](Policy& p) { return p.demand(prompt, most); });
  }
  std::vector<CodecSpec> codecs() const override {
    return ask("codecs", [](Policy& p) { return p.codecs(); });
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
  std::vector<PromptMask> prompt_masks() const override {
    std::vector<PromptMask> masks = ask("prompt_masks", [](Policy& p) { return p.prompt_masks(); });
    for (const PromptMask& m : masks)
      if (m.sinks < 0 || m.window < 0)
        who_.refuse("prompt_masks",
                    fmt::format("got {} sinks and a window of {}, wanted none below 0", m.sinks, m.window));
    return masks;
  }
  void finish_prompt(const LayerKv& kv, Edits& edits, Stream s) override {
    edit("finish_prompt", edits, [&](Policy& p) { p.finish_prompt(kv, edits, s); });
  }
  int prompt_chunk() const override {
    const int tokens = ask("prompt_chunk", [](Policy& p) { return kvlab::prompt_chunk(p); });
    if (tokens < 0) who_.refuse("prompt_chunk", fmt::format("got chunks of {} tokens, wanted 0 or more", tokens));
    return tokens;
  }
  void select_chunk(const LayerPrefill& kv, Edits& edits, Stream s) override {
    edit("select_chunk", edits, [&](Policy& p) { dynamic_cast<ChoosesInPrompts&>(p).select_chunk(kv, edits, s); });
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
  bool by_pages() const override {
    return ask("by_pages", [](Profiler& p) { return p.by_pages(); });
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
  std::optional<double> score(const std::string& answer, const std::vector<std::string>& references) const override {
    const auto score = ask("score", [&](const Task& t) { return t.score(answer, references); });
    if (score) check_score(*score);
    return score;
  }
};

class GuardedMetric final : public Guard<AnswerMetric> {
 public:
  using Guard::Guard;
  double score(const std::string& answer, const std::vector<std::string>& references,
               const Record& record) const override {
    return check_score(ask("score", [&](const AnswerMetric& m) { return m.score(answer, references, record); }));
  }
  void check(const std::vector<std::string>& references, const Record& record) const override {
    ask("check", [&](const AnswerMetric& m) { m.check(references, record); });
  }
};

class GuardedPruner final : public Guard<Pruner>, public EditsAuthor {
 public:
  using Guard::Guard;
  std::string author() const override { return who_.where("prune"); }
  Needs needs() const override {
    return checked(ask("needs", [](Pruner& p) { return p.needs(); }));
  }
  void attach(const Shape& shape, Workspace& w) override {
    ask("attach", [&](Pruner& p) { p.attach(shape, w); });
  }
  void appended(const LayerKv& kv, int newest, Stream s) override {
    ask("appended", [&](Pruner& p) { p.appended(kv, newest, s); });
  }
  void prune(const LayerStep& step, const PageList& candidates, TokenList out, Stream s) override {
    ask("prune", [&](Pruner& p) { p.prune(step, candidates, out, s); });
  }
  void prune(const LayerStep& step, const TokenList& candidates, TokenList out, Stream s) override {
    ask("prune", [&](Pruner& p) { p.prune(step, candidates, out, s); });
  }
};

class GuardedRescorer final : public Guard<Rescorer>, public EditsAuthor, public Verified {
 public:
  using Guard::Guard;
  std::string author() const override { return who_.where("rescore"); }
  Needs needs() const override {
    return checked(ask("needs", [](Rescorer& r) { return r.needs(); }));
  }
  void rescore(const LayerKv& kv, Pins pins, View<const std::int32_t, 2> keep, Scores scores, Stream stream) override {
    ask("rescore", [&](Rescorer& r) { r.rescore(kv, pins, keep, scores, stream); });
    ops::find_nan(kv.pages, kv.layer, scores, note_.on(stream, false), stream);
  }
  void verify() override {
    const ops::Finding found = note_.take();
    if (found.count > 0)
      who_.refuse("rescore", fmt::format("got NaN as the score of the token at position {} (layer {}, KV head {}), "
                                         "wanted numbers; -inf and inf rank below and above all others",
                                         found.number(), found.layer(), found.kv_head()));
  }
  void forget() override { note_.take(); }

 private:
  Note note_;
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
  auto* rows = dynamic_cast<RowCodec*>(object.get());
  if (!rows) return behind<Codec, GuardedCodec>(plugin, std::move(object));
  Codec* guard = new GuardedRowCodec(plugin, std::move(object), *rows);
  return Instance<Codec>(guard, PluginDeleter{nullptr, [](void* p) { delete static_cast<Codec*>(p); }});
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
Instance<AnswerMetric> guarded(const PluginInfo& plugin, Instance<AnswerMetric> object) {
  return behind<AnswerMetric, GuardedMetric>(plugin, std::move(object));
}
Instance<Pruner> guarded(const PluginInfo& plugin, Instance<Pruner> object) {
  return behind<Pruner, GuardedPruner>(plugin, std::move(object));
}
Instance<Rescorer> guarded(const PluginInfo& plugin, Instance<Rescorer> object) {
  return behind<Rescorer, GuardedRescorer>(plugin, std::move(object));
}

}  // namespace kvlab
