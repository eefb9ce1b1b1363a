// Requests served on the GPU: free memory limits admission, and a batch changes no bit of a row.
#include <catch2/catch.hpp>

#include <algorithm>

#include "base/backend.hpp"
#include "engine/scheduler.hpp"
#include "model/bundled.hpp"
#include "support/cell_fixture.hpp"
#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

std::shared_ptr<const Model> model() {
  static auto& known = *new std::shared_ptr<const Model>(fresh_tiny_model("llama-gqa3", DType::bf16, Device::cuda));
  return known;
}

// A model whose hidden size lets products leave and take its norms.
const std::string wide_name = "synthetic/tiny-wide";
std::shared_ptr<const Model> wide_model() {
  static auto& known = *new std::shared_ptr<const Model>(
      load_model(*open_model(wide_name, "", ""), DType::bf16, wide_name, Device::cuda));
  return known;
}

EngineOptions options(int slots, int chunk) {
  EngineOptions o;
  o.device = Device::cuda;
  o.slots = slots;
  o.max_tokens = 96;
  o.page_size = 8;
  o.prefill_chunk = chunk;
  o.batch_invariant = true;
  return o;
}

// Prompts of 1 to 60 tokens and answers of 1 or `longest`. Every fifth request has fed tokens.
std::vector<Request> ragged(int count, int vocab, int longest = 32) {
  std::vector<Request> out;
  for (int i = 0; i < count; ++i) {
    Request r;
    r.prompt = test_text(1 + (i * 37) % 60, vocab, static_cast<unsigned>(i) + 1);
    if (i % 5 == 0) r.fed = test_text(1 + i % 3, vocab, static_cast<unsigned>(i) + 100);
    r.max_new = i % 4 == 0 ? 1 : longest;
    out.push_back(std::move(r));
  }
  return out;
}

struct Outcome {
  std::vector<std::vector<int>> texts;
  int preemptions = 0, pauses = 0, together = 0;
  std::int64_t replays = 0;
  std::size_t rows = 0;  // of all steps
};

Outcome serve(const std::shared_ptr<const Model>& m, const PolicySpec& spec, const std::vector<Request>& requests,
              const EngineOptions& o, Preemption preemption = Preemption::swap) {
  Engine engine(m, subjects().policy(spec, *m), o);
  SchedulerOptions how;
  how.prefill_chunk = o.prefill_chunk;
  how.preemption = preemption;
  Outcome out;
  how.stepped = [&](double, const std::vector<std::int32_t>& rows) {
    out.rows += rows.size();
    out.together = std::max(out.together, static_cast<int>(rows.size()));
    CHECK((o.device == Device::cpu || engine.device_ms() >= 0));
  };
  Scheduler scheduler(engine, requests, how);
  while (!scheduler.done()) REQUIRE(scheduler.iterate() == Fit::ok);
  engine.store().check_invariants();
  for (const Served& s : scheduler.served()) {
    out.texts.push_back(s.tokens);
    out.preemptions += s.preemptions;
    out.pauses += s.pauses;
  }
  out.replays = engine.replays();
  return out;
}

Outcome serve(const std::shared_ptr<const Model>& m, const std::vector<Request>& requests, int slots, int chunk) {
  return serve(m, full_spec(), requests, options(slots, chunk));
}

std::size_t free_memory = 0;
// Makes the device report `bytes` as its free memory.
class FreeMemory {
 public:
  explicit FreeMemory(std::int64_t bytes) : table_(*cuda_backend()) {
    free_memory = static_cast<std::size_t>(bytes);
    table_.runtime.free_bytes = [] { return free_memory; };
    replace_cuda_backend(&table_);
  }
  ~FreeMemory() { replace_cuda_backend(nullptr); }
  FreeMemory(const FreeMemory&) = delete;

 private:
  CudaBackend table_;
};

