// Continuous batching on a tiny model: a request's text does not depend on the requests beside it.
#include "engine/scheduler.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <kvlab/error.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "model/checkpoint.hpp"
#include "support/golden.hpp"

using namespace kvlab;

namespace {

std::shared_ptr<const Model> tiny() {
  static const auto model = load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), DType::f32, "tiny");
  return model;
}

#if defined(__SANITIZE_ADDRESS__)
constexpr bool address_sanitizer = true;
#elif defined(__has_feature)
constexpr bool address_sanitizer = __has_feature(address_sanitizer);
#else
constexpr bool address_sanitizer = false;
#endif

// While it lives the process gets no more address space.
class NoAddressSpace {
 public:
  NoAddressSpace() {
    long pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    getrlimit(RLIMIT_AS, &before_);
    const rlimit now{static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)), before_.rlim_max};
    setrlimit(RLIMIT_AS, &now);
  }
  ~NoAddressSpace() { setrlimit(RLIMIT_AS, &before_); }
  NoAddressSpace(const NoAddressSpace&) = delete;

 private:
  rlimit before_{};
};

class Nothing final : public Policy {
 public:
  explicit Nothing(std::int64_t says = -1) : says_(says) {}
  Needs needs() const override { return {}; }
  Demand demand(int, int) const override { return {says_, -1, -1}; }

 private:
  std::int64_t says_;
};

// Keeps the first `kept` tokens of a prompt, or `kept` for each `per` tokens of it.
class Short final : public Policy {
 public:
  explicit Short(int kept, int per = 0) : kept_(kept), per_(per) {}
  Needs needs() const override { return {}; }
  void prefill(const LayerPrefill& kv, Edits& edits, Stream) override {
    if (!kv.last[0]) return;
    const int most = per_ > 0 ? kv.pages.tokens(0, 0) * kept_ / per_ : kept_;
    TokenList l;
    l.index = kv.scratch<std::int32_t>("kept", {1, kv.kv_heads(), most});
    l.count = kv.scratch<std::int32_t>("kept", {1, kv.kv_heads()});
    for (int h = 0; h < kv.kv_heads(); ++h) {
      l.count(0, h) = std::min(most, kv.pages.tokens(0, h));
      for (int t = 0; t < l.count(0, h); ++t) l.index(0, h, t) = t;
    }
    edits.evict_rest(l);
  }

 private:
  int kept_, per_;
};

constexpr int page = 8, room = 128;

// Reads the first page, the newest one, and one of the prompt that changes in every step. It waits for that one.
class Pausing final : public Policy {
 public:
  Needs needs() const override { return Needs{}.host_pages(true).pauses(true); }
  void prefill(const LayerPrefill& kv, Edits& edits, Stream) override {
    if (kv.last[0]) edits.place(pages(kv, 0), {.when = {Deadline::sequence}});
  }
  void select(const LayerStep& step, Edits& edits, Stream) override {
    edits.attend(pages(step, 1), {.newest_page = true});
  }
  void observe(const LayerStep& step, Edits& edits, Stream) override {
    edits.place(pages(step, 2), {.when = {Deadline::sequence}});
  }

 private:
  // after: steps from the row's last one; 1 = this step.
  static PageList pages(const LayerKv& kv, int after) {
    const PageList list = kv.list<PageList>("pages", 2);
    for (int row = 0; row < kv.rows(); ++row) {
      const int t = kv.step[row] + std::max(0, after - 1), prompt = kv.position[row] - (after ? kv.step[row] + 1 : 0);
      const int changes = t % std::max(1, prompt / page);
      for (int h = 0; h < kv.kv_heads(); ++h) {
        list.index(row, h, 0) = 0, list.index(row, h, 1) = changes;
        list.count(row, h) = changes > 0 ? 2 : 1;
      }
    }
    return list;
  }
};

EngineOptions options(int slots, std::int64_t limit = -1) {
  EngineOptions o;
  o.slots = slots;
  o.max_tokens = room;
  o.page_size = page;
  o.device_limit = limit;
  return o;
}

std::vector<int> text(int tokens, unsigned seed) {
  std::vector<int> out;
  for (int t = 0; t < tokens; ++t)
    out.push_back(static_cast<int>((seed * 7919u + static_cast<unsigned>(t) * (31u + seed % 13u)) % 97u) + 3);
  return out;
}

