// Record and replay, from an experiment file to the cells of a result file, beside live runs of the same policies.
#include "run/replay.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "model/checkpoint.hpp"
#include "replay/recorder.hpp"
#include "result/profile_file.hpp"
#include "run/cell.hpp"
#include "run/prepare.hpp"
#include "run/record.hpp"
#include "run/runner.hpp"
#include "support/cell_fixture.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;
namespace fs = std::filesystem;

namespace {

constexpr const char* text_task = "text: {prefix: 96, forced: 24, samples: 2}";

std::string bytes_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Takes the tensors of later layers out of a safetensors file: length of the header, header (JSON), numbers.
void keep_layers(const fs::path& path, int layers) {
  const std::string bytes = bytes_of(path);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  const auto header = nlohmann::json::parse(bytes.substr(8, length));
  nlohmann::json kept;
  std::string numbers;
  for (const auto& [name, tensor] : header.items()) {
    constexpr std::string_view of_layer = "model.layers.";
    if (name.starts_with(of_layer) && std::stoi(name.substr(of_layer.size())) >= layers) continue;
    kept[name] = tensor;
    if (!tensor.contains("data_offsets")) continue;
    const std::size_t begin = tensor["data_offsets"][0], end = tensor["data_offsets"][1];
    kept[name]["data_offsets"] = {numbers.size(), numbers.size() + end - begin};
    numbers += bytes.substr(8 + length + begin, end - begin);
  }
  const std::string text = kept.dump();
  length = text.size();
  std::ofstream(path, std::ios::binary) << std::string(reinterpret_cast<const char*>(&length), 8) << text << numbers;
}

// A tiny model on two texts. `layers`: the first so many of its layers; 0 = all.
struct Case {
  test::TempDir folder;
  std::string model, dtype, task;

