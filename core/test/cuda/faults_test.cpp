// The device refuses memory or fails a transfer: a clear error or a recorded result, and what is there stays.
#include <catch2/catch.hpp>
#include <functional>

#include <kvlab/error.hpp>
#include <memory>
#include <string>
#include <vector>

#include "base/backend.hpp"
#include "base/device_op.hpp"
#include "cases/place.hpp"
#include "model/bundled.hpp"
#include "store/cuda_kernels.hpp"
#include "support/cell_fixture.hpp"
#include "support/cuda_rows.hpp"

using namespace kvlab;
using cases::OnDevice;
using test::Lists;
using test::StoreFixture;

namespace {

// Where the copies of place edits are given to: the step's stream, the one beside it, or that of reloads.
enum class CopiesTo { in_step, beside };

// While it lives, the copies of place edits given to a stream fail from the n-th on.
class NoCopies {
 public:
  NoCopies(CopiesTo to, int n) : table_(require_cuda("a test")), failing_(copy, table_.announced) {
    real_ = reinterpret_cast<decltype(real_)>(find_cuda_op(typeid(CudaOpKey<cuda_store::copy_placed>).name()));
    to_ = to, left_ = n, failed_ = 0;
    replace_cuda_backend(&table_);
  }
  ~NoCopies() { replace_cuda_backend(nullptr); }
  NoCopies(const NoCopies&) = delete;
  static int failed() { return failed_; }

 private:
  static void copy(const CudaStoreLayer& s, const CudaStorePlace& a, Stream stream) {
    if (a.awaited == (to_ == CopiesTo::in_step) && --left_ < 0) {
      ++failed_;
      throw Error(Errc::device,
                  "got cudaErrorIllegalAddress (an illegal memory access was encountered), wanted success",
                  "CUDA copy_placed");
    }
    real_(s, a, stream);
  }
  CudaBackend table_;
  OnCuda<cuda_store::copy_placed> failing_;
  static inline void (*real_)(const CudaStoreLayer&, const CudaStorePlace&, Stream) = nullptr;
  static inline CopiesTo to_ = CopiesTo::in_step;
  static inline int left_ = 0, failed_ = 0;
};

// While it lives, waiting for a stream fails from the n-th time on, or launching a graph does.
class NoStreams {
 public:
  NoStreams(bool launches, int n) : table_(require_cuda("a test")) {
    real_ = &require_cuda("a test").runtime;
    left_ = n, failed_ = 0;
    if (launches)
      table_.runtime.launch = [](void* graph, void* stream) { fail(), real_->launch(graph, stream); };
    else
      table_.runtime.synchronize = [](void* stream) { fail(), real_->synchronize(stream); };
    replace_cuda_backend(&table_);
  }
  ~NoStreams() { replace_cuda_backend(nullptr); }
  NoStreams(const NoStreams&) = delete;
  static int failed() { return failed_; }

 private:
  static void fail() {
    if (--left_ >= 0) return;
    ++failed_;
    throw Error(Errc::device, "got cudaErrorIllegalAddress (an illegal memory access was encountered), wanted success",
                "CUDA");
  }
  CudaBackend table_;
  static inline const CudaRuntime* real_ = nullptr;
  static inline int left_ = 0, failed_ = 0;
};

// While it lives, the first `failures` requests for pinned memory of at least `least` bytes get none. It notes them
// all.
class NoPinned {
 public:
  NoPinned(int failures, std::size_t least) : table_(require_cuda("a test")) {
    real_ = require_cuda("a test").runtime.allocate_pinned;
    left_ = failures, least_ = least;
    asked_.clear();
    table_.runtime.allocate_pinned = [](std::size_t bytes) -> void* {
      if (bytes < least_) return real_(bytes);
      asked_.push_back(static_cast<std::int64_t>(bytes));
      return left_-- > 0 ? nullptr : real_(bytes);
    };
    replace_cuda_backend(&table_);
  }
  ~NoPinned() { replace_cuda_backend(nullptr); }
  NoPinned(const NoPinned&) = delete;
  // Bytes of frames in each request; a granule lies before frame 0.
  static std::vector<std::int64_t> frames_asked() {
    std::vector<std::int64_t> out;
    for (const std::int64_t bytes : asked_) out.push_back(bytes - granule_bytes);
    return out;
  }

 private:
  CudaBackend table_;
  static inline void* (*real_)(std::size_t) = nullptr;
  static inline int left_ = 0;
  static inline std::size_t least_ = 0;
  static inline std::vector<std::int64_t> asked_;
};

std::int64_t all_frames(const StoreOptions& o) {
  const Shape& s = o.shape;
  return std::int64_t{s.layers} * s.max_slots * s.kv_heads * s.max_pages();
}

}  // namespace