// Prompts of 1 to 80 tokens and answers of 1 to 30. Every fifth request has fed tokens.
std::vector<Request> ragged(int count) {
  std::vector<Request> out;
  for (int i = 0; i < count; ++i) {
    Request r;
    r.prompt = text(1 + (i * 37) % 80, static_cast<unsigned>(i));
    if (i % 5 == 0) r.fed = text(1 + i % 3, static_cast<unsigned>(i) + 100);
    r.max_new = 1 + (i * 11) % 30;
    out.push_back(std::move(r));
  }
  return out;
}

std::vector<int> alone(const Request& r, std::shared_ptr<Policy> policy) {
  Engine engine(tiny(), std::move(policy), options(1));
  const int slot = engine.open();
  std::vector<float> logits(static_cast<std::size_t>(tiny()->config.vocab));
  const auto view = View<float, 2>::dense(logits.data(), {1, tiny()->config.vocab});
  const auto best = [&] { return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin()); };
  REQUIRE(engine.prefill(slot, r.prompt, true, view) == Fit::ok);
  for (const int token : r.fed) REQUIRE(engine.step({slot}, {&token, 1}, view) == Fit::ok);
  std::vector<int> out{best()};
  while (out.size() < static_cast<std::size_t>(r.max_new)) {
    REQUIRE(engine.step({slot}, {&out.back(), 1}, view) == Fit::ok);
    out.push_back(best());
  }
  return out;
}

// A clock that advances by 1 ms at every reading.
std::function<double()> ticking() {
  return [t = 0.]() mutable { return ++t; };
}

int preemptions(const Scheduler& s) {
  int all = 0;
  for (const Served& one : s.served()) all += one.preemptions;
  return all;
}

std::int64_t bytes_of(int tokens) {
  const ModelConfig& c = tiny()->config;
  const std::int64_t frame = page * 2 * c.head_dim * 4 + 128;
  return std::int64_t{c.layers} * c.kv_heads * ((tokens + page - 1) / page) * frame;
}

// Runs to the end. After every iteration it checks the rules that always hold.
void run(Scheduler& s, const Engine& engine, int most = 20000) {
  const std::int64_t limit = engine.store().options().device_limit;
  while (!s.done()) {
    REQUIRE(s.iterate() == Fit::ok);
    REQUIRE(--most > 0);
    CHECK(s.slots().size() == static_cast<std::size_t>(s.active()));
    if (limit >= 0) REQUIRE(engine.store().page_bytes(Tier::device) <= limit);
  }
  CHECK(s.active() == 0);
  CHECK(engine.store().page_bytes(Tier::device) == 0);
  engine.store().check_invariants();
}

// Requests that were served to their end, and the most rows that a step had.
struct Ran {
  std::size_t most_rows = 0;
  Scheduler scheduler;

  Ran(Engine& engine, const std::vector<Request>& requests) : scheduler(engine, requests, counting()) {
    run(scheduler, engine);
  }

 private:
  SchedulerOptions counting() {
    SchedulerOptions how;
    how.clock = ticking();
    how.stepped = [this](double, const std::vector<std::int32_t>& slots) {
      most_rows = std::max(most_rows, slots.size());
    };
    return how;
  }
};

}  // namespace