// Nobody finds that an event has passed, so copies are under way until somebody waits for them.
class LateEvents {
 public:
  LateEvents() : table_(*cuda_backend()) {
    table_.runtime.passed = [](void*) { return false; };
    replace_cuda_backend(&table_);
  }
  ~LateEvents() { replace_cuda_backend(nullptr); }
  LateEvents(const LateEvents&) = delete;

 private:
  CudaBackend table_;
};

}  // namespace

TEST_CASE("cuda serving: without a cap the device's free memory is the limit") {
  const std::int64_t all = 4 * Engine(model(), subjects().policy(full_spec()), options(4, 0)).full_bytes(96);
  {
    const Engine engine(model(), subjects().policy(full_spec()), options(4, 0));
    CHECK(engine.free_bytes() == Engine::no_limit);  // room for every slot
  }
  const FreeMemory little(all / 3);
  Engine engine(model(), subjects().policy(full_spec()), options(4, 0));
  const std::int64_t room = engine.free_bytes();
  CHECK(room < all / 3);
  CHECK(room > all / 4);
  const int slot = engine.open();
  REQUIRE(engine.prefill(slot, test_text(50, model()->config.vocab), true, {}) == Fit::ok);
  CHECK(engine.free_bytes() == room - engine.full_bytes(50));
  engine.close(slot);
  CHECK(engine.free_bytes() == room);
}

TEST_CASE("cuda serving: ragged requests in little memory have the texts that they have alone") {
  const auto models = {model(), wide_model()};
  for (const auto& m : models) {
    CAPTURE(m->name);
    const auto requests = ragged(quick() ? 8 : 64, m->config.vocab);
    int preemptions = 0;
    for (const int chunk : {0, 16}) {
      if (quick() && m != *models.begin() && chunk == 0) continue;
      CAPTURE(chunk);
      const Outcome alone = serve(m, requests, 1, chunk);
      const std::int64_t sequence = Engine(m, subjects().policy(full_spec()), options(1, 0)).full_bytes(96);
      const FreeMemory little(sequence * 3 / 2);
      for (const Preemption preemption : {Preemption::swap, Preemption::recompute}) {
        // The quick set has one of both ways for each chunk.
        if (quick() && (preemption == Preemption::swap) != (chunk == 0 || m != *models.begin())) continue;
        CAPTURE(static_cast<int>(preemption));
        const Outcome together = serve(m, full_spec(), requests, options(20, chunk), preemption);
        CHECK(together.texts == alone.texts);
        // A cache that comes back is as large as it was. One that is computed again lets others in meanwhile.
        CHECK(together.together > (preemption == Preemption::swap ? 1 : 2));
        CHECK(together.replays > 0);
        preemptions += together.preemptions;
      }
    }
    CHECK(preemptions > 0);
  }
}

TEST_CASE("cuda serving: a sequence whose pages are under way sits steps out, and the others go on") {
  const auto m = model();
  const LateEvents late;
  const PolicySpec paused =
      test::policy_of("{flexicache: {unstable_heads: false, pause: true, rerank_every: 4, budget: {tokens: 24}}}", 8);
  for (const Spill spill : {Spill::always, Spill::pressure}) {
    CAPTURE(static_cast<int>(spill));
    const auto requests = ragged(quick() ? 8 : 24, m->config.vocab, quick() && spill == Spill::always ? 16 : 32);
    EngineOptions o = options(1, 16);
    o.budget = paused.budget;
    o.spill = spill;
    const Outcome alone = serve(m, paused, requests, o);
    o.slots = 6;
    if (spill == Spill::pressure) o.device_limit = Engine(m, subjects().policy(paused), o).full_bytes(96) * 2;
    const Outcome together = serve(m, paused, requests, o);
    CHECK(together.texts == alone.texts);
    CHECK(alone.pauses == 0);  // it would run alone
    CHECK(together.pauses > 0);
    CHECK(together.together > 2);
    CHECK(together.replays > 0);
  }
}