TEST_CASE("cuda store: a failed pinned allocation at the start is an error with its bytes, after one request") {
  for (const auto way : {&StoreOptions::host_pages, &StoreOptions::archive, &StoreOptions::offloads}) {
    CAPTURE(way == &StoreOptions::archive, way == &StoreOptions::offloads);
    StoreFixture f;
    f.options.*way = true;
    f.options.host_limit = 50 * frame_layout(f.options, {}).bytes + 7;
    const std::int64_t bytes = f.options.host_limit - 7;
    OnDevice memory;
    {
      const NoPinned none(1, 0);
      CHECK_THROWS_WITH(CudaStore(f.options, memory.stream()),
                        Catch::Contains("got no pinned memory for the pages on the host, wanted " +
                                        std::to_string(bytes) + " bytes; give host_memory"));
      CHECK(NoPinned::frames_asked() == std::vector<std::int64_t>{bytes});
    }
    CHECK_NOTHROW(CudaStore(f.options, memory.stream()));
  }
}

TEST_CASE("cuda store: a failed pinned allocation for rows that wait is no room, and says how much was asked for") {
  StoreFixture f;
  f.options.host_pages = f.options.pauses = true;
  OnDevice memory;
  {
    const NoPinned none(1, 0);  // the marks come before the pages
    CHECK_THROWS_AS(CudaStore(f.options, memory.stream()), NoRoom);
  }
  {
    const NoPinned none(1, 0);
    CHECK_THROWS_WITH(
        CudaStore(f.options, memory.stream()),
        Catch::Contains("got no pinned memory for the marks of sequences that wait for pages, wanted 20 bytes"));
  }
  CHECK_NOTHROW(CudaStore(f.options, memory.stream()));
}

TEST_CASE(
    "cuda store: at the first offload requests for pinned memory are halved five times, then it is out of memory") {
  StoreFixture f;
  OnDevice memory;
  const std::int64_t frame = frame_layout(f.options, {}).bytes, all = all_frames(f.options);
  REQUIRE(all == 192);
  const Lists both_pages(2, {0, 1}), third(2, {2});
  const auto offload = [&](CudaStore& store, int layer, const Lists& pages) {
    Edits e(layer);
    e.offload(memory.put(pages.pages()));
    const Fit fit = store.apply(e.all(), {0}).fit;
    memory.synchronize();
    return fit;
  };
  const auto tokens = [&](const CudaStore& store) { return store.positions_by_place(0, 0, 1); };
  for (const int failures : {5, 6}) {
    CAPTURE(failures);
    CudaStore store(f.options, memory.stream());
    REQUIRE(store.open() == 0);
    test::append_rows(store, f, memory, 0, 14);
    const auto before = tokens(store);
    {
      const NoPinned none(failures, 0);
      CHECK((offload(store, 0, both_pages) == Fit::ok) == (failures == 5));
      std::vector<std::int64_t> wanted;
      for (int i = 0; i < 6; ++i) wanted.push_back((all >> i) * frame);
      CHECK(NoPinned::frames_asked() == wanted);
    }
    CHECK(tokens(store) == before);
    store.check_invariants();
    if (failures == 5) {  // 6 frames are there, and 4 are taken
      CHECK(store.page_bytes(Tier::host) == 4 * frame);
      CHECK(offload(store, 0, third) == Fit::ok);
      CHECK(offload(store, 1, both_pages) == Fit::out_of_memory);
      CHECK(store.page_bytes(Tier::host) == 6 * frame);
    } else {
      CHECK(store.page_bytes(Tier::host) == 0);
      CHECK(offload(store, 0, both_pages) == Fit::ok);  // the next offload asks again
      CHECK(store.page_bytes(Tier::host) == 4 * frame);
    }
    CHECK(tokens(store) == before);
    store.check_invariants();
  }
}

TEST_CASE("cuda cell: a failed pinned allocation fails the cell by name, and the same cell runs when there is memory") {
  test::CellFixture cell(
      load_model(*open_model("synthetic/tiny", "", "."), DType::bf16, "synthetic/tiny", Device::cuda),
      test::policy_of("{freekv: {sinks: 8, window: 8, budget: {tokens: 32}}}", 8), {Metric::score});
  cell.experiment.backend = "cuda";
  cell.experiment.spill = "always";
  cell.add(test::test_text(90, 512, 5), {}, 4);
  {
    const NoPinned none(1000, 0);
    const results::CellResult result = cell.run();
    CHECK(result.summary.status == "failed");
    CHECK_THAT(result.summary.error, Catch::Contains("got no pinned memory for the pages on the host, wanted "));
    CHECK(result.samples.empty());
  }
  const results::CellResult again = cell.run();
  CHECK(again.summary.error == "");
  CHECK(again.summary.status == "ok");
}

TEST_CASE("cuda cell: a host_memory that holds no page is refused before the run, one that runs full is its result") {
  test::CellFixture cell(
      load_model(*open_model("synthetic/tiny", "", "."), DType::bf16, "synthetic/tiny", Device::cuda),
      test::policy_of("{freekv: {sinks: 8, window: 8, budget: {tokens: 32}}}", 8), {Metric::score});
  cell.experiment.backend = "cuda";
  cell.experiment.spill = "always";
  cell.add(test::test_text(90, 512, 5), {}, 4);
  cell.experiment.host_memory = 100;
  CHECK_THROWS_WITH(check_cell(cell.input()), Catch::Contains("got host_memory of 100 bytes") &&
                                                  Catch::Contains("a page of 8 tokens of one KV head"));
  cell.experiment.host_memory = 10'000;
  const results::CellResult result = cell.run();
  CHECK(result.summary.status == "oom");
  CHECK_THAT(result.summary.error, Catch::Contains("where host_memory allows 10000"));
}