  explicit Case(const std::string& name = "llama-gqa3", int layers = 0, const std::string& of_dtype = "f32",
                const std::string& of_task = text_task)
      : model(test::golden("tiny/" + name).string()), dtype(of_dtype), task(of_task) {
    if (layers == 0) return;
    fs::copy(model, folder / "m", fs::copy_options::recursive);
    model = folder / "m";
    auto config = nlohmann::json::parse(bytes_of(folder / "m/config.json"));
    config["num_hidden_layers"] = layers;
    std::ofstream(folder / "m/config.json") << config;
    keep_layers(folder / "m/model.safetensors", layers);
  }
  std::string path(const std::string& name) const { return folder / name; }
  std::string head() const {
    return "model: {path: " + model + ", dtype: " + dtype + "}\ntasks: [" + task + "]\nfidelity: {tokens: 24}\n";
  }
  Experiment experiment(const std::string& policies, const std::string& more = {}) const {
    std::ofstream(path("e.yaml")) << head() << more << "page_size: 8\nmetrics: [fidelity, memory]\npolicies:\n"
                                  << policies;
    return load_experiment(path("e.yaml"), {}, test::built_catalog());
  }
  Recording record() const {
    REQUIRE(run_record(experiment("  - full\n"), test::built_catalog(), {"test", path("rec.h5"), std::nullopt, true}) ==
            0);
    return Recording(path("rec.h5"));
  }
  std::vector<results::CellResult> cells_of(Experiment e, const std::string& out) const {
    e.output = path(out);
    static_cast<void>(run_experiment(e, test::built_catalog(), {"test", false, true}));
    std::vector<results::CellResult> cells;
    for (const auto& row : results::read_summary(path(out)).rows) {
      CAPTURE(row.policy, row.error);
      cells.push_back(results::read_cell(path(out), row.cell));
    }
    return cells;
  }
  std::vector<results::CellResult> live(const std::string& policies) const {
    return cells_of(experiment(policies), "live.h5");
  }
  Experiment replaying(const Recording& recording, const std::string& policies, const std::string& more = {}) const {
    std::ofstream(path("p.yaml")) << more << "page_size: 8\npolicies:\n" << policies;
    return replayed_experiment(recording, path("p.yaml"), {}, test::built_catalog());
  }
  std::vector<results::CellResult> replayed(const Recording& recording, const std::string& policies) const {
    return cells_of(replaying(recording, policies), "replay.h5");
  }
};

// Scorers that evict at the prompt's end or in steps, by age, keys, queries or mass; divisions over heads and layers;
// selectors; tiers; codecs; future; methods of an amount or an index of their own, and such as change what is stored.
constexpr const char* policies_of_all_kinds = R"(
  - full
  - window: {budget: {tokens: 32}}
  - streaming_llm: {budget: {tokens: 32}, sinks: 4}
  - random: {budget: {tokens: 32}}
  - snapkv: {budget: {tokens: 32}, window: 8}
  - {name: ada, scorer: snapkv, window: 8, budget: {tokens: 32, split: adakv}}
  - h2o: {budget: {tokens: 32}}
  - tova: {budget: {tokens: 32}}
  - knorm: {budget: {tokens: 32}}
  - expected_attention: {budget: {tokens: 32}}
  - oracle_evict: {budget: {tokens: 32}}
  - quest: {budget: {tokens: 32}, dense_layers: 0}
  - oracle: {budget: {tokens: 32}, dense_layers: 0}
  - {name: placed, selector: quest, budget: {tokens: 32}, dense_layers: 0, placement: {tier: host, resident: 48}}
  - {name: coded, scorer: snapkv, window: 8, budget: {tokens: 32}, codec: int8}
  - {name: steep, scorer: snapkv, window: 8, budget: {tokens: 32, split: pyramid}}
  - {name: zigzag, scorer: snapkv, window: 8, budget: {tokens: 32, split: {zigzagkv: {each_head: true}}}}
  - {name: layers, scorer: cake, window: 8, budget: {tokens: 32, split: {cake_layers: {window: 8}}}}
  - keydiff: {budget: {tokens: 32}}
  - {name: means, scorer: h2o, mean: true, budget: {tokens: 32}}
  - scissorhands: {budget: {tokens: 32}, window: 6, recent: 4, drop: 6}
  - keyformer: {budget: {tokens: 32}, recent: 8}
  - morphkv: {budget: {tokens: 32}, window: 8}
  - raas_tokens: {budget: {tokens: 32}}
  - raas: {budget: {tokens: 32}}
  - k_center: {budget: {tokens: 32}}
  - {name: filled, policy: sparq, budget: {tokens: 32}, mean_value_of_groups: true}
  - {name: arkvale, policy: arkvale, budget: {tokens: 32}, dense_layers: 0, sinks: 8, window: 8}
  - {name: freekv, policy: freekv, budget: {tokens: 32}, dense_layers: 0, sinks: 8, window: 8}
  - clusterkv: {budget: {tokens: 32}, dense_layers: 0}
  - sparq: {budget: {tokens: 32}, dense_layers: 0}
  - twilight: {dense_layers: 0, p: 0.6}
  - leankv
  - magicpig: {full_layers: ""}
  - {name: streams, policy: duo_attention, retrieval_heads: false, sinks: 4, window: 16}
  - think
  - shadowkv: {budget: {tokens: 32}, rank: 8, outliers: 1, local_chunks: 1}
  - squeezed_attention: {window: 16}
  - {name: blocks, policy: infllm, prompt_retrieval: false, sinks: 8, window: 32, block: 16, top: 1}
  - {name: sketch, policy: subgen, sinks: 4, window: 32, clusters: 8, values: 16}
  - {name: pages of heads, policy: lserve, retrieval_heads: false, sinks: 4, window: 16}
  - {name: compensated, policy: razor_attention, retrieval_heads: false, sinks: 4, window: 16, window_share: 0}
)";