TEST_CASE("each of 64 ragged requests has the text that it has alone") {
  const auto requests = ragged(64);
  std::vector<std::vector<int>> wanted;
  for (const Request& r : requests) wanted.push_back(alone(r, std::make_shared<Nothing>()));
  // Each token but the answer's last is fed once; the prompt's own are prefilled.
  std::size_t least_rows = 0;
  for (const Request& r : requests) least_rows += r.fed.size() + static_cast<std::size_t>(r.max_new - 1);
  struct Case {
    int chunk;
    std::int64_t limit, host_limit;
    Preemption preemption;
  };
  for (const Case& c : std::initializer_list<Case>{{0, -1, -1, Preemption::swap},
                                                   {16, -1, -1, Preemption::swap},
                                                   {0, bytes_of(room) * 2, -1, Preemption::swap},
                                                   {16, bytes_of(room) * 2, -1, Preemption::swap},
                                                   {0, bytes_of(room) * 2, bytes_of(24), Preemption::swap},
                                                   {0, bytes_of(room) * 2, -1, Preemption::recompute},
                                                   {16, bytes_of(room) * 2, -1, Preemption::recompute}})
    SECTION(std::to_string(c.chunk) + " " + std::to_string(c.limit) + " " + std::to_string(c.host_limit) + " " +
            std::to_string(static_cast<int>(c.preemption))) {
      EngineOptions o = options(8, c.limit);
      o.prefill_chunk = c.chunk;
      o.host_limit = c.host_limit;
      Engine engine(tiny(), std::make_shared<Nothing>(), o);
      SchedulerOptions how;
      how.prefill_chunk = c.chunk;
      how.clock = ticking();
      how.preemption = c.preemption;
      std::size_t rows = 0;
      std::int64_t most_aside = 0;
      how.stepped = [&](double, const std::vector<std::int32_t>& slots) {
        rows += slots.size();
        most_aside = std::max(most_aside, engine.ledger().total(Tier::host));
      };
      Scheduler s(engine, requests, how);
      run(s, engine);
      const bool limited = c.limit >= 0, swaps = limited && c.preemption == Preemption::swap;
      CHECK((preemptions(s) > 0) == limited);
      // A cache that waited is continued where it was. A lost one is computed again.
      CHECK((rows == least_rows) == (!limited || (swaps && c.host_limit < 0)));
      CHECK((most_aside > 0) == swaps);
      if (c.host_limit >= 0) CHECK(most_aside <= c.host_limit);
      CHECK(engine.ledger().total(Tier::host) == 0);
      for (std::size_t i = 0; i < requests.size(); ++i) {
        CAPTURE(i, s.served()[i].preemptions);
        CHECK(s.served()[i].tokens == wanted[i]);
        CHECK(s.served()[i].token_ms.size() == wanted[i].size());
        CHECK(std::is_sorted(s.served()[i].token_ms.begin(), s.served()[i].token_ms.end()));
      }
      // Requests are admitted in the order of arrival, so none starves.
      for (std::size_t i = 1; i < requests.size(); ++i)
        CHECK(s.served()[i - 1].admitted_ms <= s.served()[i].admitted_ms);
      CHECK(s.served().front().preemptions == 0);
    }
}

TEST_CASE("a policy that keeps little lets more requests in once its prompts were seen") {
  std::vector<Request> requests;
  for (int i = 0; i < 24; ++i) requests.push_back({text(72, static_cast<unsigned>(i)), {}, 12, 0});
  std::vector<std::vector<int>> wanted;
  for (const Request& r : requests) wanted.push_back(alone(r, std::make_shared<Short>(8)));
  const auto busiest = [&](std::shared_ptr<Policy> policy) {
    Engine engine(tiny(), std::move(policy), options(16, bytes_of(room) * 2));
    SchedulerOptions how;
    how.clock = ticking();
    int most = 0;
    how.stepped = [&](double, const std::vector<std::int32_t>& slots) {
      most = std::max(most, static_cast<int>(slots.size()));
    };
    Scheduler s(engine, requests, how);
    run(s, engine);
    return std::pair{most, s.served()};
  };
  const auto [with_all, all] = busiest(std::make_shared<Nothing>());
  const auto [with_few, few] = busiest(std::make_shared<Short>(8));
  CHECK(with_all <= 3);
  CHECK(with_few >= 6);
  for (std::size_t i = 0; i < requests.size(); ++i) CHECK(few[i].tokens == wanted[i]);
}

TEST_CASE("a policy that promises less than it takes costs time, not text") {
  const auto requests = ragged(16);
  Engine engine(tiny(), std::make_shared<Nothing>(0), options(8, bytes_of(room)));
  SchedulerOptions how;
  how.clock = ticking();
  Scheduler s(engine, requests, how);
  run(s, engine);
  CHECK(preemptions(s) > 0);
  for (std::size_t i = 0; i < requests.size(); ++i)
    CHECK(s.served()[i].tokens == alone(requests[i], std::make_shared<Nothing>()));
}