TEST_CASE("cuda serving: a sequence may be closed or saved while its pages are under way") {
  const auto m = model();
  const PolicySpec paused =
      test::policy_of("{flexicache: {unstable_heads: false, pause: true, rerank_every: 1, budget: {tokens: 24}}}", 8);
  EngineOptions o = options(3, 0);
  o.budget = paused.budget;
  const LateEvents late;
  Engine engine(m, subjects().policy(paused), o), other(m, subjects().policy(paused), o);
  const auto open = [&](Engine& e, unsigned seed) {
    const int slot = e.open();
    REQUIRE(e.prefill(slot, test_text(60, m->config.vocab, seed), true, {}) == Fit::ok);
    return slot;
  };
  const auto step = [&](Engine& e, int slot, int token) {
    std::vector<std::int32_t> likeliest(1);
    const std::vector<int> tokens{token};
    REQUIRE(e.step({slot}, tokens, StepResult(likeliest)) == Fit::ok);
    return likeliest[0];
  };
  open(other, 3);
  other.store().check_invariants();
  other.close(0);
  const int a = open(engine, 1), b = open(engine, 2);
  CHECK(engine.reloading(a));
  CHECK(engine.reloading(b));
  step(engine, a, 5);
  const SavedSequence saved = engine.save(a);
  CHECK(!engine.reloading(a));
  REQUIRE(other.open() == 0);
  REQUIRE(other.restore(0, saved) == Fit::ok);
  int token = 6;
  for (int i = 0; i < 9; ++i) {
    const int next = step(engine, a, token);
    CHECK(step(other, 0, token) == next);
    token = next;
  }
  CHECK(engine.reloading(a));
  engine.close(a);
  engine.store().check_invariants();
  step(engine, b, 3);
  engine.close(b);
  CHECK(engine.used_bytes() == 0);
  CHECK(engine.host_used_bytes() == 0);
}

TEST_CASE("cuda serving: sequences spill to make room for others, as far as the host has room") {
  int known = 0;
  for (const Subject& s : subjects().list()) {
    if (s.label != "freekv" && s.label != "flexicache") continue;
    CAPTURE(s.label);
    ++known;
    const PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, 40);
    const int vocab = model()->config.vocab;
    std::vector<Request> requests(4);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      requests[i].prompt = test_text(116, vocab, static_cast<unsigned>(i) + 1);
      requests[i].max_new = 12;
    }
    EngineOptions o = options(4, 0);
    o.page_size = 8;
    o.max_tokens = 128;
    o.budget = spec.budget;
    o.spill = Spill::pressure;
    const auto [alone, sequence] = [&] {
      EngineOptions one = o;
      one.slots = 1;
      return std::pair(serve(model(), spec, requests, one).texts,
                       Engine(model(), subjects().policy(full_spec()), one).full_bytes(128));
    }();
    o.device_limit = sequence * 5 / 2;
    o.host_limit = sequence * 4;
    const Outcome roomy = serve(model(), spec, requests, o);
    CHECK(roomy.texts == alone);
    CHECK(roomy.together > 2);
    CHECK(roomy.preemptions == 0);
    CHECK(roomy.replays > 0);
    o.host_limit = sequence;
    const Outcome narrow = serve(model(), spec, requests, o);
    CHECK(narrow.texts == alone);
    CHECK(narrow.together <= roomy.together);
    o.device_limit = -1;
    o.spill = Spill::always;
    o.host_limit = sequence * 3 / 2;
    const Outcome below = serve(model(), spec, requests, o);
    CHECK(below.texts == alone);
    CHECK(below.preemptions <= 1);  // of the second request, before a prompt has shown what it leaves
  }
  CHECK(known == 2);
}