// Each in a setting in which it leaves nothing out.
constexpr const char* policies_that_hold_everything = R"(
  - full
  - window: {budget: {tokens: 256}}
  - random: {budget: {tokens: 256}}
  - {name: ada, scorer: snapkv, window: 8, budget: {tokens: 256, split: adakv}}
  - {name: zigzag, scorer: snapkv, window: 8, budget: {tokens: 256, split: zigzagkv}}
  - {name: layers, scorer: cake, window: 8, budget: {tokens: 256, split: {cake_layers: {window: 8}}}}
  - h2o: {budget: {tokens: 256}}
  - tova: {budget: {tokens: 256}}
  - knorm: {budget: {tokens: 256}}
  - keydiff: {budget: {tokens: 256}}
  - expected_attention: {budget: {tokens: 256}}
  - scissorhands: {budget: {tokens: 256}, window: 6, recent: 4, drop: 6}
  - keyformer: {budget: {tokens: 256}}
  - morphkv: {budget: {tokens: 256}, window: 8}
  - raas_tokens: {budget: {tokens: 256}}
  - raas: {budget: {tokens: 256}}
  - k_center: {budget: {tokens: 256}}
  - oracle_evict: {budget: {tokens: 256}}
  - quest: {budget: {tokens: 256}, dense_layers: 0}
  - oracle: {budget: {tokens: 256}, dense_layers: 0}
  - sparq: {budget: {tokens: 256}, dense_layers: 0}
  - clusterkv: {budget: {tokens: 256}, dense_layers: 0}
  - arkvale: {budget: {tokens: 256}, dense_layers: 0, sinks: 8, window: 8}
  - freekv: {budget: {tokens: 256}, dense_layers: 0, sinks: 8, window: 8}
  - omnikv: {budget: {tokens: 256}, filter_layers: "0", wait_layers: 0}
  - twilight: {dense_layers: 0, p: 1, tokens: 256}
  - magicpig: {bits: 0}
  - {name: blocks, policy: infllm, prompt_retrieval: false, sinks: 8, window: 256, block: 16}
  - {name: sketch, policy: subgen, window: 256}
  - {name: streams, policy: duo_attention, retrieval_heads: false, window: 256}
  - {name: pages of heads, policy: lserve, retrieval_heads: false, window: 256}
  - {name: compensated, policy: razor_attention, retrieval_heads: false, window: 256}
)";

// Each leaves tokens out in the last of 8 layers alone.
constexpr const char* policies_of_the_last_layer = R"(
  - quest: {budget: {tokens: 32}, dense_layers: 7}
  - oracle: {budget: {tokens: 32}, dense_layers: 7}
  - {name: placed, selector: quest, budget: {tokens: 32}, dense_layers: 7, placement: {tier: host, resident: 48}}
  - sparq: {budget: {tokens: 32}, dense_layers: 7}
  - clusterkv: {budget: {tokens: 32}, dense_layers: 7}
  - arkvale: {budget: {tokens: 32}, dense_layers: 7, sinks: 8, window: 8}
  - freekv: {budget: {tokens: 32}, dense_layers: 7, sinks: 8, window: 8}
  - raas: {budget: {tokens: 32}, dense_layers: 7}
  - twilight: {dense_layers: 7, p: 0.6}
  - magicpig: {full_layers: "0,1,2,3,4,5,6", window: 8}
  - omnikv: {budget: {tokens: 32}, filter_layers: "5", wait_layers: 1}
  - {name: newest queries, policy: omnikv, budget: {tokens: 32}, filter_layers: "5", wait_layers: 1, score_by: exp}
)";

// The largest difference of numbers [step, layer] of layers below `layers`. A NaN must meet a NaN.
double apart(const std::vector<float>& a, const std::vector<float>& b, std::int64_t of, std::int64_t layers) {
  REQUIRE(a.size() == b.size());
  REQUIRE(!a.empty());
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (static_cast<std::int64_t>(i) % of >= layers) continue;
    REQUIRE(std::isnan(a[i]) == std::isnan(b[i]));
    if (!std::isnan(a[i])) most = std::max(most, std::abs(double{a[i]} - double{b[i]}));
  }
  return most;
}