TEST_CASE("a policy that says what decode steps hold lets in requests that were fed more") {
  // Every prompt and every step ends with 8 tokens of each head.
  struct Steady final : Policy {
    bool says;
    Short keeps{page};
    mutable std::vector<std::pair<int, int>> asked;
    explicit Steady(bool s) : says(s) {}
    Needs needs() const override { return {}; }
    Demand demand(int prompt, int most) const override {
      asked.emplace_back(prompt, most);
      return {page, says ? 2 * page : -1, -1};
    }
    void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override { keeps.prefill(kv, edits, s); }
    void observe(const LayerStep& step, Edits& edits, Stream) override {
      TokenList all = step.list<TokenList>("kept", page);
      for (int row = 0; row < step.rows(); ++row)
        for (int h = 0; h < step.kv_heads(); ++h) {
          all.count(row, h) = std::min(page, step.pages.tokens(row, h));
          for (int t = 0; t < all.count(row, h); ++t) all.index(row, h, t) = t;
        }
      edits.evict_rest(all);
    }
  };
  const std::vector<Request> requests{{text(8, 1), text(60, 3), 4, 0}, {text(8, 2), text(60, 4), 4, 0}};
  for (const bool says : {false, true}) {
    CAPTURE(says);
    const auto policy = std::make_shared<Steady>(says);
    Engine engine(tiny(), policy, options(2, bytes_of(8 * page)));
    const Ran ran(engine, requests);
    CHECK(ran.most_rows == (says ? 2 : 1));
    CHECK(preemptions(ran.scheduler) == 0);
    REQUIRE(!policy->asked.empty());
    for (const auto& asked : policy->asked) CHECK(asked == std::pair{8, 64});
    for (std::size_t i = 0; i < requests.size(); ++i)
      CHECK(ran.scheduler.served()[i].tokens == alone(requests[i], std::make_shared<Steady>(says)));
  }
}

TEST_CASE("a policy that says what a sequence takes of the host lets in what the host has room for") {
  struct Below final : Policy {
    bool archives;
    explicit Below(bool a) : archives(a) {}
    Needs needs() const override { return Needs{}.host_pages(!archives).archive(archives); }
    Demand demand(int, int) const override { return {-1, -1, 24}; }
  };
  const std::vector<Request> requests{{text(20, 1), {}, 6, 0}, {text(20, 2), {}, 6, 0}};
  for (const bool archives : {false, true})
    for (int pages = 1; pages <= 4; ++pages) {
      CAPTURE(archives, pages);
      EngineOptions o = options(2);
      o.host_limit = bytes_of(pages * page);
      Engine engine(tiny(), std::make_shared<Below>(archives), o);
      const Ran ran(engine, requests);
      CHECK(ran.most_rows == (pages >= 3 ? 2 : 1));
    }
}

TEST_CASE("a row whose pages are under way sits steps out, and the others go on") {
  // A prompt and a step both leave pages to come. They come with the next step or prompt of anybody, so the third
  // request always waits where the others run.
  const std::vector<Request> requests(3, {text(40, 1), {}, 8, 0});
  EngineOptions o = options(3);
  o.reload_steps = 1;
  Engine engine(tiny(), std::make_shared<Pausing>(), o);
  std::string order;
  SchedulerOptions how;
  how.clock = ticking();
  how.stepped = [&](double, const std::vector<std::int32_t>& slots) {
    for (const std::int32_t slot : slots) order += static_cast<char>('a' + slot);
    order += ' ';
    for (int slot = 0; slot < 3; ++slot)
      CHECK(engine.reloading(slot) == (std::count(slots.begin(), slots.end(), slot) > 0));
  };
  Scheduler s(engine, requests, how);
  run(s, engine);
  CHECK(order == "ab c ab c ab c ab c ab c ab c ab c ");
  for (const Served& one : s.served()) {
    CHECK(one.tokens == alone(requests[0], std::make_shared<Pausing>()));
    CHECK(one.preemptions == 0);
  }
  CHECK(s.served()[0].pauses == 6);
  CHECK(s.served()[2].pauses == 7);
  // Alone it waits in its own steps, which are no pauses.
  Engine another(tiny(), std::make_shared<Pausing>(), o);
  Scheduler one(another, {requests[0]}, {});
  run(one, another);
  CHECK(one.served()[0].tokens == s.served()[0].tokens);
  CHECK(one.served()[0].pauses == 0);
}

TEST_CASE("rows that wait for pages have their texts at any pace, also where memory is short") {
  const auto requests = ragged(24);
  std::vector<std::vector<int>> wanted;
  for (const Request& r : requests) wanted.push_back(alone(r, std::make_shared<Pausing>()));
  for (const int steps : {0, 1, 3})
    for (const std::int64_t limit : {std::int64_t{-1}, bytes_of(14 * page)})
      for (const int chunk : {0, 16}) {
        CAPTURE(steps, limit, chunk);
        EngineOptions o = options(6, limit);
        o.reload_steps = steps, o.prefill_chunk = chunk;
        Engine engine(tiny(), std::make_shared<Pausing>(), o);
        SchedulerOptions how;
        how.clock = ticking(), how.prefill_chunk = chunk;
        Scheduler s(engine, requests, how);
        run(s, engine);
        int pauses = 0;
        for (std::size_t i = 0; i < requests.size(); ++i) {
          CAPTURE(i);
          CHECK(s.served()[i].tokens == wanted[i]);
          pauses += s.served()[i].pauses;
        }
        // Rows that all wait do not: at a slow pace their steps may fall together.
        if (steps < 2) CHECK((pauses > 0) == (steps == 1));
        CHECK((preemptions(s) > 0) == (limit > 0));
      }
}