// Answers are long, so requests are set aside while others spill, and come back beside them.
TEST_CASE("serving: requests that come back fit where others have pages to spare, and have the texts they have alone") {
  int known = 0;
  for (const Subject& s : subjects().list()) {
    if (s.label != "freekv" && s.label != "flexicache") continue;
    ++known;
    const PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, 40);
    for (const Device device : {Device::cpu, Device::cuda}) {
      CAPTURE(s.label, static_cast<int>(device));
      const auto m = device == Device::cuda ? model() : fresh_tiny_model("llama-gqa3", DType::bf16, device);
      std::vector<Request> requests(quick() ? 3 : 5);
      for (std::size_t i = 0; i < requests.size(); ++i) {
        requests[i].prompt = test_text(40 + 8 * static_cast<int>(i), m->config.vocab, static_cast<unsigned>(i) + 1);
        requests[i].max_new = 40;
      }
      EngineOptions o = options(1, 0);
      o.device = device;
      o.batch_invariant = device == Device::cuda;
      o.max_tokens = 128;
      o.budget = spec.budget;
      o.spill = Spill::pressure;
      const std::int64_t sequence = Engine(m, subjects().policy(full_spec()), o).full_bytes(96);
      const Outcome alone = serve(m, spec, requests, o);
      o.slots = 3;
      int preemptions = 0;
      for (const int eighths : {10, 12})
        for (const int on_host : {1, 4}) {
          if (quick() && device == Device::cuda && on_host == 4) continue;
          CAPTURE(eighths, on_host);
          o.device_limit = sequence * eighths / 8;
          o.host_limit = sequence * on_host;
          const Outcome together = serve(m, spec, requests, o);
          CHECK(together.texts == alone.texts);
          preemptions += together.preemptions;
        }
      CHECK(preemptions > 0);
    }
  }
  CHECK(known == 2);
}

// The first step brings all that it chooses: no page leaves for it. How many pages later ones need follows from the
// text. A step that finds too few frames is of no use and runs again with fewer rows. One row alone is out of memory.
TEST_CASE("serving: steps that bring more pages than leave need frames, and fewer rows where there are too few") {
  const PolicySpec spec =
      test::policy_of("{omnikv: {filter_layers: '0', wait_layers: 0, offload: true, budget: {tokens: 24}}}", 8);
  for (const Device device : {Device::cpu, Device::cuda}) {
    CAPTURE(static_cast<int>(device));
    const auto m = device == Device::cuda ? model() : fresh_tiny_model("llama-gqa3", DType::bf16, device);
    std::vector<Request> requests(3);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      requests[i].prompt = test_text(96, m->config.vocab, static_cast<unsigned>(i) + 1);
      requests[i].max_new = quick() ? 10 : 24;
    }
    EngineOptions o = options(1, 0);
    o.device = device;
    o.batch_invariant = device == Device::cuda;
    o.max_tokens = 128;
    o.budget = spec.budget;
    const std::int64_t sequence = Engine(m, subjects().policy(full_spec()), o).full_bytes(128);
    const Outcome alone = serve(m, spec, requests, o);
    o.slots = 3;
    int preemptions = 0;
    for (const Spill spill : {Spill::always, Spill::pressure})
      for (const int eighths : {8, 10, 12, 16}) {
        if (quick() && eighths % 3 != 1) continue;
        CAPTURE(static_cast<int>(spill), eighths);
        o.spill = spill;
        o.device_limit = sequence * eighths / 8;
        const Outcome together = serve(m, spec, requests, o);
        CHECK(together.texts == alone.texts);
        preemptions += together.preemptions;
      }
    CHECK(preemptions > 0);
    for (const int slots : {1, 3})
      for (const int eighths : {5, 6}) {
        CAPTURE(slots, eighths);
        o.slots = slots;
        o.device_limit = sequence * eighths / 8;
        Engine engine(m, subjects().policy(spec, *m), o);
        Scheduler scheduler(engine, requests, {});
        Fit fit = Fit::ok;
        while (fit == Fit::ok && !scheduler.done()) fit = scheduler.iterate();
        CHECK(fit == Fit::out_of_memory);
      }
  }
}

