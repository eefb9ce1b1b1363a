// Profilers on a GPU: the mirror shows them the device's cache, and their profile is the CPU's.
#include "run/profile.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <fstream>

#include "base/half.hpp"
#include "engine/host_mirror.hpp"
#include "result/profile_file.hpp"
#include "store/cuda_store.hpp"
#include "support/contract.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;

namespace {

const Shape& shape_of(const Engine& engine) { return engine.store().shape(); }

template <class T, int Rank>
std::vector<T> fetched(const View<const T, Rank>& from, Stream s) {
  std::int64_t span = 1;
  for (int d = 0; d < Rank; ++d) span += (from.extent[d] - 1) * from.stride[d];
  std::vector<T> out(static_cast<std::size_t>(span));
  copy_memory(out.data(), from.data, out.size() * sizeof(T), s);
  synchronize(s);
  return out;
}

// Reads the mirror at every callback, and compares with the device where that needs no store.
class Looks final : public Policy {
 public:
  Needs needs() const override { return Needs{}.page_summary(Summary::min_max).mass(Mass::all).window_queries(5); }
  void attach(const Shape& shape, const BudgetAmount&, Workspace&) override { mirror.emplace(shape, Summary::min_max); }
  void prefill(const LayerPrefill& there, Edits&, Stream s) override {
    const LayerPrefill here = mirror->of(there, s);
    compare(there.mass, here.mass, s);
    REQUIRE(static_cast<bool>(here.window_queries) == there.last[0]);
    if (!there.last[0]) return;
    compare(there.window_queries.f32(), here.window_queries.f32(), s);
    ++windows;
  }
  void observe(const LayerStep& there, Edits&, Stream s) override {
    const LayerStep here = mirror->of(there, s);
    compare(there.queries.f32(), here.queries.f32(), s);
    compare(there.output.f32(), here.output.f32(), s);
    for (int row = 0; row < here.rows(); ++row) {
      CHECK(here.pages.tokens(row, 0) == here.position[row]);
      CHECK(here.question[here.slots[row]] == (here.slots[row] == asking ? 7u : 0u));
      for (int head = 0; head < here.shape->query_heads; ++head) {
        double sum = 0;
        for (int t = 0; t < here.pages.tokens(row, 0); ++t) sum += static_cast<double>(here.mass(row, head, t));
        CHECK(sum == Approx(1).margin(1e-4));
      }
    }
    last = here;
    last.question = there.question;
  }
  void release(int slot) override { mirror->release(slot); }

  std::optional<HostMirror> mirror;
  LayerStep last;
  int windows = 0, asking = -1;  // asking: the slot at question 7

 private:
  template <int Rank>
  void compare(const View<const float, Rank>& there, const View<const float, Rank>& here, Stream s) {
    REQUIRE(there.extent == here.extent);
    const std::vector<float> device = fetched(there, s);
    std::array<std::int64_t, Rank> at{};
    for (bool more = true; more;) {
      std::int64_t a = 0, b = 0;
      for (std::size_t d = 0; d < Rank; ++d) a += at[d] * there.stride[d], b += at[d] * here.stride[d];
      const float x = device[static_cast<std::size_t>(a)], y = here.data[b];
      if (std::memcmp(&x, &y, sizeof x) != 0) FAIL("got " << y << " at " << b << ", wanted " << x);
      int d = Rank - 1;
      while (d >= 0 && ++at[static_cast<std::size_t>(d)] == there.extent[static_cast<std::size_t>(d)])
        at[static_cast<std::size_t>(d--)] = 0;
      more = d >= 0;
    }
  }
};

float element(const std::byte* row, DType dtype, int i) {
  if (dtype == DType::f32) return reinterpret_cast<const float*>(row)[i];
  const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(row)[i];
  if (dtype == DType::f16) return half_to_float(bits);
  bf16 value;
  value.bits = bits;
  return static_cast<float>(value);
}

// Compares every token and every summary of a slot.
void compare_slot(const Engine& engine, HostMirror& mirror, LayerStep& callback, int slot) {
  const auto device = dynamic_cast<const CudaStore&>(engine.store()).copy_of(slot);
  const Shape& s = shape_of(engine);
  for (int layer = 0; layer < s.layers; ++layer) {
    callback.layer = layer;
    const LayerStep here = mirror.of(callback, engine.store().stream());
    const PagedKv there = device->view(layer, {0});
    const Summaries summaries = device->summaries(layer);
    const int row = static_cast<int>(std::find(here.slots, here.slots + here.rows(), slot) - here.slots);
    REQUIRE(row < here.rows());
    for (int head = 0; head < s.kv_heads; ++head) {
      const int tokens = device->length(layer, 0, head);
      REQUIRE(here.pages.tokens(row, head) == tokens);
      for (int page = 0; page * s.page_size < tokens; ++page) {
        const PageEntry &a = there.table(0, head, page), &b = here.pages.entry(row, head, page);
        const PageLayout &la = there.layout(a), &lb = here.pages.layout(b);
        const std::byte *fa = there.frame(a), *fb = here.pages.frame(b);
        for (int t = 0; t < std::min(s.page_size, tokens - page * s.page_size); ++t) {
          CHECK(reinterpret_cast<const std::int32_t*>(fa + la.positions)[t] ==
                reinterpret_cast<const std::int32_t*>(fb + lb.positions)[t]);
          for (const auto side : {&PageLayout::k, &PageLayout::v})
            for (int i = 0; i < s.head_dim; ++i)
              if (element(fa + la.*side, la.dtype, t * s.head_dim + i) !=
                  element(fb + lb.*side, lb.dtype, t * s.head_dim + i))
                FAIL("layer " << layer << " head " << head << " token " << page * s.page_size + t << " element " << i);
        }
        for (int i = 0; i < 2 * s.head_dim; ++i)
          if (element(summaries.at(0, head, page), summaries.dtype, i) !=
              element(here.summaries.at(slot, head, page), here.summaries.dtype, i))
            FAIL("layer " << layer << " head " << head << " page " << page << " summary " << i);
      }
    }
  }
}

Profile profile(const std::string& profiler, const std::string& backend, const std::string& dtype = "bf16") {
  Registry registry;
  const RegistryCatalog catalog(registry);
  const test::TempDir folder;
  const std::string out = (folder / "p.h5").string();
  std::ofstream(folder / "e.yaml") << "model: {path: " << test::golden("tiny/llama-gqa3").string()
                                   << ", dtype: " << dtype << "}\nbackend: " << backend
                                   << "\ntasks: [text: {prefix: 60, forced: 16, samples: 2}]\nprofilers: [" << profiler
                                   << "]\npage_size: 8\nprefill_chunk: 40\noutput: " << out << "\n";
  const int code = run_profile(load_experiment(folder / "e.yaml", {}, catalog), catalog, {"test", false, true});
  REQUIRE(code == 0);
  const results::ProfileFile file = results::read_profile(out);
  CHECK(file.model_fingerprint.size() == 16);
  return file.profilers.at(0).profile;
}

}  // namespace

