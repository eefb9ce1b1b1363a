// Cells of an experiment with backend: cuda, against the same cells on the CPU.
#include "run/cell.hpp"

#include <array>
#include <catch2/catch.hpp>
#include <map>

#include "model/bundled.hpp"
#include "run/answer.hpp"
#include "support/contract.hpp"

using namespace kvlab;

namespace {

// Two prompts, one with a further turn, under one policy.
struct Cells {
  Registry registry;
  RegistryCatalog catalog{registry};
  Experiment experiment;
  Cell cell;
  TaskItems items;

  explicit Cells(const char* policy) {
    const yaml::Document document = yaml::parse_text(policy, "policy");
    Problems problems(document);
    const auto spec = read_policy(document.root, 8, catalog, problems);
    problems.raise();
    experiment.tasks.resize(1);
    experiment.policies = {*spec};
    experiment.metrics = {Metric::score, Metric::fidelity, Metric::memory, Metric::trace};
    experiment.fidelity_tokens = 3;
    experiment.batch = 2;
    items.metric = "contains";
    for (int i = 0; i < 3; ++i) {
      Item item;
      item.sample = i;
      item.follows = i == 1;
      item.prompt = test::test_text(i == 2 ? 33 : 40, 512, i == 2 ? 7u : 5u);
      if (item.follows) item.fed = test::test_text(3, 512, 9);
      item.before = item.follows ? items.items[0].most_tokens() - 40 : 0;
      item.max_new = 4;
      item.references = {"x"};
      item.sha256 = std::to_string(i);
      items.items.push_back(std::move(item));
    }
  }

  results::CellResult run(const char* backend, std::int64_t device_memory = 0) {
    experiment.backend = backend;
    experiment.device_memory = device_memory;
    const auto model = load_model(*open_model("synthetic/tiny", "", "."), DType::bf16, "synthetic/tiny",
                                  experiment.backend == "cuda" ? Device::cuda : Device::cpu);
    ReferenceCache references;
    CellInput in;
    in.experiment = &experiment;
    in.cell = &cell;
    in.model = model;
    in.items = &items;
    in.catalog = &catalog;
    in.references = &references;
    check_cell(in);
    return run_cell(in);
  }
};

// Of the finite ones: the first token of an answer has no decode step.
std::vector<float> finite(const std::vector<float>& v) {
  std::vector<float> out;
  std::copy_if(v.begin(), v.end(), std::back_inserter(out), [](float x) { return std::isfinite(x); });
  return out;
}
float greatest(const std::vector<float>& v) {
  const auto f = finite(v);
  return f.empty() ? -1 : *std::max_element(f.begin(), f.end());
}
float least(const std::vector<float>& v) {
  const auto f = finite(v);
  return f.empty() ? -1 : *std::min_element(f.begin(), f.end());
}

}  // namespace

TEST_CASE("cuda cell: full, fidelity is exact and the answers are the CPU's") {
  Cells cells("full");
  const auto gpu = cells.run("cuda"), cpu = cells.run("cpu");
  CHECK(gpu.summary.error == "");
  REQUIRE(gpu.summary.status == "ok");
  CHECK(gpu.summary.labels.find("synthetic") != std::string::npos);
  REQUIRE(gpu.samples.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) CHECK(gpu.samples[i].output == cpu.samples[i].output);
  CHECK(gpu.summary.top1 == 1);
  CHECK(gpu.summary.kl < 1e-6);
  CHECK(gpu.fidelity.mass.size() == cpu.fidelity.mass.size());
  CHECK(least(gpu.fidelity.mass) == Approx(1).margin(1e-5));
  CHECK(least(gpu.fidelity.page_recall) == 1);
  CHECK(greatest(gpu.fidelity.output_error) < 0.02);
  CHECK(gpu.trace.kept == cpu.trace.kept);
  CHECK(gpu.summary.device_bytes_peak > 0);
}

TEST_CASE("cuda cell: an evicting policy keeps its budget, a selecting one is traced") {
  for (const char* policy :
       {"{snapkv: {window: 4, budget: {tokens: 16}}}", "{quest: {dense_layers: 0, budget: {tokens: 16}}}",
        "{streaming_llm: {sinks: 2, budget: {tokens: 16}}}"}) {
    CAPTURE(policy);
    Cells cells(policy);
    const auto gpu = cells.run("cuda"), cpu = cells.run("cpu");
    CHECK(gpu.summary.error == "");
    REQUIRE(gpu.summary.status == "ok");
    CHECK(gpu.trace.kept_offsets == cpu.trace.kept_offsets);
    CHECK(gpu.trace.events.size() == cpu.trace.events.size());
    CHECK(gpu.summary.fired > 0);
    CHECK(gpu.fidelity.mass.size() == cpu.fidelity.mass.size());
    CHECK(least(gpu.fidelity.mass) == Approx(least(cpu.fidelity.mass)).margin(0.05));
    CHECK(greatest(gpu.fidelity.mass) < 1 + 1e-5);
  }
}

TEST_CASE("cuda cell: one that does not fit is a result") {
  Cells cells("full");
  const auto gpu = cells.run("cuda", 4096);
  CHECK(gpu.summary.status == "oom");
  CHECK(gpu.summary.error.find("4096 bytes") != std::string::npos);
  CHECK(gpu.samples.empty());
}

TEST_CASE("cuda cell: decode steps as graphs are said") {
  Cells cells("full");
  cells.experiment.metrics = {Metric::score, Metric::latency};
  const auto gpu = cells.run("cuda"), cpu = cells.run("cpu");
  CHECK(gpu.summary.labels == "synthetic, graph");
  CHECK(cpu.summary.labels == "synthetic");
  CHECK(gpu.parts.empty());
  CHECK(gpu.step_ms.size() == cpu.step_ms.size());
  for (std::size_t i = 0; i < 3; ++i) CHECK(gpu.samples[i].output == cpu.samples[i].output);
}

TEST_CASE("cuda cell: injected page lists, eagerly and in graphs") {
  Cells cells("{quest: {dense_layers: 0, budget: {tokens: 24}}}");
  cells.experiment.inject.overlap = 1;
  const auto gpu = cells.run("cuda");
  REQUIRE(gpu.summary.error == "");
  CHECK(gpu.summary.labels == "synthetic, injected");
  std::map<std::array<int, 3>, std::vector<std::int32_t>> before;
  int compared = 0;
  for (const auto& e : gpu.trace.events) {
    const std::vector<std::int32_t> now(gpu.trace.selected.begin() + e.begin,
                                        gpu.trace.selected.begin() + e.begin + e.count);
    auto& last = before[{e.sample, e.layer, e.kv_head}];
    if (!last.empty() && last.back() == now.back()) CHECK((++compared, now == last));
    last = now;
  }
  CHECK(compared > 0);
  cells.experiment.metrics = {Metric::score, Metric::latency};
  CHECK(cells.run("cuda").summary.labels == "synthetic, injected, graph");
}
