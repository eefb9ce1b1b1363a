// One scorer, one selector, one budget, one policy, one profiler, one task and one metric. In the callback that the
// parameter `in` names they do what `deed` says.
#include <kvlab/plugin.hpp>

#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

namespace {

// Does `deed` in the callback that `in` names.
class Deed {
 public:
  explicit Deed(const kvlab::Params& p) : in_(p.get<std::string>("in")), deed_(p.get<std::string>("deed")) {
    (*this)("constructor");
  }
  bool in(const char* callback) const { return in_ == callback; }
  bool is(const char* callback, const char* deed) const { return in_ == callback && deed_ == deed; }
  void operator()(const char* callback) const {
    if (in_ != callback) return;
    if (deed_ == "throw") throw std::runtime_error("red\x1b[31m\nbell\a");
    if (deed_ == "throw_int") throw 42;
    if (deed_ == "throw_error") throw kvlab::Error(kvlab::Errc::data, "got a bad\x1b[2J day, wanted a good one");
    if (deed_ == "throw_internal") throw kvlab::Error(kvlab::Errc::internal, "got a small view, wanted a large one");
    if (deed_ == "no_memory") throw std::bad_alloc();
    if (deed_ == "exit") std::exit(0);
    if (deed_ == "quick_exit") std::quick_exit(0);
    if (deed_ == "_exit") _exit(0);
    if (deed_ == "abort") std::abort();
    if (deed_ == "segv") raise(SIGSEGV);
    if (deed_ == "fpe") raise(SIGFPE);
    if (deed_ == "overflow") overflow(0);
    if (deed_ == "kill") raise(SIGKILL);
  }

 private:
  static int overflow(int depth) {
    volatile char page[4096] = {};
    page[0] = static_cast<char>(depth);
    return depth < 0 ? 0 : overflow(depth + 1) + page[0];  // the stack ends long before depth does
  }
  std::string in_, deed_;
};

// Overwrites this process's part at exit. KVLAB_TEST_CUT_PART_AT_EXIT names the folder of the parts.
struct CutsPart {
  ~CutsPart() {
    const char* folder = std::getenv("KVLAB_TEST_CUT_PART_AT_EXIT");
    std::ifstream words("/proc/self/cmdline");
    std::string word, before;
    while (folder && std::getline(words, word, '\0')) {
      if (before == "--isolated-cell" && used) std::ofstream(std::string(folder) + "/" + word + ".h5") << "kvlab";
      before = word;
    }
  }
  bool used = false;
} cuts_part;

void load(const kvlab::Profile& profile, const Deed& deed) {
  deed("load_profile");
  if (deed.is("load_profile", "absent")) profile.at("absent");
}

class BadScorer final : public kvlab::Scorer {
 public:
  explicit BadScorer(const kvlab::Params& p) : deed_(p), reads_(p.get<bool>("reads")) {}
  kvlab::Needs needs() const override {
    deed_("needs");
    return kvlab::Needs{}.profile(deed_.in("load_profile") && reads_);
  }
  void load_profile(const kvlab::Profile& p) override { load(p, deed_); }
  void attach(const kvlab::Shape&, const kvlab::BudgetAmount&, kvlab::Workspace&) override { deed_("attach"); }
  void release(int) override { deed_("release"); }
  kvlab::Pins pins(int) const override {
    deed_("pins");
    if (deed_.is("pins", "negative")) return {.first = 2, .last = -3};
    if (deed_.is("pins", "huge")) return {.first = std::numeric_limits<int>::max(), .last = 1};
    return {.first = 1, .last = 1};
  }
  int every() const override {
    deed_("every");
    return deed_.is("every", "negative") ? -1 : 1;
  }
  void observe(const kvlab::LayerKv&, kvlab::Stream) override { deed_("observe"); }
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    deed_("score");
    cuts_part.used = true;
    kvlab::ops::recency(kv.pages, out, s);
    if (s.device() != kvlab::Device::cpu) return;
    if (deed_.is("score", "nan") && kv.layer == 1) out(0, 1, 5) = std::numeric_limits<float>::quiet_NaN();
    if (deed_.is("score", "inf"))
      for (int t = 0; t < kv.pages.tokens(0, 0); ++t) out(0, 0, t) = t == 3 ? INFINITY : -INFINITY;
  }
  ~BadScorer() override {
    if (deed_.is("destructor", "segv")) raise(SIGSEGV);
  }

 private:
  Deed deed_;
  bool reads_;
};

class BadSelector final : public kvlab::Selector {
 public:
  explicit BadSelector(const kvlab::Params& p) : deed_(p) {}
  kvlab::Needs needs() const override { return deed_("needs"), kvlab::Needs{}; }
  void load_profile(const kvlab::Profile& p) override { load(p, deed_); }
  void attach(const kvlab::Shape&, const kvlab::BudgetAmount&, kvlab::Workspace&) override { deed_("attach"); }
  void prefill(const kvlab::LayerPrefill&, kvlab::Stream) override { deed_("prefill"); }
  void observe(const kvlab::LayerStep&, kvlab::Stream) override { deed_("observe"); }
  void release(int) override { deed_("release"); }
  void select(const kvlab::LayerStep& step, kvlab::PageList out, kvlab::Stream) override {
    deed_("select");
    for (int row = 0; row < step.rows(); ++row)
      for (int head = 0; head < step.kv_heads(); ++head) {
        out.count(row, head) = deed_.is("select", "long") ? 1 << 20 : 1;
        out.index(row, head, 0) = deed_.is("select", "far") ? step.max_pages : deed_.is("select", "negative") ? -1 : 0;
      }
  }
  kvlab::Pins pins() const override {
    deed_("pins");
    return {.last = deed_.is("pins", "negative") ? -1 : 1};
  }