TEST_CASE("cuda profile: the mirror of a ragged batch holds what the GPU holds") {
  const DType dtype = GENERATE(DType::bf16, DType::f16);
  const auto model = load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), dtype, "tiny", Device::cuda);
  const auto looks = std::make_shared<Looks>();
  EngineOptions o;
  o.device = Device::cuda;
  o.slots = 3;
  o.max_tokens = 64;
  o.page_size = 8;
  o.prefill_chunk = 16;
  Engine engine(model, looks, o);
  engine.observe(&*looks->mirror);
  const int vocab = model->config.vocab;
  for (const int tokens : {3, 37, 16}) {
    const int slot = engine.open();
    REQUIRE(engine.prefill(slot, test::test_text(tokens, vocab, static_cast<unsigned>(tokens)), true, {}) == Fit::ok);
  }
  CHECK(looks->windows == 3 * model->config.layers);
  engine.ask(1, 7);
  looks->asking = 1;
  std::vector<std::int32_t> next(3), slots{0, 1, 2};
  for (int i = 0; i < 6; ++i)
    REQUIRE(engine.step(slots, std::vector<int>{1 + i, 20 + i, 40 + i}, StepResult(std::span(next))) == Fit::ok);
  for (const int slot : slots) compare_slot(engine, *looks->mirror, looks->last, slot);

  engine.close(1);  // a sequence of other tokens takes its place
  looks->asking = -1;
  REQUIRE(engine.open() == 1);
  REQUIRE(engine.prefill(1, test::test_text(9, vocab, 5), true, {}) == Fit::ok);
  slots = {2, 1};
  REQUIRE(engine.step(slots, std::vector<int>{3, 4}, StepResult(std::span(next).first(2))) == Fit::ok);
  for (const int slot : slots) compare_slot(engine, *looks->mirror, looks->last, slot);
  CHECK(engine.replays() == 0);
}

TEST_CASE("cuda profile: a profiler leaves what it leaves on the CPU") {
  for (const char* profiler : {"head_stats: {top_pages: 4, apart: 4}", "head_stats: {top_pages: 4, by: bound}"}) {
    const Profile gpu = profile(profiler, "cuda"), cpu = profile(profiler, "cpu");
    CHECK(gpu.size() == cpu.size());
    for (const auto& [name, array] : cpu) {
      CAPTURE(profiler, name);
      REQUIRE(gpu.count(name) == 1);
      const ProfileArray& there = gpu.at(name);
      // Arithmetic may decide between two pages or sides of a threshold. Then one step's share of a few dozen differs.
      const bool counts = array.unit != "cosine" && array.unit != "nats" && name.find("mass") == std::string::npos;
      CHECK(there.extent == array.extent);
      CHECK(there.unit == array.unit);
      REQUIRE(there.values.size() == array.values.size());
      for (std::size_t i = 0; i < array.values.size(); ++i)
        if (std::isnan(array.values[i]))
          CHECK(std::isnan(there.values[i]));
        else
          CHECK(there.values[i] == Approx(array.values[i]).margin(counts ? 0.1 : 0.02));
    }
  }
}

TEST_CASE("cuda profile: f16 runs, a dtype that the GPU does not take is refused before any work") {
  for (const auto& [name, array] : profile("head_stats: {top_pages: 4}", "cuda", "fp16"))
    if (name == "entropy")
      for (const float v : array.values) CHECK(v > 0);
  CHECK_THAT(test::message_of([] { profile("head_stats", "cuda", "f32"); }), Catch::Contains("f32"));
}