TEST_CASE("pages that a row waits for and the host has no room for end a request that runs alone") {
  for (const int steps : {0, 2}) {
    CAPTURE(steps);
    EngineOptions o = options(2);
    o.reload_steps = steps, o.host_limit = bytes_of(2 * page);
    Engine engine(tiny(), std::make_shared<Pausing>(), o);
    Scheduler s(engine, {{text(40, 1), {}, 8, 0}}, {});
    Fit fit = Fit::ok;
    for (int i = 0; i < 20 && fit == Fit::ok && !s.done(); ++i) fit = s.iterate();
    CHECK(fit == Fit::out_of_memory);
  }
}

// A limit of the process, as of `ulimit -v`: the copy's arenas find no address space.
TEST_CASE("a sequence that cannot be set aside for lack of memory stays as it is") {
  if (address_sanitizer) {
    WARN("not tested: AddressSanitizer ends a process that gets no memory");
    return;
  }
  const Request request{text(40, 1), {}, 8, 0};
  const std::vector<int> wanted = alone(request, std::make_shared<Nothing>());
  Engine engine(tiny(), std::make_shared<Nothing>(), options(1));
  const int slot = engine.open();
  REQUIRE(engine.prefill(slot, request.prompt, true, {}) == Fit::ok);
  const std::int64_t used = engine.used_bytes();
  {
    const NoAddressSpace none;
    CHECK_FALSE(engine.set_aside(slot));
  }
  CHECK(engine.used_bytes() == used);
  CHECK(engine.ledger().total(Tier::host) == 0);
  std::vector<std::int32_t> likeliest(1);
  for (std::size_t i = 0; i + 1 < wanted.size(); ++i) {
    REQUIRE(engine.step({slot}, {&wanted[i], 1}, StepResult(likeliest)) == Fit::ok);
    CHECK(likeliest[0] == wanted[i + 1]);
  }
  CHECK(engine.set_aside(slot));
}

// The host lacks frames for the pages that the prompt's edit writes down.
TEST_CASE("a sequence that waits for pages without frames is saved as it is, and goes on where there are some") {
  const Request request{text(40, 1), {}, 8, 0};
  const std::vector<int> wanted = alone(request, std::make_shared<Pausing>());
  EngineOptions o = options(1);
  o.reload_steps = 2, o.host_limit = bytes_of(2 * page);
  Engine tight(tiny(), std::make_shared<Pausing>(), o);
  const int slot = tight.open();
  REQUIRE(tight.prefill(slot, request.prompt, true, {}) == Fit::ok);
  REQUIRE(tight.reloading(slot));
  const SavedSequence saved = tight.save(slot);
  CHECK(tight.reloading(slot));
  CHECK_FALSE(tight.set_aside(slot));
  tight.store().check_invariants();
  for (const int steps : {0, 2}) {
    CAPTURE(steps);
    o.reload_steps = steps, o.host_limit = -1;
    Engine roomy(tiny(), std::make_shared<Pausing>(), o);
    const int there = roomy.open();
    REQUIRE(roomy.restore(there, saved) == Fit::ok);
    CHECK(roomy.reloading(there) == (steps > 0));
    std::vector<std::int32_t> likeliest(1);
    for (std::size_t i = 0; i + 1 < wanted.size(); ++i) {
      REQUIRE(roomy.step({there}, {&wanted[i], 1}, StepResult(likeliest)) == Fit::ok);
      CHECK(likeliest[0] == wanted[i + 1]);
    }
    roomy.store().check_invariants();
    o.reload_steps = 2, o.host_limit = bytes_of(2 * page);
  }
  o.reload_steps = 0;
  Engine another(tiny(), std::make_shared<Pausing>(), o);
  const int empty = another.open();
  CHECK(another.restore(empty, saved) == Fit::out_of_memory);
  CHECK(another.used_bytes() == 0);
  another.store().check_invariants();
}

