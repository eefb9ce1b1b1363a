// device_memory on the GPU: what the runtime hands out for the cache stays below the cap.
#include <catch2/catch.hpp>

#include <algorithm>
#include <map>

#include "base/backend.hpp"
#include "support/cell_fixture.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// While it lives, counts the bytes of device memory that are taken through the runtime and not yet freed.
class Counted {
 public:
  Counted() : table_(require_cuda("a test")) {
    real_ = &table_.runtime;
    counting_ = table_;
    counting_.runtime.allocate = [](std::size_t bytes) {
      void* memory = real_->allocate(bytes);
      if (memory) live_[memory] = bytes, now_ += bytes, most_ = std::max(most_, now_);
      return memory;
    };
    counting_.runtime.free = [](void* memory) {
      if (const auto known = live_.find(memory); known != live_.end()) now_ -= known->second, live_.erase(known);
      real_->free(memory);
    };
    live_.clear(), now_ = most_ = 0;
    replace_cuda_backend(&counting_);
  }
  ~Counted() { replace_cuda_backend(nullptr); }
  std::int64_t most() const { return static_cast<std::int64_t>(most_); }

 private:
  const CudaBackend& table_;
  CudaBackend counting_;
  static inline const CudaRuntime* real_ = nullptr;
  static inline std::map<void*, std::size_t> live_;
  static inline std::size_t now_ = 0, most_ = 0;
};

struct Taken {
  std::int64_t all = 0, store = 0;  // bytes: of an engine at work, and of its store alone
};

Taken taken(const std::shared_ptr<const Model>& model, const PolicySpec& spec, const EngineOptions& o) {
  StoreOptions of_store;
  Taken out;
  {
    const Counted counted;
    Engine engine(model, subjects().policy(spec, *model), o);
    std::vector<std::int32_t> slots;
    for (int i = 0; i < o.slots; ++i) {
      slots.push_back(engine.open());
      REQUIRE(engine.prefill(slots.back(), test_text(40, model->config.vocab), true, {}) == Fit::ok);
    }
    const std::vector<int> tokens(slots.size(), 7);
    std::vector<std::int32_t> likeliest(slots.size());
    for (int i = 0; i < 20; ++i) REQUIRE(engine.step(slots, tokens, StepResult(likeliest)) == Fit::ok);
    engine.store().check_invariants();
    out.all = counted.most();
    of_store = engine.store().options();
  }
  const Counted counted;
  const OwnedStream stream(Device::cuda);
  make_store(of_store, stream.get());
  out.store = counted.most();
  return out;
}

}  // namespace

TEST_CASE("cuda memory: what the cache takes on the device stays below device_memory") {
  const auto model = fresh_tiny_model("llama-gqa3", DType::bf16, Device::cuda);
  const auto limited = [&](const PolicySpec& spec, int chunk) {
    EngineOptions o;
    o.device = Device::cuda;
    o.slots = 3;
    o.max_tokens = 96;
    o.page_size = spec.page_size;
    o.prefill_chunk = chunk;
    o.budget = spec.budget;
    const auto policy = [&] { return subjects().policy(spec, *model); };
    const CacheMemory m = Engine::memory(*model, *policy(), o);
    const std::int64_t cap =
        m.beside_pages() + 30 * m.heads * m.page;  // all three sequences could have 36 pages a head
    Engine::fit(o, cap, *model, *policy());
    return std::pair(o, cap);
  };
  for (const int chunk : {0, 16}) {
    const auto [plain, of_plain] = limited(full_spec(), chunk);
    const Taken full = taken(model, full_spec(), plain);
    const std::int64_t executor = full.all - full.store;
    CHECK(full.store <= of_plain);
    for (const char* text :
         {"{quest: {dense_layers: 0, budget: {tokens: 24}}}",
          "{quest: {dense_layers: 0, budget: {tokens: 24}, placement: {tier: host, resident: 16}}}",
          "{flexicache: {unstable_heads: false, budget: {tokens: 32}, rerank_every: 4}}",
          "{flexicache: {unstable_heads: false, budget: {tokens: 32}, rerank_every: 1, pause: true}}",
          "{freekv: {sinks: 8, window: 8, budget: {tokens: 32}}}", "{snapkv: {budget: {tokens: 24}, window: 8}}",
          "{h2o: {budget: {tokens: 24}}}"}) {
      CAPTURE(chunk, text);
      const PolicySpec spec = policy_of(text, 8);
      const auto [o, cap] = limited(spec, chunk);
      const std::int64_t cache = taken(model, spec, o).all - executor;
      CAPTURE(cap, cache);
      CHECK(cache <= cap);
      CHECK(cache > cap * 3 / 4);
    }
  }
}

TEST_CASE("cuda memory: mass that waits for a step's end counts as it is taken") {
  const auto model = fresh_tiny_model("llama-gqa3", DType::bf16, Device::cuda);
  for (const int page : {8, 16}) {  // shares of pages of 8 tokens do not wait
    CAPTURE(page);
    const PolicySpec spec = policy_of("{h2o: {budget: {tokens: 32}}}", page);
    std::int64_t all[2], mass[2];
    for (const bool graphs : {false, true}) {
      EngineOptions o;
      o.device = Device::cuda;
      o.slots = 3;
      o.max_tokens = 96;
      o.page_size = page;
      o.budget = spec.budget;
      o.graphs = graphs;
      mass[graphs] = Engine::memory(*model, *subjects().policy(spec, *model), o).mass;
      all[graphs] = taken(model, spec, o).all;
    }
    CHECK(all[1] - all[0] == mass[1] - mass[0]);
    CHECK((mass[1] > mass[0]) == (page == 16));
  }
}