// A policy that core composes offloads pages without place edits.
TEST_CASE("cuda cell: composed policies with pages on the host take the host tier at the start") {
  for (const char* policy :
       {"{full: {placement: {tier: host}}}", "{h2o: {budget: {tokens: 32}, placement: {tier: host, resident: 16}}}"}) {
    CAPTURE(policy);
    test::CellFixture cell(
        load_model(*open_model("synthetic/tiny", "", "."), DType::bf16, "synthetic/tiny", Device::cuda),
        test::policy_of(policy, 8), {Metric::score});
    cell.experiment.backend = "cuda";
    cell.add(test::test_text(90, 512, 5), {}, 4);
    cell.experiment.host_memory = 100;
    CHECK_THROWS_WITH(check_cell(cell.input()), Catch::Contains("got host_memory of 100 bytes") &&
                                                    Catch::Contains("a page of 8 tokens of one KV head"));
    cell.experiment.host_memory = 0;
    {
      const NoPinned none(1, 0);
      const results::CellResult result = cell.run();
      CHECK(result.summary.status == "failed");
      CHECK_THAT(result.summary.error, Catch::Contains("got no pinned memory for the pages on the host, wanted "));
      CHECK(result.samples.empty());
      CHECK(NoPinned::frames_asked().size() == 1);
    }
    CHECK(cell.run().summary.status == "ok");
  }
}

namespace {

// Two prompts of different lengths in one batch, with all pages on the host from the start.
struct Tiers : test::CellFixture {
  explicit Tiers(const char* policy)
      : CellFixture(load_model(*open_model("synthetic/tiny", "", "."), DType::bf16, "synthetic/tiny", Device::cuda),
                    test::policy_of(policy, 8), {Metric::score}) {
    experiment.backend = "cuda";
    experiment.spill = "always";
    experiment.batch = 2;
    add(test::test_text(90, 512, 5), {}, 6);
    add(test::test_text(61, 512, 7), {}, 6);
  }
  std::vector<std::string> answers() {
    const results::CellResult result = run();
    CHECK(result.summary.error == "");
    std::vector<std::string> out;
    for (const auto& sample : result.samples) out.push_back(sample.output);
    return out;
  }
  // met: whether something failed in the run. Graphs of a GPU repeat what an emulated one launches anew.
  void fails(const std::function<bool()>& met) {
    const results::CellResult result = run();
    if (!met()) {
      CHECK(result.summary.status == "ok");
      return;
    }
    CHECK(result.summary.status == "failed");
    CHECK_THAT(result.summary.error, Catch::Contains("an illegal memory access was encountered"));
    CHECK(result.samples.empty());
  }
};

}  // namespace

TEST_CASE("cuda cell: a transfer that fails ends its cell, on each stream, and the next cell finds nothing of it") {
  struct Case {
    const char* policy;
    CopiesTo to;
  };
  for (const Case& c :
       {Case{"{freekv: {sinks: 8, window: 8, dense_layers: 0, budget: {tokens: 32}}}", CopiesTo::in_step},
        Case{"{freekv: {sinks: 8, window: 8, dense_layers: 0, budget: {tokens: 32}}}", CopiesTo::beside},
        Case{"{flexicache: {unstable_heads: false, rerank_every: 2, pause: true, budget: {tokens: 24}}}",
             CopiesTo::beside}}) {
    CAPTURE(c.policy, static_cast<int>(c.to));
    Tiers cell(c.policy);
    const auto expected = cell.answers();
    for (const int n : {0, 1, 2, 5}) {  // in prompts, in a step without a graph, and while one is captured
      if (cases::quick() && n % 2 == 1) continue;
      CAPTURE(n);
      {
        const NoCopies none(c.to, n);
        cell.fails([] { return NoCopies::failed() > 0; });
        CHECK((n > 2 || NoCopies::failed() > 0));
      }
      CHECK(cell.answers() == expected);
    }
  }
}

TEST_CASE("cuda cell: a stream or a graph that fails ends its cell, and the next cell finds nothing of it") {
  Tiers cell("{freekv: {sinks: 8, window: 8, dense_layers: 0, budget: {tokens: 32}}}");
  const auto expected = cell.answers();
  for (const auto& [launches, n] : {std::pair{true, 0}, {true, 1}, {false, 0}}) {
    CAPTURE(launches, n);
    {
      const NoStreams none(launches, n);
      cell.fails([] { return NoStreams::failed() > 0; });
      CHECK(NoStreams::failed() > 0);
    }
    CHECK(cell.answers() == expected);
  }
}