TEST_CASE("the latest request is preempted, whatever slot it has") {
  // The first request ends at once and leaves slot 0 to the third, the latest. The second keeps slot 1.
  const std::vector<Request> requests{{text(8, 1), {}, 2, 0}, {text(16, 2), {}, 40, 0}, {text(16, 3), {}, 40, 0}};
  Engine engine(tiny(), std::make_shared<Nothing>(), options(2, bytes_of(64)));
  SchedulerOptions how;
  how.clock = ticking();
  Scheduler s(engine, requests, how);
  bool crossed = false;
  while (!s.done()) {
    REQUIRE(s.iterate() == Fit::ok);
    crossed |= s.slots() == std::vector<std::int32_t>{1, 0};
  }
  CHECK(crossed);
  CHECK(s.served()[1].preemptions == 0);
  CHECK(s.served()[2].preemptions > 0);
}

TEST_CASE("a prompt that is let in fits, and one that fits is let in") {
  // The unit is one page of every head of all 3 layers. The long prompt takes 15, one layer of it 5. If half of a
  // prompt stays, it leaves 7.5, as the first one tells (1 of 2 pages). If 8 tokens stay, it leaves 1. Further pages:
  // one for rounding, one per running request, and the second request's own.
  REQUIRE(tiny()->config.layers == 3);
  struct Case {
    std::shared_ptr<Policy> policy;
    int first, least, enough;  // tokens of the first prompt; pages for the long one alone, and beside the second
  };
  const Case cases[] = {{std::make_shared<Short>(1, 2), 16, 11, 18}, {std::make_shared<Short>(8), 120, 6, 11}};
  for (const Case& c : cases)
    for (int pages = c.least; pages <= 20; ++pages) {
      CAPTURE(c.first, pages);
      const std::vector<Request> requests{
          {text(c.first, 1), {}, 1, 0}, {text(8, 2), {}, 12, 0}, {text(120, 3), {}, 2, 0}};
      Engine engine(tiny(), c.policy, options(2, bytes_of(pages * page)));
      const Ran ran(engine, requests);
      CHECK(preemptions(ran.scheduler) == 0);
      if (pages >= c.enough) CHECK(ran.most_rows == 2);
    }
}

TEST_CASE("a prompt that is compressed behind its last layer is let in where all of it fits") {
  struct Late final : Policy {
    Needs needs() const override { return Needs{}.finish_prompt(true); }
    void finish_prompt(const LayerKv& kv, Edits& edits, Stream) override {
      const TokenList l = kv.list<TokenList>("kept", page);
      for (int h = 0; h < kv.kv_heads(); ++h) {
        l.count(0, h) = std::min(page, kv.pages.tokens(0, h));
        for (int t = 0; t < l.count(0, h); ++t) l.index(0, h, t) = t;
      }
      edits.evict_rest(l);
    }
  };
  // The long prompt takes 15 pages of each head. Beside it there are up to 3 of the second request, and one for each
  // running request.
  for (int pages = 15; pages <= 22; ++pages) {
    CAPTURE(pages);
    const std::vector<Request> requests{{text(120, 1), {}, 1, 0}, {text(8, 2), {}, 12, 0}, {text(120, 3), {}, 2, 0}};
    Engine engine(tiny(), std::make_shared<Late>(), options(2, bytes_of(pages * page)));
    const Ran ran(engine, requests);
    CHECK(preemptions(ran.scheduler) == 0);
    if (pages >= 20) CHECK(ran.most_rows == 2);
  }
}

TEST_CASE("a prompt that is let in leaves room for its first token and everybody's next one") {
  // The prompts fill 1 page and 2 pages. The token that each is fed takes a page more.
  const std::vector<Request> requests{{text(8, 1), {}, 2, 0}, {text(16, 2), {}, 2, 0}};
  for (int pages = 3; pages <= 7; ++pages) {
    CAPTURE(pages);
    Engine engine(tiny(), std::make_shared<Nothing>(), options(2, bytes_of(pages * page)));
    const Ran ran(engine, requests);
    CHECK(preemptions(ran.scheduler) == 0);
    CHECK(ran.most_rows == (pages >= 5 ? 2 : 1));
  }
}