TEST_CASE("cuda serving: a policy of two codecs loses no cache when memory is short, and needs no limit") {
  const auto m = model();
  const int vocab = m->config.vocab;
  std::vector<Request> requests(6);
  std::size_t fed = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = test_text(40, vocab, static_cast<unsigned>(i) + 1);
    requests[i].max_new = quick() ? 20 : 50;
    fed += static_cast<std::size_t>(requests[i].max_new - 1);
  }
  for (const char* text : {"{leankv: {window: 8, high_from: 1.2, low_from: 0.3}}",
                           "{leankv: {window: 8, low_from: 0, token_differentiation: false}}"}) {
    CAPTURE(text);
    const PolicySpec spec = test::policy_of(text, 8);
    EngineOptions o = options(1, 0);
    const std::int64_t sequence = Engine(m, subjects().policy(spec), o).full_bytes(96);
    const Outcome alone = serve(m, spec, requests, o);
    o.slots = 6;
    CHECK(serve(m, spec, requests, o).texts == alone.texts);
    int preemptions = 0;
    for (const std::int64_t eighths : {14, 18, 22}) {
      if (quick() && eighths == 22) continue;
      o.device_limit = sequence * eighths / 8;
      const Outcome together = serve(m, spec, requests, o);
      CAPTURE(eighths);
      CHECK(together.texts == alone.texts);
      CHECK(together.rows == fed);  // no token is fed twice
      CHECK(together.together > 1);
      preemptions += together.preemptions;
    }
    CHECK(preemptions > 0);
  }
}

TEST_CASE("cuda serving: plans of the host change no text, and take no graph") {
  const auto m = model();
  std::vector<Request> requests(3);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = test_text(40, m->config.vocab, static_cast<unsigned>(i) + 1);
    requests[i].max_new = 40;
  }
  EngineOptions o = options(3, 0);
  const auto spec = [&](const char* more) {
    return test::policy_of(std::string("{leankv: {window: 8, high_from: 1.2, low_from: 0.3") + more + "}}", 8);
  };
  const PolicySpec device = spec(""), host = spec(", device_compaction: false");
  CHECK(subjects().policy(device)->needs().capturable());
  CHECK_FALSE(subjects().policy(host)->needs().capturable());
  CHECK(serve(m, host, requests, o).texts == serve(m, device, requests, o).texts);
}

TEST_CASE("cuda serving: more rows than a streaming product takes change no bit of one") {
  constexpr int rows = 21;
  // The kernel that shares rows among blocks takes this model's heads.
  const std::shared_ptr<const Model> wide = wide_model();
  const int vocab = wide->config.vocab;
  Engine engine(wide, subjects().policy(full_spec()), options(rows, 0));
  // Attention outputs of the first layer, before products round them.
  struct Outputs final : EngineObserver {
    std::vector<float> seen;
    Prompt reads_of_prompt() const override { return Prompt::nothing; }
    void attended(const DecodeLayer& l, const Store&) override {
      const auto n = l.output.extent[0] * l.output.extent[1] * l.output.extent[2];
      if (l.layer == 0) seen.insert(seen.end(), l.output.data, l.output.data + n);
    }
  } each, all;
  engine.observe(&each);
  std::vector<std::int32_t> slots;
  std::vector<int> tokens;
  std::vector<float> alone(static_cast<std::size_t>(rows * vocab)), together(alone.size());
  const auto view = [&](std::vector<float>& v, int row, int count) {
    return View<float, 2>::dense(v.data() + row * vocab, {count, vocab});
  };
  for (int r = 0; r < rows; ++r) {
    const int slot = engine.open();
    tokens.push_back(5 + r);
    REQUIRE(engine.prefill(slot, test_text(4 + 3 * r, vocab, static_cast<unsigned>(r)), true, {}) == Fit::ok);
    const auto before = engine.save(slot);
    REQUIRE(engine.step({slot}, {&tokens.back(), 1}, view(alone, r, 1)) == Fit::ok);
    REQUIRE(engine.restore(slot, before) == Fit::ok);
    slots.push_back(slot);
  }
  engine.observe(&all);
  REQUIRE(engine.step(slots, tokens, view(together, 0, rows)) == Fit::ok);
  CHECK(together == alone);
  CHECK(all.seen.size() == static_cast<std::size_t>(rows) * 4 * 64);
  CHECK(all.seen == each.seen);
}