// Whether both measured the same in the first `layers` layers, to the rounding of f32 sums.
void check_equal(const std::vector<results::CellResult>& live, const std::vector<results::CellResult>& replayed,
                 std::int64_t layers) {
  REQUIRE(live.size() == replayed.size());
  for (std::size_t i = 0; i < live.size(); ++i) {
    const results::Fidelity &a = live[i].fidelity, &b = replayed[i].fidelity;
    CAPTURE(live[i].summary.policy, live[i].summary.error, replayed[i].summary.error);
    REQUIRE(live[i].summary.status == "ok");
    REQUIRE(replayed[i].summary.status == "ok");
    REQUIRE(live[i].summary.policy == replayed[i].summary.policy);
    CHECK(a.offsets == b.offsets);
    CHECK(apart(a.mass, b.mass, a.layers, layers) < 1e-5);
    CHECK(apart(a.page_recall, b.page_recall, a.layers, layers) < 1e-5);
    CHECK(apart(a.output_error, b.output_error, a.layers, layers) < 1e-4);
  }
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return !a.empty() && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
}

// A profile of the case's model, whose heads differ in every array.
std::string profile_of(const Case& c) {
  const auto model = load_model(*open_checkpoint(c.model), DType::f32, "m");
  Profile profile;
  for (const char* name : {"gate", "echo", "induction"}) {
    ProfileArray& array = profile[name];
    array.extent = {model->config.layers, model->config.kv_heads};
    for (int i = 0; i < model->config.layers * model->config.kv_heads; ++i)
      array.values.push_back(static_cast<float>(i + 1) / 8);
  }
  results::ProfileFile file;
  file.model = model->name, file.model_fingerprint = model->fingerprint, file.page_size = 8;
  file.profilers = {{"heads", "{}", profile}};
  results::RunInfo info;
  info.created_utc = "2026-01-01T00:00:00Z";
  results::write_profile(c.path("heads.h5"), info, file);
  return c.path("heads.h5");
}

}  // namespace

TEST_CASE("a replay measures what a live run of a model with one layer measures, in every policy") {
  // The queries, keys and values of the first layer depend on the text alone, whatever a policy does.
  const Case c("llama-gqa3", 1);
  const auto live = c.live(policies_of_all_kinds), replayed = c.replayed(c.record(), policies_of_all_kinds);
  check_equal(live, replayed, 1);
  std::set<double> masses;
  for (std::size_t i = 0; i < live.size(); ++i) {
    CAPTURE(live[i].summary.policy);
    CHECK(replayed[i].summary.mass == Approx(live[i].summary.mass).margin(1e-6));
    CHECK(replayed[i].summary.labels.find("replayed") != std::string::npos);
    CHECK(std::isnan(replayed[i].summary.score));
    CHECK(std::isnan(replayed[i].summary.kl));
    masses.insert(replayed[i].summary.mass);
  }
  CHECK(masses.size() > live.size() / 2);  // the policies differ, so equality says something
}

TEST_CASE("the mass of 20 recorded cases is that of a live run of the same policies") {
  const Case c("llama-gqa3", 1, "f32", "text: {prefix: 64, forced: 8, samples: 20}");
  const std::string policies =
      "  - snapkv: {budget: {tokens: 24}, window: 8}\n  - tova: {budget: {tokens: 24}}\n"
      "  - raas: {budget: {tokens: 24}}\n  - {name: filled, policy: sparq, budget: {tokens: 24}, mean_value_of_groups: "
      "true}\n"
      "  - quest: {budget: {tokens: 24}, dense_layers: 0}\n";
  const Recording recording = c.record();
  REQUIRE(recording.cases().size() == 20);
  const auto live = c.live(policies), replayed = c.replayed(recording, policies);
  check_equal(live, replayed, 1);
  for (std::size_t i = 0; i < live.size(); ++i) {
    CAPTURE(live[i].summary.policy);
    CHECK(live[i].fidelity.offsets.size() == 21);
    CHECK(replayed[i].summary.mass == Approx(live[i].summary.mass).margin(1e-6));
    CHECK(live[i].summary.mass < 0.999);
  }
}