TEST_CASE("what does not fit alone is out of memory, in its prompt or in its answer; what just fits runs") {
  const Request r{text(16, 1), {}, 10, 0};  // holds 25 tokens, because the last one is not fed
  for (const int tokens : {8, 24, 32}) {
    CAPTURE(tokens);
    Engine engine(tiny(), std::make_shared<Nothing>(), options(4, bytes_of(tokens)));
    Scheduler s(engine, {r, r, r}, {});
    Fit fit = Fit::ok;
    while (fit == Fit::ok && !s.done()) fit = s.iterate();
    CHECK((fit == Fit::ok) == (tokens == 32));
  }
}

TEST_CASE("requests come in at their arrivals, and nobody waits for an empty engine's next one") {
  std::vector<Request> requests;
  for (const double at : {5000., 0., 1e6}) requests.push_back({text(6, 1), {}, 4, at});
  Engine engine(tiny(), std::make_shared<Nothing>(), options(2));
  SchedulerOptions how;
  how.clock = ticking();
  std::vector<std::size_t> order;
  how.finished = [&](std::size_t i) { order.push_back(i); };
  Scheduler s(engine, requests, how);
  run(s, engine);
  CHECK(order == std::vector<std::size_t>{1, 0, 2});
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Served& one = s.served()[i];
    CHECK(one.arrival_ms == requests[i].arrival_ms);
    CHECK(one.admitted_ms >= one.arrival_ms);
    CHECK(one.admitted_ms < one.arrival_ms + 100);
    CHECK(one.token_ms.front() > one.admitted_ms);
  }
}

TEST_CASE("prompts of other requests come between the tokens of one, a chunk at a time") {
  Engine engine(tiny(), std::make_shared<Nothing>(), [] {
    EngineOptions o = options(4);
    o.prefill_chunk = 16;
    return o;
  }());
  // First a prompt of 3 tokens, then 4 chunks of a prompt beside its steps. The two short prompts share an iteration.
  std::vector<Request> requests{
      {text(3, 1), {}, 20, 0}, {text(60, 2), {}, 2, 0}, {text(7, 3), {}, 2, 0}, {text(8, 4), {}, 2, 0}};
  std::string order;
  SchedulerOptions how;
  how.prefill_chunk = 16;
  how.clock = ticking();
  how.prompted = [&](double) { order += 'p'; };
  how.stepped = [&](double, const auto& slots) { order += static_cast<char>('0' + slots.size()); };
  Scheduler s(engine, requests, how);
  run(s, engine);
  CHECK(order.substr(0, 13) == "p1p1p1p1p2pp3");
}

TEST_CASE("an answer ends at the token that ends answers") {
  const Request r{text(9, 5), {}, 20, 0};
  const auto whole = alone(r, std::make_shared<Nothing>());
  const int last = whole[4];
  const auto end = std::find(whole.begin(), whole.end(), last) + 1;
  Engine engine(tiny(), std::make_shared<Nothing>(), options(1));
  SchedulerOptions how;
  how.ends = [&](int token) { return token == last; };
  Scheduler s(engine, {r}, how);
  run(s, engine);
  CHECK(s.served()[0].tokens == std::vector<int>(whole.begin(), end));
  CHECK(s.served()[0].ended);
}

TEST_CASE("an answer ends with the tokens that its request's stop texts say") {
  const Request r{text(9, 5), {}, 20, 0}, other{text(7, 6), {}, 6, 0};
  const auto whole = alone(r, std::make_shared<Nothing>());
  Engine engine(tiny(), std::make_shared<Nothing>(), options(2));
  SchedulerOptions how;
  how.stops = [&](std::size_t request, const std::vector<int>& tokens) { return request == 1 && tokens.size() == 5; };
  Scheduler s(engine, {other, r}, how);
  run(s, engine);
  CHECK(s.served()[0].tokens.size() == 6);
  CHECK(!s.served()[0].stopped);
  CHECK(s.served()[1].tokens == std::vector<int>(whole.begin(), whole.begin() + 5));
  CHECK(s.served()[1].stopped);
  CHECK(!s.served()[1].ended);
}

TEST_CASE("requests that cannot run are refused") {
  Engine engine(tiny(), std::make_shared<Nothing>(), options(1));
  const auto refused = [&](Request r) { CHECK_THROWS_AS(Scheduler(engine, {std::move(r)}, {}), Error); };
  refused({{}, {}, 1, 0});
  refused({text(3, 1), {}, 0, 0});
  refused({text(room, 1), {}, 1, 0});
}