 private:
  Deed deed_;
};

class BadBudget final : public kvlab::Budget {
 public:
  explicit BadBudget(const kvlab::Params& p) : deed_(p) {}
  bool uniform_heads() const override { return deed_("uniform_heads"), false; }
  void allot(const kvlab::Allotment& a, kvlab::Stream s) override {
    deed_("allot");
    kvlab::ops::allot_uniform(a, s);
    if (deed_.is("allot", "negative")) a.keep(0, 0) = -1;
    if (deed_.is("allot", "long")) a.keep(0, 0) = a.length(0, 0) + 1;
    if (deed_.is("allot", "everything"))
      for (int h = 0; h < a.keep.extent[1]; ++h) a.keep(0, h) = a.length(0, h);
  }
  int numbers() const override { return deed_("numbers"), deed_.is("numbers", "negative") ? -1 : 0; }
  int window_queries() const override { return deed_("window_queries"), 0; }
  void measure(const kvlab::LayerKv&, kvlab::Scores, kvlab::Pins, kvlab::View<float, 3>, kvlab::Stream) override {
    deed_("measure");
  }
  bool reads_profile() const override { return deed_("reads_profile"), deed_.in("load_profile"); }
  void load_profile(const kvlab::Profile& p) override { load(p, deed_); }
  void attach(const kvlab::Shape&) override { deed_("attach"); }
  std::vector<std::int32_t> divide(const kvlab::Division& d) const override {
    deed_("divide");
    std::vector<std::int32_t> keep(d.length.size(), d.tokens);
    if (deed_.is("divide", "negative")) keep[1] = -1;
    if (deed_.is("divide", "long")) keep[2] = d.length[2] + 1;
    if (deed_.is("divide", "few")) keep.pop_back();
    if (deed_.is("divide", "many")) ++keep[3];
    return keep;
  }

 private:
  Deed deed_;
};

class BadPolicy final : public kvlab::Policy {
 public:
  explicit BadPolicy(const kvlab::Params& p) : deed_(p) {}
  kvlab::Needs needs() const override {
    deed_("needs");
    return kvlab::Needs{}.dense_layers(deed_.is("needs", "negative") ? -2 : 0);
  }
  void load_profile(const kvlab::Profile& p) override { load(p, deed_); }
  void attach(const kvlab::Shape&, const kvlab::BudgetAmount&, kvlab::Workspace&) override { deed_("attach"); }
  void prefill(const kvlab::LayerPrefill&, kvlab::Edits&, kvlab::Stream) override { deed_("prefill"); }
  void finish_prompt(const kvlab::LayerKv&, kvlab::Edits&, kvlab::Stream) override { deed_("finish_prompt"); }
  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream) override {
    deed_("observe");
    if (!deed_.is("observe", "far")) return;
    const auto list = step.list<kvlab::TokenList>("evicted", 1);
    for (int row = 0; row < step.rows(); ++row)
      for (int head = 0; head < step.kv_heads(); ++head) {
        list.count(row, head) = 1;
        list.index(row, head, 0) = 1 << 20;
      }
    edits.evict(list);
  }
  void release(int) override { deed_("release"); }

 private:
  Deed deed_;
};

class BadProfiler final : public kvlab::Profiler {
 public:
  explicit BadProfiler(const kvlab::Params& p) : deed_(p) {}
  kvlab::Needs needs() const override { return {}; }
  void observe(const kvlab::LayerStep&, kvlab::Stream) override { deed_("observe"); }
  void finish(kvlab::Profile&) override { deed_("finish"); }

 private:
  Deed deed_;
};

class BadTask final : public kvlab::Task {
 public:
  explicit BadTask(const kvlab::Params& p) : deed_(p) {}
  int samples(const kvlab::TaskEnv&) const override { return deed_("samples"), 1; }
  kvlab::TaskSample sample(int, const kvlab::TaskEnv& env) const override {
    deed_("sample");
    kvlab::TaskSample s;
    s.context = env.encode("a b c");
    s.questions.push_back({env.encode("d"), {"e"}, 2, {}, false, nullptr});
    return s;
  }

 private:
  Deed deed_;
};

class BadMetric final : public kvlab::AnswerMetric {
 public:
  explicit BadMetric(const kvlab::Params& p) : deed_(p) {}
  double score(const std::string&, const std::vector<std::string>&, const kvlab::Record&) const override {
    deed_("score");
    if (deed_.is("score", "nan")) return std::numeric_limits<double>::quiet_NaN();
    return deed_.is("score", "high") ? 1.5 : 1;
  }
  void check(const std::vector<std::string>&, const kvlab::Record&) const override { deed_("check"); }

 private:
  Deed deed_;
};

kvlab::Registration told(kvlab::Registration r) {
  r.param("in", std::string("nowhere"), "callback").param("deed", std::string("nothing"), "what it does there");
  return r;
}

}  // namespace

KVLAB_PLUGIN(told(kvlab::scorer<BadScorer>("bad_scorer", "misbehaves")).component("reads", "its profile"),
             told(kvlab::selector<BadSelector>("bad_selector", "misbehaves")),
             told(kvlab::budget<BadBudget>("bad_budget", "misbehaves")),
             told(kvlab::policy<BadPolicy>("bad_policy", "misbehaves")),
             told(kvlab::profiler<BadProfiler>("bad_profiler", "misbehaves")),
             told(kvlab::task<BadTask>("bad_task", "misbehaves")),
             told(kvlab::metric<BadMetric>("bad_metric", "misbehaves")))
