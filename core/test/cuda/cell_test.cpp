// Cells of an experiment with backend: cuda, against the same cells on the CPU.
#include "run/cell.hpp"

#include <unistd.h>

#include <array>
#include <catch2/catch.hpp>
#include <filesystem>
#include <map>
#include <string>

#include "cases/quick.hpp"
#include "model/bundled.hpp"
#include "run/device.hpp"
#include "run/full_runs.hpp"
#include "run/recorded.hpp"
#include "support/altered_checkpoint.hpp"
#include "support/cell_fixture.hpp"
#include "support/drifting.hpp"
#include "support/labels.hpp"

using namespace kvlab;

namespace {

// Two prompts, one with a further turn, under one policy.
struct Cells : test::CellFixture {
  explicit Cells(const char* policy)
      : CellFixture(nullptr, test::policy_of(policy, 8),
                    {Metric::score, Metric::fidelity, Metric::memory, Metric::trace}) {
    experiment.fidelity_tokens = 3;
    experiment.batch = 2;
    add(test::test_text(40, 512, 5), {}, 4);
    add({}, test::test_text(3, 512, 9), 4, true);
    add(test::test_text(33, 512, 7), {}, 4);
  }

  results::CellResult run(const char* backend, std::int64_t for_pages = 0) {
    experiment.backend = backend;
    model = load_model(*open_model("synthetic/tiny", "", "."), DType::bf16, "synthetic/tiny",
                       experiment.backend == "cuda" ? Device::cuda : Device::cpu);
    if (for_pages > 0) leave_for_pages(for_pages, experiment.batch);
    return CellFixture::run();
  }
};

// Drops values that are not finite: the first token of an answer has no decode step.
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

TEST_CASE("cuda cell: numbers that are not finite fail it and are located as on the CPU") {
  struct Case {
    std::string tensor, says;
  };
  for (const Case& c : {Case{"model.layers.1.self_attn.k_proj.weight", "of the keys"},
                        Case{"model.layers.1.self_attn.v_proj.weight", "of the values"},
                        Case{"model.norm.weight", "logits behind layer"}}) {
    CAPTURE(c.tensor);
    std::string errors[2];
    for (const bool gpu : {true, false}) {
      test::AlteredCheckpoint altered(open_model("synthetic/tiny", "", "."));
      altered.alter(c.tensor, [](std::int64_t, std::int64_t, float) { return 3e38f; });
      test::CellFixture cell(load_model(altered, DType::bf16, "altered", gpu ? Device::cuda : Device::cpu),
                             test::full_spec(), {Metric::score});
      cell.experiment.backend = gpu ? "cuda" : "cpu";
      cell.experiment.batch = 2;
      cell.add(test::test_text(12, 512, 5), {}, 3);
      cell.add(test::test_text(9, 512, 6), {}, 3);
      const auto result = cell.run();
      CHECK(result.summary.status == "failed");
      CHECK(result.summary.nonfinite > 0);
      errors[gpu] = result.summary.error;
      CHECK_THAT(errors[gpu], Catch::Contains(c.says) && Catch::Contains("sample 0, token"));
    }
    // Both errors name the same place. The order of products decides which of them overflows.
    const auto place = [](const std::string& error) { return error.substr(0, error.find(": got")); };
    CHECK(place(errors[1]) == place(errors[0]));
  }
}

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
       {"{snapkv: {window: 4, budget: {tokens: 16}}}", "{quest: {dense_layers: 0, budget: {tokens: 24}}}",
        "{quest: {dense_layers: 0, budget: {tokens: 24}, placement: {tier: host, resident: 16, codec: int8}}}",
        "{streaming_llm: {sinks: 2, budget: {tokens: 16}}}",
        "{streaming_llm: {sinks: 2, rope: re_rotate, budget: {tokens: 16}}}",
        "{streaming_llm: {sinks: 2, rope: re_rotate, budget: {tokens: 16}, placement: {tier: host, codec: int8}}}"}) {
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

TEST_CASE("cuda cell: questions that run beside each other have the fidelity of questions alone") {
  for (const char* policy :
       {"full", "{quest: {dense_layers: 0, budget: {tokens: 24}}}", "{random: {every: 1, budget: {tokens: 16}}}",
        "{streaming_llm: {sinks: 2, rope: re_rotate, budget: {tokens: 16}}}"}) {
    CAPTURE(policy);
    results::CellResult of[2];
    for (const bool alone : {true, false}) {
      Cells cells(policy);
      for (int i = 0; i < 4; ++i) {  // two questions of each context that is shared
        cells.add(test::test_text(28, 512, 11 + i / 2), test::test_text(2 + i, 512, 20 + i), 4);
        Item& item = cells.items.items.back();
        item.shared = true;
        if (i % 2) --item.sample, item.question = 1;
      }
      cells.experiment.batch = alone ? 1 : 5;
      of[alone] = cells.run("cuda");
      REQUIRE(of[alone].summary.error == "");
    }
    const results::Fidelity &a = of[1].fidelity, &b = of[0].fidelity;
    CHECK(a.offsets == b.offsets);
    CHECK(a.kl == b.kl);
    CHECK(a.top1 == b.top1);
    CHECK(finite(a.mass) == finite(b.mass));
    CHECK(finite(a.page_recall) == finite(b.page_recall));
    CHECK(finite(a.output_error) == finite(b.output_error));
    for (std::size_t i = 0; i < of[0].samples.size(); ++i) CHECK(of[0].samples[i].kl == of[1].samples[i].kl);
  }
}

TEST_CASE("cuda cell: one that does not fit is a result") {
  Cells cells("full");
  const auto gpu = cells.run("cuda", 4096);
  CHECK(gpu.summary.status == "oom");
  CHECK(gpu.summary.error.find("got a device with room for ") == 0);
  CHECK(gpu.samples.empty());
}

TEST_CASE("cuda cell: decode steps as graphs are said") {
  Cells cells("full");
  cells.experiment.metrics = {Metric::score, Metric::latency};
  const auto gpu = cells.run("cuda"), cpu = cells.run("cpu");
  CHECK(test::lasting_labels(gpu.summary) == "synthetic, graph");
  CHECK(test::lasting_labels(cpu.summary) == "synthetic");
  CHECK(gpu.parts.empty());
  CHECK(gpu.step_ms.size() == cpu.step_ms.size());
  CHECK(cpu.step_device_ms.empty());
  CHECK(std::isnan(cpu.summary.overhead));
  REQUIRE(gpu.step_device_ms.size() == gpu.step_ms.size());
  double steps = 0, kernels = 0;  // of decode steps; prompts have no such time
  for (std::size_t i = 0; i < gpu.step_ms.size(); ++i)
    if (std::isfinite(gpu.step_device_ms[i])) {
      CHECK(gpu.step_device_ms[i] > 0);
      CHECK(gpu.step_device_ms[i] < gpu.step_ms[i]);
      steps += static_cast<double>(gpu.step_ms[i]), kernels += static_cast<double>(gpu.step_device_ms[i]);
    }
  CHECK(gpu.summary.overhead == Approx(1 - kernels / steps));
  for (std::size_t i = 0; i < 3; ++i) CHECK(gpu.samples[i].output == cpu.samples[i].output);
}

TEST_CASE("cuda cell: answers are drawn while steps are graphs, and are the same in any batch") {
  for (const char* policy : {"full", "{snapkv: {window: 4, budget: {tokens: 16}}}"}) {
    CAPTURE(policy);
    Cells cells(policy);
    cells.experiment.metrics = {Metric::score, Metric::latency};
    cells.experiment.batch_invariant = true;
    const auto greedy = cells.run("cuda");
    REQUIRE(greedy.summary.status == "ok");
    const TaskItems questions = cells.items;
    const auto drawn_texts = [&](int draws, double temperature, int batch) {
      cells.experiment.sampling.temperature = temperature;
      cells.experiment.sampling.draws = draws;
      cells.experiment.batch = batch;
      cells.items = drawn(questions, draws, "");
      const auto result = cells.run("cuda");
      CHECK(result.summary.error == "");
      CHECK(test::lasting_labels(result.summary) == "synthetic, sampled, graph");
      std::map<std::array<std::int64_t, 3>, std::string> texts;
      for (const auto& s : result.samples) texts[{s.task_sample, s.question, s.draw}] = s.output;
      return texts;
    };
    for (const auto& s : greedy.samples) CHECK(drawn_texts(1, 1e-6, 2).at({s.task_sample, s.question, 0}) == s.output);
    const auto wanted = drawn_texts(3, 1.5, 1);
    REQUIRE(wanted.size() == 9);
    CHECK(wanted.at({0, 0, 0}) != wanted.at({0, 0, 1}));
    for (const int batch : {2, 6}) CHECK(drawn_texts(3, 1.5, batch) == wanted);
  }
}

TEST_CASE("cuda cell: drawn answers whose prompt is restored leave pages on the device while memory suffices") {
  for (const char* policy : {"{freekv: {sinks: 8, window: 8, budget: {tokens: 32}}}",
                             "{flexicache: {unstable_heads: false, budget: {tokens: 32}, rerank_every: 4}}"}) {
    CAPTURE(policy);
    Cells cells(policy);
    cells.experiment.metrics = {Metric::score, Metric::memory};
    cells.experiment.batch_invariant = true;
    cells.items.items.clear();
    cells.add(test::test_text(120, 512, 5), {}, 24);
    const TaskItems questions = cells.items;
    const auto run = [&](int draws, int batch, std::int64_t for_pages) {
      cells.experiment.sampling.temperature = 1.5;
      cells.experiment.sampling.draws = draws;
      cells.experiment.batch = batch;
      cells.items = drawn(questions, draws, "");
      const auto result = cells.run("cuda", for_pages);
      CHECK(result.summary.error == "");
      return result;
    };
    const auto once = run(1, 1, 0), roomy = run(3, 1, 0);
    CHECK(once.summary.host_bytes_peak == 0);
    CHECK(roomy.summary.host_bytes_peak == 0);
    CHECK(roomy.summary.device_bytes_peak >= once.summary.device_bytes_peak);
    // Room for two prompts and a half: the third draw comes back where the others' pages were.
    const std::int64_t prompt =
        Engine(cells.model, cell_policy(cells.input()), engine_options(cells.input(), 1)).full_bytes(120);
    const auto pressed = run(3, 3, prompt * 5 / 2);
    CHECK(pressed.summary.host_bytes_peak > 0);
    REQUIRE(pressed.samples.size() == 3);
    for (std::size_t i = 0; i < 3; ++i) CHECK(pressed.samples[i].output == roomy.samples[i].output);
  }
}

TEST_CASE("cuda cell: injected page lists, eagerly and in graphs") {
  Cells cells("{quest: {dense_layers: 0, budget: {tokens: 24}}}");
  cells.experiment.inject.overlap = 1;
  const auto gpu = cells.run("cuda");
  REQUIRE(gpu.summary.error == "");
  CHECK(test::lasting_labels(gpu.summary) == "synthetic, injected");
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
  CHECK(test::lasting_labels(cells.run("cuda").summary) == "synthetic, injected, graph");
}

TEST_CASE("cuda cell: the lists of a traced cell are injected as on the CPU") {
  Cells cells("{quest: {dense_layers: 0, budget: {tokens: 24}}}");
  const std::string file =
      (std::filesystem::temp_directory_path() / ("kvlab-cuda-recorded" + std::to_string(getpid()) + ".h5")).string();
  const auto own = cells.run("cuda");
  results::write_part(file, own, {});
  results::rebuild(file, {}, {cells.cell.id});
  cells.recorded = std::make_shared<RecordedTrace>(read_recorded(file, ""));
  std::filesystem::remove(file);
  std::filesystem::remove_all(results::parts_folder(file));
  cells.experiment.inject.trace = file;
  // Texts of the same lengths, for which the selector itself would read other pages.
  for (Item& item : cells.items.items) {
    for (std::vector<int>* text : {&item.prompt, &item.fed})
      for (int& token : *text) token = (token + 11) % 512;
    item.sha256 += " other";
  }
  const auto gpu = cells.run("cuda"), cpu = cells.run("cpu");
  REQUIRE(gpu.summary.error == "");
  CHECK(test::lasting_labels(gpu.summary) == "synthetic, injected");
  CHECK(gpu.trace.selected.size() > 50);
  CHECK(gpu.trace.selected == own.trace.selected);
  CHECK(gpu.trace.selected == cpu.trace.selected);
  cells.experiment.metrics = {Metric::score, Metric::latency};
  const auto graphs = cells.run("cuda");
  CHECK(test::lasting_labels(graphs.summary) == "synthetic, injected, graph");
  for (std::size_t i = 0; i < 3; ++i) CHECK(graphs.samples[i].output == gpu.samples[i].output);
  cells.experiment.metrics = {Metric::trace};
  cells.experiment.inject.trace.clear();
  CHECK(cells.run("cuda").trace.selected != own.trace.selected);
}

TEST_CASE("cuda cell: what is injected into a policy, eagerly, in graphs and as on the CPU") {
  Cells cells("{quest: {dense_layers: 0, budget: {tokens: 88}}}");
  cells.items.items.clear();
  for (unsigned i = 0; i < 2; ++i) cells.add(test::test_text(120, 512, i), {}, 8);
  cells.experiment.metrics = {Metric::trace};
  const auto quest = cells.run("cuda");
  const std::string file =
      (std::filesystem::temp_directory_path() / ("kvlab-cuda-policy" + std::to_string(getpid()) + ".h5")).string();
  results::write_part(file, quest, {});
  results::rebuild(file, {}, {cells.cell.id});
  const auto recorded = std::make_shared<RecordedTrace>(read_recorded(file, ""));
  std::filesystem::remove(file);
  std::filesystem::remove_all(results::parts_folder(file));

  cells.experiment.policies = {
      test::policy_of("{freekv: {sinks: 8, window: 8, dense_layers: 0, budget: {tokens: 48}}}", 8)};
  cells.experiment.inject.correction = .3;
  for (const bool by_trace : {true, false}) {
    CAPTURE(by_trace);
    cells.recorded = by_trace ? recorded : nullptr;
    cells.experiment.inject.trace = by_trace ? file : "";
    cells.experiment.inject.overlap = by_trace ? std::nullopt : std::optional(.5);
    cells.experiment.metrics = {Metric::trace};
    const auto gpu = cells.run("cuda");
    REQUIRE(gpu.summary.error == "");
    CHECK(test::lasting_labels(gpu.summary) == "synthetic, injected");
    CHECK(gpu.trace.selected.size() > 200);
    if (by_trace) CHECK(gpu.trace.selected == cells.run("cpu").trace.selected);
    cells.experiment.metrics = {Metric::score, Metric::latency};
    const auto graphs = cells.run("cuda");
    CHECK(test::lasting_labels(graphs.summary) == "synthetic, injected, graph");
    for (std::size_t i = 0; i < 2; ++i) CHECK(graphs.samples[i].output == gpu.samples[i].output);
  }
}

TEST_CASE("cuda cell: injected drift is that of the CPU") {
  const auto fetches = [](const char* backend, int batch) {
    test::Drifting cells(load_model(*open_model("synthetic/tiny", "", "."), DType::bf16, "synthetic/tiny",
                                    backend == std::string("cuda") ? Device::cuda : Device::cpu));
    cells.experiment.backend = backend;
    cells.experiment.inject.drift = .4;
    return cells.fetches(batch);
  };
  // Which steps fetch follows from draws alone, so all steps agree although numbers differ a little.
  const auto cpu = fetches("cpu", 1);
  CHECK(cpu.size() > 4);
  for (const int batch : {1, 4})
    if (batch > 1 || !cases::quick()) CHECK(fetches("cuda", batch) == cpu);
}

TEST_CASE("cuda cell: a run of the full cache keeps the mass that the CPU's keeps") {
  Cells f("oracle_evict: {budget: {tokens: 16}}");
  for (Item& item : f.items.items) item.forced = test::test_text(4, 512, 3);
  std::map<std::string, std::vector<std::vector<float>>> kept;
  for (const char* backend : {"cpu", "cuda"}) {
    f.experiment.backend = backend;
    f.model =
        load_model(*open_model("synthetic/tiny", "", "."), DType::bf16, "synthetic/tiny", device_of(f.experiment));
    FullRuns runs;
    runs.prepare(f.input(), {0, 1});
    for (const std::uint32_t question : {0u, 2u})
      for (int step = 0; step < 3; ++step)
        for (int layer = 0; layer < f.model->config.layers; ++layer)
          for (int head = 0; head < f.model->config.kv_heads; ++head) {
            const auto mass = runs.from(question, false, step, layer, head);
            kept[backend].emplace_back(mass.begin(), mass.end());
          }
  }
  const auto &wanted = kept["cpu"], &got = kept["cuda"];
  REQUIRE(got.size() == wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    REQUIRE(got[i].size() == wanted[i].size());
    REQUIRE_FALSE(wanted[i].empty());
    for (std::size_t t = 0; t < got[i].size(); ++t) CHECK(got[i][t] == Approx(wanted[i][t]).margin(0.01));
  }
}