TEST_CASE("in a deeper model a replay equals a live run in the first layer, in either dtype and with a window") {
  const auto [model, dtype] = GENERATE(table<std::string, std::string>(
      {{"llama-gqa3", "f32"}, {"llama-gqa3", "bf16"}, {"mistral-window32", "f32"}, {"qwen3", "f32"}}));
  CAPTURE(model, dtype);
  const Case c(model, 0, dtype);
  const std::string policies =
      "  - full\n  - snapkv: {budget: {tokens: 32}, window: 8}\n  - h2o: {budget: {tokens: 32}}\n"
      "  - quest: {budget: {tokens: 32}, dense_layers: 0}\n";
  const auto live = c.live(policies), replayed = c.replayed(c.record(), policies);
  check_equal(live, replayed, 1);
  // Later layers of a live run have the policy's errors in their queries. The full cache has none.
  check_equal({live[0]}, {replayed[0]}, live[0].fidelity.layers);
  CHECK(replayed[0].summary.mass == Approx(1).margin(1e-6));
  CHECK(replayed[0].summary.page_recall == 1);
}

TEST_CASE("a replay equals a live run in all layers of a deep model where a policy leaves nothing out") {
  Case c;
  c.model = "bundled/recall";
  c.task = "text: {prefix: 96, forced: 6, samples: 1}";
  const auto live = c.live(policies_that_hold_everything),
             replayed = c.replayed(c.record(), policies_that_hold_everything);
  REQUIRE(live[0].fidelity.layers == 8);
  check_equal(live, replayed, 8);
  for (const auto& cell : replayed) {
    CAPTURE(cell.summary.policy);
    CHECK(cell.summary.mass == Approx(1).margin(1e-6));
  }
}

TEST_CASE("a replay equals a live run in all layers of a deep model where a policy acts in the last one alone") {
  // What a layer attends to changes the rows of the layers behind it, and here there is none.
  Case c;
  c.model = "bundled/recall";
  c.task = "text: {prefix: 96, forced: 12, samples: 1}";
  const auto live = c.live(policies_of_the_last_layer), replayed = c.replayed(c.record(), policies_of_the_last_layer);
  REQUIRE(live[0].fidelity.layers == 8);
  check_equal(live, replayed, 8);
  for (const auto& cell : replayed) {
    CAPTURE(cell.summary.policy);
    CHECK(cell.summary.mass < 0.9999);
  }
}

TEST_CASE("a replay equals a live run up to the first layer that a policy of several layers changes") {
  const Case c;
  const std::string policies =
      "  - minicache: {start: 0.5}\n  - omnikv: {budget: {tokens: 32}, filter_layers: '0', wait_layers: 0}\n"
      "  - {name: own, policy: omnikv, budget: {tokens: 32}, filter_layers: '0', wait_layers: 0, shared_choice: "
      "false}\n";
  const auto live = c.live(policies), replayed = c.replayed(c.record(), policies);
  REQUIRE(live[0].fidelity.layers == 3);
  check_equal(live, replayed, 2);
  for (const auto& cell : replayed) CHECK(double{cell.fidelity.output_error.at(3 + 1)} > 1e-4);  // of the second step
}

TEST_CASE("a replay obeys a profile of the recording's model as a live run does") {
  const Case c("llama-gqa3", 1);
  const std::string heads = "profile: " + profile_of(c) + "}\n";
  const std::string policies =
      "  - duo_attention: {sinks: 4, window: 16, " + heads +
      "  - lserve: {sinks: 4, window: 16, tokens: 32, parts: 2, " + heads +
      "  - razor_attention: {sinks: 4, window: 16, window_share: 0, induction: 0.5, " + heads +
      "  - {name: heads, scorer: snapkv, window: 8, budget: {tokens: 32, split: head_profile}, " + heads;
  const auto live = c.live(policies), replayed = c.replayed(c.record(), policies);
  check_equal(live, replayed, 1);
  for (const auto& cell : replayed) {
    CAPTURE(cell.summary.policy);
    CHECK(cell.summary.mass < 0.9999);
  }
}

