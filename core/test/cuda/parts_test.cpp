// The parts of a step's time on a GPU.
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>

#include "base/backend.hpp"
#include "base/part_events.hpp"
#include "base/stream_memory.hpp"
#include "model/bundled.hpp"
#include "run/device.hpp"
#include "support/cell_fixture.hpp"
#include "support/labels.hpp"

using namespace kvlab;

namespace {

int events_made = 0;

// The library's table with an allocator of events that counts.
struct CountedEvents {
  CountedEvents() : table(*cuda_backend()) {
    static void* (*real)() = nullptr;
    real = table.runtime.new_event;
    table.runtime.new_event = [] { return ++events_made, real(); };
    events_made = 0;
    replace_cuda_backend(&table);
  }
  ~CountedEvents() { replace_cuda_backend(nullptr); }
  CudaBackend table;
};

struct Timed : test::CellFixture {
  Timed(const char* policy, std::set<Metric> metrics) : CellFixture(nullptr, test::policy_of(policy, 8), metrics) {
    experiment.batch = 2;
    for (const int tokens : {40, 33}) add(test::test_text(tokens, 512, static_cast<unsigned>(tokens)), {}, 5);
  }
  results::CellResult run(const char* backend) {
    experiment.backend = backend;
    model = load_model(*open_model("synthetic/tiny", "", "."), DType::bf16, "synthetic/tiny", device_of(experiment));
    auto out = CellFixture::run();
    REQUIRE(out.summary.error == "");
    return out;
  }
};

constexpr std::size_t parts = part_count;

// Sums of each part over all steps of a cell, [part]. The cell must have parts for each step.
std::array<double, parts> total(const results::CellResult& r) {
  REQUIRE(r.parts.size() == parts);
  REQUIRE(r.step_parts.size() == parts * r.step_ms.size());
  std::array<double, parts> out{};
  for (std::size_t i = 0; i < r.step_parts.size(); ++i) {
    CHECK(r.step_parts[i] >= 0);
    out[i % parts] += static_cast<double>(r.step_parts[i]);
  }
  return out;
}

}  // namespace

TEST_CASE("cuda parts: events are made once, and what lies between two takes is nobody's") {
  const CountedEvents counted;
  const OwnedStream stream(Device::cuda);
  const Stream s = stream.get();
  const StreamMemory memory(s, 1 << 16);
  PartEvents events(s);
  for (int round = 0; round < 3; ++round) {
    PartClock clock(&events);
    for (int i = 0; i < 4; ++i) {
      const PartTimer gemm(Part::gemm);
      zero_memory(memory.as<>(), memory.bytes(), s);
      const PartTimer recall(Part::recall);
      zero_memory(memory.as<>(), memory.bytes(), s);
    }
    {
      const PartTimer last(Part::other);  // what no part counts is `other`, too
      zero_memory(memory.as<>(), memory.bytes(), s);
    }
    synchronize(s);
    const PartClock::Step step = clock.take();
    CHECK(step.parts[static_cast<std::size_t>(Part::gemm)] > 0);
    CHECK(step.parts[static_cast<std::size_t>(Part::recall)] > 0);
    CHECK(step.parts[static_cast<std::size_t>(Part::other)] > 0);
    CHECK(step.parts[static_cast<std::size_t>(Part::attend)] == 0);
    CHECK(std::accumulate(step.parts.begin(), step.parts.end(), 0.) <= step.seconds);
    CHECK(events_made == 10);  // the begin, and the ends of 4 * 2 + 1 parts
    const PartClock::Step none = clock.take();
    CHECK(std::accumulate(none.parts.begin(), none.parts.end(), 0.) == 0);
  }
}

TEST_CASE("cuda parts: of graphs, which give the text of steps that nobody times") {
  struct Case {
    const char* policy;
    std::vector<Part> has;
  };
  const Part shared[] = {Part::gemm, Part::attend, Part::append, Part::other};
  const std::vector<Case> cases{
      {"full", {}},
      {"{h2o: {budget: {tokens: 16}}}", {Part::score, Part::select, Part::compact}},
      {"{quest: {dense_layers: 0, budget: {tokens: 24}, placement: {tier: host, resident: 24}}}",
       {Part::score, Part::recall}},  // one launch computes scores and selection
      {"{shadowkv: {rank: 4, outliers: 0, local_chunks: 1, budget: {tokens: 16}}}", {Part::select}}};
  for (const Case& c : cases) {
    CAPTURE(c.policy);
    Timed asked(c.policy, {Metric::score, Metric::latency, Metric::parts}),
        not_asked(c.policy, {Metric::score, Metric::latency});
    const auto gpu = asked.run("cuda"), cpu = asked.run("cpu"), usual = not_asked.run("cuda");
    CHECK(test::lasting_labels(gpu.summary) == "synthetic, events, graph");
    CHECK(test::lasting_labels(cpu.summary) == "synthetic");
    CHECK(usual.parts.empty());
    CHECK(usual.step_parts.empty());
    CHECK(gpu.parts == cpu.parts);
    CHECK(gpu.step_ms.size() == cpu.step_ms.size());
    for (std::size_t i = 0; i < gpu.samples.size(); ++i) CHECK(gpu.samples[i].output == usual.samples[i].output);
    const auto on_gpu = total(gpu), on_cpu = total(cpu);
    for (const Part p : shared) CHECK(on_gpu[static_cast<std::size_t>(p)] > 0);
    for (const Part p : c.has) {
      CAPTURE(name_of(p));
      CHECK(on_gpu[static_cast<std::size_t>(p)] > 0);
      CHECK(on_cpu[static_cast<std::size_t>(p)] > 0);
    }
    double kernels = 0, told = 0;  // of decode steps
    for (std::size_t i = 0; i < gpu.step_ms.size(); ++i) {
      const auto begin = gpu.step_parts.begin() + static_cast<std::ptrdiff_t>(i * parts);
      const double sum = std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(parts), 0.);
      CHECK(sum > 0);
      CHECK(sum <= static_cast<double>(gpu.step_ms[i]) * 1.0001);  // the sums are f32
      if (!std::isfinite(gpu.step_device_ms[i])) continue;
      CHECK(sum <= static_cast<double>(gpu.step_device_ms[i]) * 1.0001);
      kernels += static_cast<double>(gpu.step_device_ms[i]), told += sum;
    }
    CHECK(told > 0.8 * kernels);
  }
}

TEST_CASE("cuda parts: of requests served") {
  Timed cells("{h2o: {budget: {tokens: 16}}}", {Metric::score, Metric::latency, Metric::parts});
  cells.experiment.workloads.resize(1);
  cells.experiment.workloads[0].requests = 3;
  const auto served = cells.run("cuda");
  CHECK(test::lasting_labels(served.summary) == "synthetic, events, graph");
  const auto all = total(served);
  for (const Part p : {Part::gemm, Part::attend, Part::append, Part::score, Part::compact})
    CHECK(all[static_cast<std::size_t>(p)] > 0);
  CHECK(std::accumulate(all.begin(), all.end(), 0.) <=
        std::accumulate(served.step_ms.begin(), served.step_ms.end(), 0.) * 1.0001);
}