TEST_CASE("a replay turns keys back for policies that keep them by rank") {
  const Case c("llama-gqa3", 1);
  const std::string policies =
      "  - {name: ranks, scorer: streaming_llm, sinks: 4, budget: {tokens: 32}, rope: cache_relative}\n";
  const auto live = c.live(policies), replayed = c.replayed(c.record(), policies);
  REQUIRE(replayed[0].summary.status == "ok");
  // Turning to and fro rounds twice.
  CHECK(apart(live[0].fidelity.mass, replayed[0].fidelity.mass, 1, 1) < 1e-4);
  CHECK(apart(live[0].fidelity.output_error, replayed[0].fidelity.output_error, 1, 1) < 1e-3);
}

TEST_CASE("a replay counts the tokens kept and the bytes held and moved as a live run does") {
  const Case c("llama-gqa3", 1);
  const auto live = c.live(policies_of_all_kinds), replayed = c.replayed(c.record(), policies_of_all_kinds);
  for (std::size_t i = 0; i < live.size(); ++i) {
    const results::SummaryRow &a = live[i].summary, &b = replayed[i].summary;
    CAPTURE(a.policy);
    CHECK(a.device_bytes_decode == b.device_bytes_decode);
    CHECK(a.device_bytes_peak == b.device_bytes_peak);
    CHECK(a.host_bytes_peak == b.host_bytes_peak);
    CHECK(a.moved_device == b.moved_device);
    CHECK(a.moved_host == b.moved_host);
    CHECK(a.fired == b.fired);
  }
  // 96 tokens of prompt and 23 decode steps: the full cache holds 97 to 119 tokens.
  CHECK(replayed[0].summary.kept_tokens == Approx(108));
  CHECK(replayed[1].summary.kept_tokens == Approx(32).margin(8.01));  // window, evicting in pages
  CHECK(replayed[0].summary.moved_device + replayed[0].summary.moved_host == 0);
  const auto placed =
      std::find_if(replayed.begin(), replayed.end(), [](const auto& cell) { return cell.summary.policy == "placed"; });
  REQUIRE(placed != replayed.end());
  CHECK(placed->summary.moved_device > 0);
}

TEST_CASE("cells that share full attention measure what cells without it measure, bit for bit") {
  const auto [model, dtype] = GENERATE(
      table<std::string, std::string>({{"llama-gqa3", "f32"}, {"llama-gqa3", "bf16"}, {"mistral-window32", "bf16"}}));
  CAPTURE(model, dtype);
  const Case c(model, 0, dtype);
  const Recording recording = c.record();
  Experiment e = c.replaying(recording, policies_of_all_kinds);
  e.output = c.path("shared.h5");
  const PluginCatalog& catalog = test::built_catalog();
  const Prepared prepared = prepare(e, catalog);
  std::int64_t taken = prepared.replay_shared->left();
  std::size_t equal = 0;
  for (const Cell& cell : prepared.cells) {
    CellInput in = input(e, catalog, prepared, cell);
    const results::CellResult shared = run_cell(in);
    in.replay_shared = std::make_shared<ReplayShared>(0);
    const results::CellResult alone = run_cell(in);
    CHECK(in.replay_shared->left() == 0);
    CAPTURE(shared.summary.policy, shared.summary.error);
    REQUIRE(shared.summary.status == "ok");
    REQUIRE(alone.summary.status == "ok");
    CHECK(same_bits(shared.fidelity.mass, alone.fidelity.mass));
    CHECK(same_bits(shared.fidelity.page_recall, alone.fidelity.page_recall));
    CHECK(same_bits(shared.fidelity.output_error, alone.fidelity.output_error));
    CHECK(shared.summary.moved_host == alone.summary.moved_host);
    CHECK(shared.summary.device_bytes_peak == alone.summary.device_bytes_peak);
    CHECK(shared.summary.kept_tokens == alone.summary.kept_tokens);
    ++equal;
  }
  CHECK(equal == prepared.cells.size());
  // Of two texts, once where RoPE goes by text position and once where it goes by rank.
  taken -= prepared.replay_shared->left();
  CHECK(taken > 0);
  for (const bool by_rank : {false, true})
    for (const std::size_t number : {0, 1}) CHECK(prepared.replay_shared->attention({number, 8, by_rank}));
  CHECK(!prepared.replay_shared->attention({0, 16, false}));
}

TEST_CASE("what cells share takes no more memory than it may") {
  FullAttention::Layer layer;
  layer.output.resize(8), layer.mass.resize(64), layer.sums.resize(4), layer.rank.resize(4);
  FullAttention one(1 << 20);
  one.add(layer);
  const std::int64_t bytes = one.bytes();
  CHECK(bytes >= 8 * 4 + 64 * 4 + 4 * 8 + 4 * 4);
  const auto of = [&](int layers, std::int64_t most) {
    FullAttention attention(most);
    for (int i = 0; i < layers; ++i) attention.add(layer);
    return attention;
  };
  CHECK(of(3, 3 * bytes).whole());
  CHECK(!of(3, 3 * bytes - 1).whole());

  ReplayShared shared(5 * bytes);
  shared.keep({0, 16, false}, of(3, shared.left()));
  CHECK(shared.left() == 2 * bytes);
  shared.keep({1, 16, false}, of(3, shared.left()));  // it did not get all
  CHECK(shared.left() == 2 * bytes);
  shared.keep({1, 16, false}, of(3, 3 * bytes));  // too large for what is left
  CHECK(shared.left() == 2 * bytes);
  shared.keep({2, 16, false}, of(2, shared.left()));
  CHECK(shared.left() == 0);
  CHECK(shared.attention({0, 16, false}));
  CHECK(!shared.attention({0, 8, false}));
  CHECK(!shared.attention({0, 16, true}));
  CHECK(!shared.attention({1, 16, false}));
  CHECK(shared.attention({2, 16, false}));
}

TEST_CASE("cells of one task share the full cache's runs, and those of others go where memory is short") {
  const Case c;
  const Recording recording = c.record();
  Experiment e = c.replaying(recording, "  - oracle_evict: {budget: {tokens: [24, 32]}}\n");
  e.output = c.path("shared.h5");
  const PluginCatalog& catalog = test::built_catalog();
  const Prepared prepared = prepare(e, catalog);
  REQUIRE(prepared.cells.size() == 2);
  std::vector<double> masses;
  for (const Cell& cell : prepared.cells) {
    const results::CellResult result = run_cell(input(e, catalog, prepared, cell));
    REQUIRE(result.summary.status == "ok");
    masses.push_back(result.summary.mass);
  }
  CHECK(masses[0] < masses[1]);
  const Cell& cell = prepared.cells[0];
  const auto runs = prepared.replay_shared->full_runs(cell.task, cell.seed, 8);
  CHECK(runs->runs() == 2);  // of two samples, for two cells
  CHECK(runs->bytes() > 0);

  ReplayShared shared(1);
  const auto first = shared.full_runs(0, 0, 8);
  CHECK(shared.full_runs(0, 0, 8) == first);
  CHECK(shared.full_runs(0, 1, 8) != first);
  CHECK(shared.full_runs(0, 0, 16) != first);
  CHECK(shared.full_runs(0, 0, 8) == first);  // none holds anything
  CellInput in = input(e, catalog, prepared, cell);
  first->prepare(in, {0});
  static_cast<void>(shared.full_runs(0, 1, 8));
  CHECK(shared.full_runs(0, 0, 8) != first);
}

TEST_CASE("questions that a run generates answers to are recorded with the full cache's answers") {
  Case recall;
  recall.model = "bundled/recall";
  recall.task = "niah: {context: 320, depth: 2, samples: 1, question: decode, max_new_tokens: 8}";
  const std::string policies =
      "  - full\n  - snapkv: {budget: {tokens: 64}, window: 16}\n  - oracle_evict: {budget: {tokens: 64}}\n";
  const Recording recording = recall.record();
  REQUIRE(recording.cases().size() == 2);
  for (const RecordedCase& one : recording.cases()) {
    CHECK(!one.fed.empty());
    CHECK(!one.answer.empty());
    CHECK(one.answer.size() <= 8);
  }
  check_equal(recall.live(policies), recall.replayed(recording, policies), 1);
}

TEST_CASE("replays refuse what a recording lacks before any work") {
  const Case c;
  const Recording recording = c.record();
  const auto refused = [&](const std::string& policies, const std::string& more = {}) {
    return [=, &c, &recording] { static_cast<void>(c.cells_of(c.replaying(recording, policies, more), "x.h5")); };
  };
  CHECK_THROWS_WITH(refused("  - full\n", "model: {path: bundled/recall}\n")(),
                    Catch::Contains("got the model bundled/recall in bf16, wanted none or " + c.model + " in f32"));
  CHECK_THROWS_WITH(refused("  - full\n", "model: {path: " + c.model + ", dtype: bf16}\n")(),
                    Catch::Contains("in bf16, wanted none or"));
  CHECK_THROWS_WITH(refused("  - full\n", "tasks: [text: {prefix: 97, forced: 24, samples: 2}]\n")(),
                    Catch::Contains("wanted a task of the recording"));
  CHECK_THROWS_WITH(refused("  - full\n", "seed: 7\n")(), Catch::Contains("text with seed 7"));
  CHECK_THROWS_WITH(refused("  - full\n", "prefill_chunk: 32\n")(), Catch::Contains("got 'prefill_chunk'"));
  CHECK_THROWS_WITH(refused("  - full\n", "backend: cuda\n")(), Catch::Contains("replay runs on the CPU"));
  CHECK_THROWS_WITH(refused("  - nosuch\n")(), Catch::Contains("p.yaml:3"));
  CHECK_THROWS_WITH(refused("  - criticalkv: {budget: {tokens: 32}}\n")(),
                    Catch::Contains("p.yaml:3") && Catch::Contains("a recording has no output projection"));
  CHECK_THROWS_WITH(refused("  - infinigen: {skew: false}\n")(),
                    Catch::Contains("p.yaml:3") && Catch::Contains("a recording has no hidden states"));
  CHECK_THROWS_WITH(refused("  - infllm: {sinks: 8, window: 32, block: 16}\n")(),
                    Catch::Contains("p.yaml:3") && Catch::Contains("chooses what prompts attend to"));
  CHECK_THROWS_WITH(refused("  - fastgen\n")(),
                    Catch::Contains("p.yaml:3") && Catch::Contains("a recording has no tokenizer"));
  CHECK(!fs::exists(c.path("x.h5")));
  c.experiment("  - full\n");
  CHECK_THROWS_WITH(run_experiment(
                        [&] {
                          Experiment e = c.replaying(recording, "  - full\n");
                          e.output = recording.path();
                          return e;
                        }(),
                        test::built_catalog(), {"test", false, true}),
                    Catch::Contains("rec.h5"));
}

TEST_CASE("a recording's own policies are replayed where no file is given") {
  const Case c;
  REQUIRE(run_record(c.experiment("  - snapkv: {budget: {tokens: 32}, window: 8}\n"), test::built_catalog(),
                     {"test", c.path("rec.h5"), 1, true}) == 0);
  const Recording recording(c.path("rec.h5"));
  CHECK(recording.cases().size() == 1);  // of two samples
  const auto cells =
      c.cells_of(replayed_experiment(recording, "", {"snapkv.window=[8,16]"}, test::built_catalog()), "replay.h5");
  REQUIRE(cells.size() == 2);
  for (const auto& cell : cells) {
    CHECK(cell.summary.policy == "snapkv");
    CHECK(cell.samples.size() == 1);
  }
  CHECK(cells[0].summary.mass != cells[1].summary.mass);
}
