#include "experiment/experiment.hpp"

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "base/threads.hpp"
#include "experiment/fake_catalog.hpp"

using namespace kvlab;

namespace {

const test::FakeCatalog catalog;

Experiment load(const std::string& text, const std::vector<std::string>& sets = {}) {
  yaml::Document document = yaml::parse_text(text, "exp.yaml");
  document.sets = sets;
  return read_experiment(std::move(document), catalog);
}

// "exp.yaml:3:7: got ..." per error.
std::vector<std::string> errors(const std::string& text, const std::vector<std::string>& sets = {}) {
  try {
    load(text, sets);
  } catch (const ExperimentError& e) {
    std::vector<std::string> all;
    for (const Error& one : e.errors()) all.emplace_back(one.what());
    return all;
  } catch (const Error& e) {
    return {e.what()};
  }
  return {};
}

std::vector<Cell> plain_cells(const Experiment& e) { return cells(e, catalog, Fingerprints{}); }

const std::string head = "model: bundled/smollm2\ntasks: [niah]\n";  // policies begin in line 3

void refused(const std::string& text, const std::string& start, const std::vector<std::string>& parts = {}) {
  const auto all = errors(text);
  CAPTURE(text, all);
  REQUIRE(!all.empty());
  CHECK(all.front().substr(0, start.size()) == start);
  for (const std::string& part : parts) CHECK_THAT(all.front(), Catch::Contains(part));
}

std::vector<std::string> names(const Experiment& e) {
  std::vector<std::string> all;
  for (const PolicySpec& p : e.policies) all.push_back(p.name);
  return all;
}

}  // namespace

TEST_CASE("every key of an experiment file") {
  const Experiment e = load(R"(
experiment: first
model: {path: models/tiny, dtype: f32}
backend: cpu
tasks:
  - niah: {context: [2048, 8192], depth: 3, question: decode, questions: 2, seed: 5}
  - text: {metric: {similar: {ratio: 0.25}}}
policies:
  - full
  - snapkv: {budget: {tokens: 512, split: {pyramid: {beta: 7}}}, window: 16, schedule: {prefill: false, every: 8}}
  - {name: mine, scorer: {snapkv: {kernel: 5}}, budget: {ratio: 0.25}, codec: int8, page_size: 32, profile: p.h5}
  - quest: {budget: {bytes: 2MiB}, placement: {tier: host, resident: 64, codec: {int8: {axis: channel}}}}
  - {name: fewer, policy: full, pruner: {twilight: {p: 0.5}}}
  - knorm: {budget: {tokens: 9}, rescorer: criticalkv}
repeats: 2
seed: [3, 4]
metrics: [score, trace]
output: out/first.h5
batch: 8
threads: 2
device_memory: 1.5GB
host_memory: 3MiB
page_size: 8
prefill_chunk: 256
fidelity: {tokens: 9}
plugin_path: [mine, /opt/plugins]
)");
  CHECK(e.name == "first");
  REQUIRE(e.models.size() == 1);
  CHECK(e.models[0].path == "models/tiny");
  CHECK(e.models[0].dtype == DType::f32);
  CHECK(e.backend == "cpu");
  CHECK(e.repeats == 2);
  CHECK(e.seeds == std::vector<std::int64_t>{3, 4});
  CHECK(e.metrics == std::set<Metric>{Metric::score, Metric::trace});
  CHECK(e.output == "out/first.h5");
  CHECK(e.batch == 8);
  CHECK(e.threads == 2);
  CHECK(e.device_memory == 1'500'000'000);
  CHECK(e.host_memory == 3 << 20);
  CHECK(e.prefill_chunk == 256);
  CHECK(e.fidelity_tokens == 9);
  CHECK(e.plugin_path == std::vector<std::string>{"mine", "/opt/plugins"});

  REQUIRE(e.tasks.size() == 3);
  CHECK(e.tasks[0].task.params.get<int>("context") == 2048);
  CHECK(e.tasks[1].task.params.get<int>("context") == 8192);
  CHECK(e.tasks[1].task.params.get<int>("depth") == 3);
  CHECK(e.tasks[1].question == Question::decode);
  CHECK(e.tasks[1].questions == 2);
  CHECK(e.tasks[1].seed == 5);
  CHECK(e.tasks[2].name == "text");
  CHECK(!e.tasks[2].seed);
  CHECK((!e.tasks[0].metric && !e.tasks[0].names_metric));
  REQUIRE(e.tasks[2].metric);
  CHECK(e.tasks[2].names_metric);
  CHECK(e.tasks[2].metric->name == "similar");
  CHECK(e.tasks[2].metric->params.get<double>("ratio") == 0.25);

  REQUIRE(names(e) == std::vector<std::string>{"full", "snapkv", "mine", "quest", "fewer", "knorm"});
  CHECK(!e.policies[0].policy);
  CHECK(e.policies[0].page_size == 8);
  CHECK(e.policies[0].where == "exp.yaml:9:5");

  const PolicySpec& snapkv = e.policies[1];
  REQUIRE(snapkv.scorer);
  CHECK(snapkv.scorer->params.get<int>("window") == 16);
  CHECK(snapkv.scorer->params.get<int>("kernel") == 7);
  CHECK(snapkv.budget.kind == BudgetAmount::tokens);
  CHECK(snapkv.budget.value == 512);
  REQUIRE(snapkv.split);
  CHECK(snapkv.split->params.get<double>("beta") == 7);
  CHECK(!snapkv.schedule.prefill);
  CHECK(snapkv.schedule.every == 8);

  const PolicySpec& mine = e.policies[2];
  CHECK(mine.scorer->name == "snapkv");
  CHECK(mine.scorer->params.get<int>("kernel") == 5);
  CHECK(mine.budget.kind == BudgetAmount::ratio);
  CHECK(mine.codec->name == "int8");
  CHECK(mine.page_size == 32);
  CHECK(mine.profile == "p.h5");
  CHECK(!mine.schedule.every);

  const PolicySpec& quest = e.policies[3];
  CHECK(quest.budget.kind == BudgetAmount::bytes);
  CHECK(quest.budget.value == 2 * 1048576);
  CHECK(quest.placement.tier == Tier::host);
  CHECK(quest.placement.resident == 64);
  CHECK(quest.placement.codec->params.get<std::string>("axis") == "channel");
  CHECK(to_json(quest).dump() ==
        R"({"selector":{"quest":{"dense_layers":2,"last_page":false,"page_bounds":true,"reuse":true}},)"
        R"("budget":{"bytes":2097152},"placement":{"tier":"host","resident":64,"codec":{"int8":{"axis":"channel"}}},)"
        R"("page_size":8})");

  const PolicySpec& fewer = e.policies[4];
  CHECK((!fewer.policy && fewer.pruner && fewer.pruner->params.get<double>("p") == 0.5));
  CHECK(to_json(fewer).dump() == R"({"pruner":{"twilight":{"p":0.5,"top_p":true}},"page_size":8})");
  REQUIRE(e.policies[5].rescorer);
  CHECK(e.policies[5].rescorer->name == "criticalkv");

  // (2 niah of seed 5 + 1 text of seeds 3 and 4) x 6 policies x 2 repeats
  CHECK(plain_cells(e).size() == (2 + 2) * 6 * 2);
}

TEST_CASE("synthetic models and backends") {
  const Experiment e =
      load("backend: cuda\nmodel: {synthetic: [tiny, llama-3.1-8b], dtype: fp16}\ntasks: [niah]\npolicies: [full]\n");
  CHECK(e.models.size() == 2);
  CHECK(e.models[1].name() == "synthetic/llama-3.1-8b");
  CHECK(e.models[1].dtype == DType::f16);
  CHECK(e.backend == "cuda");
  CHECK(e.backend_where == "exp.yaml:1:10");
}

TEST_CASE("defaults") {
  const Experiment e = load(head + "policies: [full]\n");
  CHECK(e.name == "exp");
  CHECK(e.models[0].dtype == DType::bf16);
  CHECK(e.backend == "auto");
  CHECK(e.metrics == std::set<Metric>{Metric::score, Metric::fidelity, Metric::memory, Metric::latency});
  CHECK(e.output == "results/exp.h5");
  CHECK(plain_cells(e).size() == 1);
  const Experiment parts = load(head + "policies: [full]\nmetrics: parts\n");  // parts of latency's times
  CHECK(parts.metrics == std::set<Metric>{Metric::latency, Metric::parts});
}

TEST_CASE("a wrong file is refused where it is wrong") {
  refused("", "exp.yaml: got nothing");
  refused("- a\n", "exp.yaml:1:1: got a list");
  refused("a: [1, 2\n", "exp.yaml:2:1: got text that is no YAML");
  refused("a: 1\nb: 2\na: 3\n", "exp.yaml:3:1: got key 'a' twice (first in line 1)");
  refused("a: 1\n---\nb: 2\n", "exp.yaml:3:1: got a second YAML document");
  refused("a: !!int 3\n", "exp.yaml:1:4: got the tag");
  refused("a: *nobody\n", "exp.yaml:1:4: got text that is no YAML");
  refused("a: &x [*x]\n", "exp.yaml:1:8: got an alias inside");
  refused("[a]: 1\n", "exp.yaml:1:1: got a list as a key");
  refused("a: 1\nb: \xff\n", "exp.yaml:2:4: got byte 0xff");
  refused(std::string("a: 1\nb\0: 2\n", 11), "exp.yaml:2:2: got byte 0x00");
  refused("a: \"\\uD800\"\n", "exp.yaml:1:11: got text that is no YAML");
  refused(std::string(300 * 1024, '#'), "exp.yaml: got more than");
  refused("a: " + std::string(40, '[') + std::string(40, ']'), "exp.yaml:1:27: got more than 24 levels");
  CHECK(errors("a: " + std::string(5000, '[')).size() == 1);
  std::string bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n";
  for (int i = 1; i < 12; ++i) {
    const std::string before = "*a" + std::to_string(i - 1);
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [" + before;
    for (int k = 0; k < 9; ++k) bomb += "," + before;
    bomb += "]\n";
  }
  refused(bomb, "exp.yaml:5:", {"got more than 50000 values"});
}

TEST_CASE("unknown keys and wrong values name what is allowed") {
  const std::string p = head + "policies:\n";  // entries begin in line 4
  refused(p + "  - full\nbakend: cpu\n", "exp.yaml:5:1: got unknown key 'bakend'",
          {"did you mean 'backend'?", "prefill_chunk"});
  refused(p + "  - full\nbackend: cpi\n", "exp.yaml:5:10: got 'cpi'",
          {"one of auto | cpu | cuda (", "did you mean 'cpu'?"});
  refused(p + "  - full\nrepeats: 0\n", "exp.yaml:5:10: got 0", {"1 to 1000", "'repeats'"});
  refused(p + "  - full\nrepeats: many\n", "exp.yaml:5:10: got 'many'", {"integer"});
  refused(p + "  - full\nrepeats: '2'\n", "exp.yaml:5:10: got '2'", {"quotes make it text"});
  refused(p + "  - full\nrepeats: 2.5\n", "exp.yaml:5:10: got 2.5", {"integer"});
  refused(p + "  - full\nrepeats: 5e2\n", "exp.yaml:5:10: got 5e2, wanted an integer");
  refused(p + "  - full\nrepeats: 99999999999999999999\n", "exp.yaml:5:10: got ", {"integer"});
  refused(p + "  - full\nrepeats: [1, 2]\n", "exp.yaml:5:10: got a list for 'repeats'");
  refused(p + "  - full\nthreads: 4096\n", "exp.yaml:5:10: got 4096",
          {"0 to " + std::to_string(most_threads()), "'threads'"});
  refused(p + "  - full\nthreads: -1\n", "exp.yaml:5:10: got -1");
  CHECK(load(p + "  - full\nthreads: " + std::to_string(most_threads()) + "\n").threads == most_threads());
  refused(p + "  - full\nequal_bytes: much\n", "exp.yaml:5:14: got 'much'", {"GiB"});
  refused(p + "  - snapkv: {budget: {tokens: 8}}\nequal_bytes: 1MiB\n", "exp.yaml:4:5: got a budget of 'snapkv'",
          {"beside equal_bytes"});
  refused(p + "  - snapkv: {budget: {split: pyramid}}\n", "exp.yaml:4:22: got a budget with 0 amounts");
  refused(p + "  - full\nequal_bytes: 1MiB\nworkload: {}\n", "exp.yaml:5:1: got equal_bytes with a workload");
  refused(p + "  - full\ndevice_memory: 68 goats\n", "exp.yaml:5:16: got '68 goats'", {"GiB"});
  refused(p + "  - full\nhost_memory: 68 goats\n", "exp.yaml:5:14: got '68 goats'", {"GiB"});
  refused(p + "  - full\nmetrics: [score, speed]\n", "exp.yaml:5:18: got 'speed'", {"score | fidelity"});
  refused(p + "  - full\nsampling: 0.6\n", "exp.yaml:5:11: got '0.6' for 'sampling', wanted a map");
  refused(p + "  - full\nsampling: {}\n", "exp.yaml:5:11: got no temperature for 'sampling'");
  refused(p + "  - full\nsampling: {top_p: 0.9}\n", "exp.yaml:5:11: got no temperature for 'sampling'");
  refused(p + "  - full\nsampling: {temperature: -1}\n", "exp.yaml:5:25: got -1", {"0 to 100", "'temperature'"});
  refused(p + "  - full\nsampling: {temperature: hot}\n", "exp.yaml:5:25: got 'hot'");
  refused(p + "  - full\nsampling: {temperature: [0.6, 1]}\n", "exp.yaml:5:25: got a list for 'temperature'");
  refused(p + "  - full\nsampling: {temperature: 1, top_p: 0}\n", "exp.yaml:5:35: got 0 for 'top_p', wanted more");
  refused(p + "  - full\nsampling: {temperature: 1, top_p: 1.1}\n", "exp.yaml:5:35: got 1.1", {"'top_p'"});
  refused(p + "  - full\nsampling: {temperature: 1, top_k: -2}\n", "exp.yaml:5:35: got -2", {"'top_k'"});
  refused(p + "  - full\nsampling: {temperature: 1, draws: 0}\n", "exp.yaml:5:35: got 0", {"'draws'"});
  refused(p + "  - full\nsampling: {temperature: 0, draws: 8}\n", "exp.yaml:5:35: got 8 draws at temperature 0");
  refused(p + "  - full\nsampling: {temperature: 1, seed: 0.5}\n", "exp.yaml:5:34: got 0.5", {"integer"});
  refused(p + "  - full\nsampling: {temp: 1}\n", "exp.yaml:5:12: got unknown key 'temp'",
          {"temperature, top_p, top_k, draws, seed"});
  refused(p + "  - full\nworkload: {request: 3}\n", "exp.yaml:5:12: got unknown key 'request'",
          {"did you mean 'requests'?"});
  refused(p + "  - full\nworkload: {requests: -1}\n", "exp.yaml:5:22: got -1", {"'requests'"});
  refused(p + "  - full\nworkload: {arrivals: poison}\n", "exp.yaml:5:22: got 'poison'", {"did you mean 'poisson'?"});
  refused(p + "  - full\nworkload: {arrivals: poisson}\n", "exp.yaml:5:11: got arrivals: poisson without a rate");
  refused(p + "  - full\nworkload: {rate: 2}\n", "exp.yaml:5:18: got a rate with arrivals: all", {"poisson"});
  refused(p + "  - full\nworkload: {arrivals: trace}\n", "exp.yaml:5:11: got arrivals: trace without a file");
  refused(p + "  - full\nworkload: {file: a.csv}\n", "exp.yaml:5:18: got a file with arrivals: all", {"trace"});
  refused(p + "  - full\nworkload: 3\n", "exp.yaml:5:11: got '3' for 'workload', wanted a map");
  refused(p + "  - full\nworkload: {}\nmetrics: [score, trace]\n", "exp.yaml:6:18: got 'trace' with a workload",
          {"latency"});
  const std::string q = p + "  - quest\n";
  refused(q + "inject: {rerank_overlap: 0.5}\n", "exp.yaml:5:26: got rerank_overlap without overlap");
  refused(q + "inject: {overlap: 1, rerank_overlap: 1.5}\n", "exp.yaml:5:38: got 1.5", {"'rerank_overlap'"});
  refused(q + "inject: {overlap: 1.2}\n", "exp.yaml:5:19: got 1.2", {"0 to 1", "'overlap'"});
  refused(q + "inject: {overlap: -0.1}\n", "exp.yaml:5:19: got -0.1", {"0 to 1"});
  refused(q + "inject: {overlap: much}\n", "exp.yaml:5:19: got 'much'");
  refused(q + "inject: 0.5\n", "exp.yaml:5:9: got '0.5' for 'inject', wanted a map");
  refused(q + "inject: ~\n", "exp.yaml:5:9: got an empty 'inject'",
          {"{overlap: X}, {trace: FILE}, {correction: X} or {drift: X}"});
  refused(q + "inject: {}\n", "exp.yaml:5:9: got neither overlap, trace, correction nor drift",
          {"{overlap: X}, {trace: FILE}"});
  refused(q + "inject: {overlap: 1, trace: a.h5}\n", "exp.yaml:5:9: got overlap and trace");
  refused(q + "inject: {overlap: 1, cell: a}\n", "exp.yaml:5:28: got a cell without a trace");
  refused(q + "inject: {overlp: 1}\n", "exp.yaml:5:10: got unknown key 'overlp'", {"did you mean 'overlap'?"});
  refused(p + "  - full\ninject: {overlap: 1}\n", "exp.yaml:5:9: got inject without a policy that selects");
  refused(q + "inject: {correction: 2}\n", "exp.yaml:5:22: got 2", {"0 to 1", "'correction'"});
  refused(q + "inject: {correction: 0.5}\n", "exp.yaml:5:9: got a correction or drift in inject without a policy");
  refused(q + "inject: {drift: 0.5}\n", "exp.yaml:5:9: got a correction or drift in inject without a policy");
  refused(q + "inject: {drift: 2}\n", "exp.yaml:5:17: got 2");
  refused(p + "  - full\nexperiment: a/b\n", "exp.yaml:5:13: got 'a/b'");
  refused(p + "  - full\noutput: ''\n", "exp.yaml:5:9: got empty text");
  refused(p + "  - full\nfidelity: {token: 3}\n", "exp.yaml:5:12: got unknown key 'token'", {"did you mean 'tokens'?"});

  refused(p + "  - snapvk\n", "exp.yaml:4:5: got unknown policy 'snapvk'", {"did you mean 'snapkv'?", "quest", "full"});
  refused(p + "  - snapkv: {buget: {tokens: 3}}\n", "exp.yaml:4:14: got unknown key 'buget'",
          {"did you mean 'budget'?", "window"});
  refused(p + "  - snapkv: {windw: 3}\n", "exp.yaml:4:14: got unknown key 'windw'", {"did you mean 'window'?"});
  refused(p + "  - snapkv: {window: 0}\n", "exp.yaml:4:22: got 0", {"at least 1"});
  refused(p + "  - snapkv: {window: 3000000000}\n", "exp.yaml:4:22: got 3000000000", {"at most 2147483647"});
  refused(p + "  - snapkv: {pooling: sum}\n", "exp.yaml:4:23: got 'sum'", {"max | average | none"});
  refused(p + "  - snapkv: [1]\n", "exp.yaml:4:14: got '1' for 'snapkv', wanted a map");
  refused(p + "  - snapkv:\n    budget: {tokens: 512}\n", "exp.yaml:5:5: got key 'budget' beside 'snapkv'", {"indent"});
  refused(p + "  - snapkv: {budget: 512}\n", "exp.yaml:4:22: got '512' for 'budget'", {"tokens: N"});
  refused(p + "  - snapkv: {budget: {}}\n", "exp.yaml:4:22: got a budget with 0 amounts");
  refused(p + "  - snapkv: {budget: {tokens: 4, ratio: 1}}\n", "exp.yaml:4:22: got a budget with 2 amounts");
  refused(p + "  - snapkv: {budget: {tokens: 0}}\n", "exp.yaml:4:31: got 0");
  refused(p + "  - snapkv: {budget: {ratio: 1.5}}\n", "exp.yaml:4:30: got 1.5");
  refused(p + "  - snapkv: {budget: {ratio: nan}}\n", "exp.yaml:4:30: got 'nan'");
  refused(p + "  - snapkv: {budget: {tokens: 4, split: pyramd}}\n", "exp.yaml:4:41: got unknown budget 'pyramd'",
          {"did you mean 'pyramid'?", "uniform"});
  refused(p + "  - snapkv: {codec: {int8: {axs: a}}}\n", "exp.yaml:4:29: got unknown key 'axs'",
          {"did you mean 'axis'?"});
  refused(p + "  - snapkv: {placement: {tier: disk}}\n", "exp.yaml:4:32: got tier: disk", {"not in this version"});
  refused(p + "  - full: {window: 3}\n", "exp.yaml:4:12: got unknown key 'window'");
  refused(p + "  - full: {budget: {tokens: 3}}\n", "exp.yaml:4:12: got a budget");
  refused(p + "  - knorm: {k: 3}\n", "exp.yaml:4:13: got unknown key 'k'", {"budget"});
  refused(p + "  - streaming_llm: {selector: quest}\n", "exp.yaml:4:21: got policy 'streaming_llm' with");
  for (const std::string of : {"streaming_llm: {", "{name: a, policy: streaming_llm, "})
    refused(p + "  - " + of + "placement: {tier: host}}\n",
            "exp.yaml:4:" + std::to_string(5 + of.size()) + ": got a placement beside policy 'streaming_llm'",
            {"alone says where"});
  refused(p + "  - quest: {schedule: {every: 3}}\n", "exp.yaml:4:13: got a schedule without a scorer");
  refused(p + "  - snapkv: {pruner: twilight}\n", "exp.yaml:4:14: got a pruner beside scorer 'snapkv'");
  refused(p + "  - quest: {pruner: quest}\n", "exp.yaml:4:21: got unknown pruner 'quest'", {"'quest' is a selector"});
  refused(p + "  - quest: {pruner: {twilight: {p: 2}}}\n", "exp.yaml:4:36: got 2");
  refused(p + "  - quest: {rescorer: criticalkv}\n", "exp.yaml:4:13: got a rescorer without a scorer");
  refused(p + "  - full: {rescorer: criticalkv}\n", "exp.yaml:4:12: got a rescorer without a scorer");
  refused(p + "  - snapkv: {rescorer: knorm}\n", "exp.yaml:4:24: got unknown rescorer 'knorm'",
          {"'knorm' is a scorer"});
  refused(p + "  - snapkv: {rescorer: criticalkv, schedule: {prefill: false}}\n",
          "exp.yaml:4:14: got a rescorer with schedule.prefill: false");
  refused(p + "  - {budget: {tokens: 3}}\n", "exp.yaml:4:5: got a policy without a name");
  refused(p + "  - {name: a, scorer: snapkv, selector: quest, window: 3}\n", "exp.yaml:4:48: got unknown key 'window'");
  refused(p + "  - [full]\n", "exp.yaml:4:5: got a list as a policy");
  refused(head + "policies: full\n", "exp.yaml:3:11: got 'full' for 'policies', wanted a list");
  refused(head + "policies: []\n", "exp.yaml:3:11: got an empty list");
  refused(head, "exp.yaml:1:1: got no 'policies'");
  refused("tasks: [niah]\npolicies: [full]\n", "exp.yaml:1:1: got no 'model'");

  const auto with_model = [](const std::string& m) { return "tasks: [niah]\npolicies: [full]\nmodel: " + m + "\n"; };
  refused("backend: cpu\n" + with_model("{path: a, dtype: fp16}"), "exp.yaml:4:25: got dtype fp16", {"bf16 or f32"});
  refused(with_model("{synthetic: llama-3.1-8}"), "exp.yaml:3:20: got 'llama-3.1-8'",
          {"did you mean 'llama-3.1-8b'?", "qwen2.5-7b"});
  refused(with_model("{synthetic: tiny, path: a}"), "exp.yaml:3:32: got a path beside synthetic", {"one of them"});
  refused(with_model("{synthetic: tiny, adapter: a}"), "exp.yaml:3:35: got an adapter", {"from files"});
  refused(with_model("{dtype: f32}"), "exp.yaml:3:8: got a model without a path");
  refused(with_model("{pth: a}"), "exp.yaml:3:9: got unknown key 'pth'", {"did you mean 'path'?"});

  const auto with_task = [](const std::string& t) { return "model: m\npolicies: [full]\ntasks:\n  - " + t + "\n"; };
  refused(with_task("nia"), "exp.yaml:4:5: got unknown task 'nia'", {"did you mean 'niah'?"});
  refused(with_task("niah: {contxt: 3}"), "exp.yaml:4:12: got unknown key 'contxt'", {"did you mean 'context'?"});
  refused(with_task("niah: {question: late}"), "exp.yaml:4:22: got 'late'", {"prompt | decode"});
  refused(with_task("niah: {turns: 0}"), "exp.yaml:4:19: got 0, wanted", {"'turns'"});
  refused(with_task("niah: {metric: f2}"), "exp.yaml:4:20: got unknown metric 'f2', wanted one of: f1, similar",
          {"did you mean 'f1'?"});
  refused(with_task("niah: {metric: niah}"), "exp.yaml:4:20: got unknown metric 'niah'", {"'niah' is a task"});
  refused(with_task("niah: {metric: {similar: {ratio: 2}}}"), "exp.yaml:4:38: got 2");
  refused(with_task("niah: {context: []}"), "exp.yaml:4:21: got an empty list");
  refused(with_task("niah: {context: [[1]]}"), "exp.yaml:4:22: got a list inside a list");
}

TEST_CASE("an unknown key's message names every key once") {
  const auto all = errors(head + "policies: [full]\ntask: 1\n");
  REQUIRE(all.size() == 1);
  const std::string keys = all.front().substr(all.front().find("wanted one of:"));
  for (const char* key : {" tasks,", " policies,", " seed,", " plugin_path"}) {
    CAPTURE(keys, key);
    REQUIRE(keys.find(key) != std::string::npos);
    CHECK(keys.find(key) == keys.rfind(key));
  }
}

TEST_CASE("a name of another role says what it is") {
  refused(head + "policies: [int8]\n", "exp.yaml:3:12: got unknown policy 'int8'", {"'int8' is a codec"});
  refused("tasks: [quest]\npolicies: [full]\nmodel: m\n", "exp.yaml:1:9: got unknown task 'quest'",
          {"'quest' is a selector"});
}

TEST_CASE("a plugin whose parameter is a key of every entry is refused") {
  test::FakeCatalog bad;
  bad.add(Role::task, "quiz", {make_param("question", std::string(), "")});
  bad.add(Role::scorer, "greedy", {make_param("budget", 3, 0, 9, "")});
  const auto why = [&](const std::string& text) {
    try {
      read_experiment(yaml::parse_text(text, "exp.yaml"), bad);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK_THAT(why("tasks: [quiz]\npolicies: [full]\nmodel: m\n"),
             Catch::Contains("exp.yaml:1:9: got plugin 'quiz' with a parameter 'question'"));
  CHECK_THAT(why(head + "policies: [greedy]\n"),
             Catch::Contains("exp.yaml:3:12: got plugin 'greedy' with a parameter 'budget'"));
}

TEST_CASE("all errors are told at once, each once") {
  const auto all = errors(head + "policies:\n  - snapkv: {window: [1, 2, 0], kernl: 3}\n  - qest\nbatch: x\n");
  CHECK(all.size() == 4);
}

TEST_CASE("lists are axes") {
  const Experiment e = load(head + R"(policies:
  - snapkv: {budget: {tokens: [256, 512]}, window: [8, 16]}
  - {name: k, scorer: knorm, budget: {tokens: 9, split: [uniform, {pyramid: {beta: 3}}]}}
)");
  REQUIRE(e.policies.size() == 6);
  const auto at = [&](std::size_t i) {
    return std::pair(e.policies[i].budget.value, e.policies[i].scorer->params.get<int>("window"));
  };
  CHECK(at(0) == std::pair(256.0, 8));
  CHECK(at(1) == std::pair(256.0, 16));
  CHECK(at(2) == std::pair(512.0, 8));
  CHECK(at(3) == std::pair(512.0, 16));
  CHECK(e.policies[4].split->name == "uniform");
  CHECK(e.policies[5].split->params.get<double>("beta") == 3);
  const std::string axis = "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30]";
  refused(
      head + "policies:\n  - snapkv: {budget: {tokens: " + axis + "}, window: " + axis + ", kernel: " + axis + "}\n",
      "exp.yaml:4:", {"combinations"});
}

TEST_CASE("sweep") {
  const std::string p = head + "policies:\n  - snapkv: {budget: {tokens: 512}}\n  - quest\n";
  const Experiment e = load(p +
                            "sweep: {snapkv.window: [8, 16], snapkv.budget.tokens: [1, 2], quest.dense_layers: [0, 1], "
                            "niah.context: [10, 20]}\n");
  CHECK(e.policies.size() == 4 + 2);
  CHECK(e.policies[1].budget.value == 1);
  CHECK(e.policies[1].scorer->params.get<int>("window") == 16);
  CHECK(e.tasks.size() == 2);
  refused(p + "sweep: {snapvk.window: [1]}\n", "exp.yaml:6:9: got 'snapvk'", {"did you mean 'snapkv'?"});
  refused(p + "sweep: {snapkv.windw: [1]}\n", "exp.yaml:6:9: got unknown key 'windw'");
  refused(p + "sweep: {snapkv.window: 1}\n", "exp.yaml:6:24: got '1'", {"wanted a list"});
  refused(p + "sweep: {snapkv.window: [0, 1]}\n", "exp.yaml:6:25: got 0");
  refused(p + "sweep: {snapkv: [1]}\n", "exp.yaml:6:9: got 'snapkv' as a whole");
  refused(p + "sweep: {batch: [1, 2]}\n", "exp.yaml:6:9: got 'batch'");
  refused(p + "sweep: {snapkv.budget.tokens.more: [1]}\n", "exp.yaml:6:9: got 'snapkv.budget.tokens.more'");
  refused(p + "sweep: {snapkv..window: [1]}\n", "exp.yaml:6:9: got the key");
}

TEST_CASE("ablate") {
  const std::string p = head + "policies: [full, quest: {budget: {tokens: 64}}]\n";
  CHECK(names(load(p + "ablate: {quest: all}\n")) ==
        std::vector<std::string>{"full", "quest", "quest -page_bounds", "quest -reuse"});
  const Experiment e = load(p + "ablate: {quest: [reuse]}\n");
  CHECK(names(e) == std::vector<std::string>{"full", "quest", "quest -reuse"});
  CHECK(e.policies[1].selector->params.get<bool>("reuse"));
  CHECK(!e.policies[2].selector->params.get<bool>("reuse"));
  CHECK(e.policies[2].selector->params.get<bool>("page_bounds"));
  CHECK(e.policies[2].budget.value == 64);
  refused(p + "ablate: {quest: [page_bound]}\n", "exp.yaml:4:18: got 'page_bound'",
          {"did you mean 'page_bounds'?", "reuse"});
  refused(p + "ablate: {quset: all}\n", "exp.yaml:4:10: got 'quset'", {"did you mean 'quest'?"});
  refused(p + "ablate: {full: all}\n",
          "exp.yaml:4:16: got an ablation of 'full' (exp.yaml:3:12), which declares no components");
  refused(p + "ablate: all\n", "exp.yaml:4:9: got 'all' for 'ablate'");
  const Experiment both = load(head + "policies: [quest: {pruner: twilight}]\nablate: {quest: [top_p]}\n");
  CHECK(names(both) == std::vector<std::string>{"quest", "quest -top_p"});
  CHECK(!both.policies[1].pruner->params.get<bool>("top_p"));
  refused(head + "policies: [quest: {reuse: false}]\nablate: {quest: [reuse]}\n", "exp.yaml:4:18: got 'reuse', but",
          {"'quest' (exp.yaml:3:12) has it switched off"});
}

TEST_CASE("a codec's components are ablated in both tiers") {
  test::FakeCatalog own;
  ParamSpec zero = make_param("zero_point", true, "");
  zero.component = true;
  own.add(Role::codec, "coded", {zero});
  const auto policies = [&](const std::string& keys) {
    const std::string text = head + "policies: [quest: {" + keys + "}]\nablate: {quest: [zero_point]}\n";
    return read_experiment(yaml::parse_text(text, "exp.yaml"), own).policies;
  };
  const auto on = [](const std::optional<PluginUse>& codec) { return codec->params.get<bool>("zero_point"); };
  const auto above = policies("codec: coded");
  REQUIRE(above.size() == 2);
  CHECK((on(above[0].codec) && !on(above[1].codec)));
  const auto below = policies("placement: {tier: host, codec: coded}");
  REQUIRE(below.size() == 2);
  CHECK((on(below[0].placement.codec) && !on(below[1].placement.codec)));
  const auto both = policies("codec: coded, placement: {tier: host, codec: coded}");
  REQUIRE(both.size() == 2);
  CHECK((!on(both[1].codec) && !on(both[1].placement.codec)));
}

TEST_CASE("a key or a name in the wrong place is told where it belongs") {
  refused(head + "policies: [snapkv: {tokens: 64}]\n", "exp.yaml:3:21: got unknown key 'tokens'",
          {"'tokens' stands inside budget: {tokens: N | ratio: R | bytes: B, split: NAME}"});
  refused(head + "policies: [snapkv: {every: 8}]\n", "exp.yaml:3:21: got unknown key 'every'",
          {"'every' stands inside schedule: {prefill: true, every: N}"});
  refused(head + "policies: [snapkv: {placement: host}]\n",
          "exp.yaml:3:32: got 'host' for 'placement', wanted a map: {tier: device | host, resident: N, codec: NAME}");
  refused(head + "policies: [{name: mine, budget: {tokens: 64}}]\n",
          "exp.yaml:3:19: got the name 'mine' without a plugin, wanted scorer, selector or policy beside it");
  refused(head + "policies: [snapkv]\nsweep: {budget.tokens: [64, 128]}\n", "exp.yaml:4:9: got 'budget'",
          {"a key of an entry stands behind its name: NAME.budget.tokens"});
  refused(head + "policies: [full]\nbackend: gpu\n", "exp.yaml:4:10: got 'gpu' for 'backend', wanted cuda");
  refused("model: m\ntasks: [niah]\npolicies: [full]\npolicy: full\n", "exp.yaml:4:1: got unknown key 'policy'",
          {"did you mean 'policies'?"});
}

TEST_CASE("ablate: what is there twice, or nothing, is refused with both places") {
  const std::string p = head + "policies: [full, quest: {budget: {tokens: 64}}]\n";
  refused(p + "ablate: {quest: [reuse, page_bounds, reuse]}\n", "exp.yaml:4:38: got 'reuse' twice in a list",
          {"first at exp.yaml:4:18"});
  refused(p + "ablate: {quest: all, quest: [reuse]}\n", "exp.yaml:4:22: got key 'quest' twice", {"line 4"});
  refused(p + "ablate: [quest, quest]\n", "exp.yaml:4:9: got a list for 'ablate', wanted {NAME: [...]}");
  refused(p + "ablate: {quest: []}\n", "exp.yaml:4:17: got an empty list, wanted all or components of 'quest'");
  refused(p + "ablate: {quest: [all]}\n", "exp.yaml:4:18: got 'all' inside a list, wanted all or components");
  const std::string twice = head + "policies:\n- full\n- quest\n- quest\nablate: {quest: all}\n";
  CHECK(names(load(twice)).size() == 7);
  CHECK_THROWS_WITH(plain_cells(load(twice)),
                    "exp.yaml:6:3: got the same cell twice, wanted it once: policy 'quest' (first at exp.yaml:5:3)");
  // Policies of one name that differ are told apart, each with its ablation.
  const auto two = load(head + "policies: [quest: {budget: {tokens: [64, 128]}}]\nablate: {quest: [reuse]}\n");
  CHECK(names(two) == std::vector<std::string>{"quest", "quest -reuse", "quest", "quest -reuse"});
  CHECK(two.policies[1].ablated == "reuse");
  CHECK(two.policies[0].ablated.empty());
  CHECK(plain_cells(two).size() == 4);
}

TEST_CASE("a cell that is there twice is refused with the entries that make it so") {
  const auto message = [](const std::string& text) {
    try {
      plain_cells(load(text));
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const std::string what = "got the same cell twice, wanted it once: ";
  CHECK(message("model: m\ntasks: [niah, text, niah]\npolicies: [full]\n") ==
        "exp.yaml:2:21: " + what + "task 'niah' (first at exp.yaml:2:9)");
  CHECK(message("model: [{path: m}, {path: m}]\ntasks: [niah]\npolicies: [full]\n") ==
        "exp.yaml:1:20: " + what + "model 'm' (first at exp.yaml:1:9)");
  CHECK(message(head + "policies: [snapkv: {window: [16, 016]}]\n") ==
        "exp.yaml:3:12: " + what + "policy 'snapkv', whose lists have a value twice");
  refused(head + "policies: [snapkv: {window: [16, 8, 16]}]\n", "exp.yaml:3:37: got '16' twice in a list",
          {"first at exp.yaml:3:30"});
  refused(head + "policies: [full]\nseed: [1, 2, 1]\n", "exp.yaml:4:14: got '1' twice in a list");
  refused("model: [m, m]\ntasks: [niah]\npolicies: [full]\n", "exp.yaml:1:12: got 'm' twice in a list");
}

TEST_CASE("--set") {
  const std::string p =
      "model: {path: a, dtype: bf16}\ntasks: [niah: {context: 5}]\npolicies: [snapkv, knorm: {budget: {tokens: 8}}]\n";
  const Experiment e =
      load(p, {"snapkv.window=16", "knorm.budget.tokens=[1,2]", "backend=cpu", "model.dtype=f32", "niah.context=7",
               "output=x.h5", "policies.snapkv.kernel=3", "fidelity.tokens=4", "snapkv.window=17",
               "sweep.niah.depth=[1,2]", "snapkv.budget.tokens=5", "snapkv.budget.split.pyramid.beta=2"});
  CHECK(e.policies[0].scorer->params.get<int>("window") == 17);
  CHECK(e.policies[0].scorer->params.get<int>("kernel") == 3);
  CHECK(e.policies[0].split->params.get<double>("beta") == 2);
  CHECK(e.policies.size() == 3);
  CHECK(e.backend == "cpu");
  CHECK(e.models[0].dtype == DType::f32);
  const std::string plain = "model: a\ntasks: [niah]\npolicies: [full]\n";  // a path alone is {path: ...}
  CHECK(load(plain, {"model.dtype=f32"}).models[0].dtype == DType::f32);
  CHECK(load(plain, {"model.dtype=f32"}).models[0].path == "a");
  CHECK(e.output == "x.h5");
  CHECK(e.fidelity_tokens == 4);
  CHECK(e.tasks.size() == 2);
  CHECK(e.tasks[0].task.params.get<int>("context") == 7);
  CHECK(e.text ==
        p + "# --set snapkv.window=16\n# --set knorm.budget.tokens=[1,2]\n# --set backend=cpu\n"
            "# --set model.dtype=f32\n# --set niah.context=7\n# --set output=x.h5\n# --set policies.snapkv.kernel=3\n"
            "# --set fidelity.tokens=4\n# --set snapkv.window=17\n# --set sweep.niah.depth=[1,2]\n"
            "# --set snapkv.budget.tokens=5\n# --set snapkv.budget.split.pyramid.beta=2\n");
  const auto one = [&](const std::string& set) {
    const auto all = errors(p, {set});
    return all.empty() ? "" : all.front();
  };
  CHECK(load("model: m\ntasks: [niah]\npolicies: [quest]\n", {"inject.overlap=0.8"}).inject.overlap == 0.8);
  CHECK_THAT(one("inject.overlap=2"), Catch::StartsWith("--set inject.overlap=2: got 2"));
  CHECK_THAT(one("snapkv.window=0"), Catch::StartsWith("--set snapkv.window=0: got 0"));
  CHECK_THAT(one("snapkv.windw=1"), Catch::StartsWith("--set snapkv.windw=1: got unknown key 'windw'"));
  CHECK_THAT(one("snapvk.window=1"), Catch::Contains("did you mean 'snapkv'?"));
  CHECK_THAT(one("backnd=cpu"), Catch::Contains("did you mean 'backend'?"));
  CHECK_THAT(one("backend"), Catch::StartsWith("--set backend: got no key=value"));
  CHECK_THAT(one("=3"), Catch::Contains("got no key=value"));
  CHECK_THAT(one("batch="), Catch::StartsWith("--set batch=: got nothing"));
  CHECK_THAT(one("batch=[1"), Catch::StartsWith("--set batch=[1: got text that is no YAML"));
  CHECK_THAT(one("batch=\xff"), Catch::Contains("wanted UTF-8"));
}

TEST_CASE("--set and sweep change every entry of a name") {
  const std::string p = head +
                        "policies:\n- snapkv: {budget: {tokens: 64}}\n- knorm: {budget: {tokens: 8}}\n"
                        "- snapkv: {budget: {tokens: 128}}\n";
  const auto windows = [](const Experiment& e) {
    std::vector<std::pair<double, int>> all;
    for (const PolicySpec& policy : e.policies)
      if (policy.name == "snapkv") all.emplace_back(policy.budget.value, policy.scorer->params.get<int>("window"));
    return all;
  };
  using Windows = std::vector<std::pair<double, int>>;
  CHECK(windows(load(p, {"snapkv.window=16"})) == Windows{{64, 16}, {128, 16}});
  CHECK(windows(load(p + "sweep: {snapkv.window: [8, 16]}\n")) == Windows{{64, 8}, {64, 16}, {128, 8}, {128, 16}});
}

TEST_CASE("anchors, aliases and merge keys") {
  const Experiment e = load(head + R"(policies:
  - snapkv: &base {budget: {tokens: 64}, window: 8}
  - knorm: {budget: {tokens: 32}}
  - {name: again, scorer: snapkv, <<: *base, kernel: 3}
)");
  CHECK(e.policies[2].budget.value == 64);
  CHECK(e.policies[2].scorer->params.get<int>("window") == 8);
  CHECK(e.policies[2].scorer->params.get<int>("kernel") == 3);
}

TEST_CASE("a cell's id follows what its result depends on") {
  const std::string text =
      "model: m\ntasks: [niah: {context: 64, depth: 2}]\npolicies: [snapkv: {window: 8, kernel: 5}]\n";
  const auto id = [](const std::string& t, const Fingerprints& f = {}) { return cells(load(t), catalog, f).at(0).id; };
  const std::string base = id(text);
  CHECK(base.size() == 16);
  CHECK(base.find_first_not_of("0123456789abcdef") == std::string::npos);
  CHECK(id("# a comment\npolicies:\n - snapkv: {kernel: 5, window: 8}\ntasks:\n - niah: {depth: 2, context: "
           "64}\nmodel: {path: m}\n") == base);
  CHECK(id(text + "experiment: other\noutput: elsewhere.h5\n") == base);
  CHECK(id(text + "seed: 0\n") == base);
  for (const char* change :
       {"seed: 1\n", "batch: 2\n", "page_size: 8\n", "prefill_chunk: 64\n", "metrics: [score]\n", "threads: 1\n"})
    CHECK(id(text + change) != base);
  CHECK(id("model: m2\ntasks: [niah: {context: 64, depth: 2}]\npolicies: [snapkv: {window: 8, kernel: 5}]\n") != base);
  CHECK(id("model: m\ntasks: [niah: {context: 65, depth: 2}]\npolicies: [snapkv: {window: 8, kernel: 5}]\n") != base);
  CHECK(id("model: m\ntasks: [niah: {context: 64, depth: 2, question: decode}]\npolicies: [snapkv: {window: 8, kernel: "
           "5}]\n") != base);
  CHECK(id("model: m\ntasks: [niah: {context: 64, depth: 2}]\npolicies: [snapkv: {window: 9, kernel: 5}]\n") != base);

  const std::string scored = "model: m\npolicies: [full]\ntasks: [niah: {metric: ";
  const std::string by_f1 = id(scored + "f1}]\n");
  CHECK(by_f1 != id("model: m\npolicies: [full]\ntasks: [niah]\n"));
  CHECK(by_f1 != id(scored + "similar}]\n"));
  CHECK(id(scored + "similar}]\n") != id(scored + "{similar: {ratio: 0.25}}}]\n"));

  const std::string drawn = "model: m\ntasks: [niah]\npolicies: [full]\nsampling: {temperature: ";
  const std::string greedy = id("model: m\ntasks: [niah]\npolicies: [full]\n");
  CHECK(id(drawn + "0, top_p: 0.5, seed: 3}\n") == greedy);
  const std::string warm = id(drawn + "0.6, draws: 8}\n");
  CHECK(warm != greedy);
  CHECK(warm == id(drawn + "0.6, draws: 8, top_p: 1, seed: 0}\n"));
  for (const char* other : {"0.7, draws: 8}", "0.6, draws: 9}", "0.6, draws: 8, top_p: 0.9}",
                            "0.6, draws: 8, top_k: 9}", "0.6, draws: 8, seed: 1}"})
    CHECK(id(drawn + std::string(other) + "\n") != warm);

  // Injected lists count only where pages are chosen, corrections only for policies.
  CHECK(id("inject: {overlap: 1}\nmodel: m\ntasks: [niah: {context: 64, depth: 2}]\n"
           "policies: [snapkv: {window: 8, kernel: 5}, quest]\n") == base);
  const std::string selects = "model: m\ntasks: [niah]\npolicies: [quest]\n";
  const std::string some = id(selects + "inject: {overlap: 0.5}\n");
  CHECK(some != id(selects));
  CHECK(some != id(selects + "inject: {overlap: 0.6}\n"));
  CHECK(some != id(selects + "inject: {trace: r.h5}\n"));
  CHECK(id(selects + "inject: {trace: r.h5}\n") != id(selects + "inject: {trace: r.h5, cell: a}\n"));
  CHECK(
      cells(load(selects + "inject: {overlap: 0.5}\n"), catalog, {}).at(0).params.find(R"("inject":{"overlap":0.5})") !=
      std::string::npos);
  CHECK(some == id(selects + "inject: {overlap: 0.5, correction: 0.1}\n"));
  const std::string corrects = "model: m\ntasks: [niah]\npolicies: [streaming_llm]\n";
  const std::string corrected = id(corrects + "inject: {overlap: 0.5, correction: 0.1}\n");
  CHECK(corrected != id(corrects));
  CHECK(corrected != id(corrects + "inject: {overlap: 0.5}\n"));
  CHECK(corrected != id(corrects + "inject: {correction: 0.1}\n"));
  CHECK(corrected != id(corrects + "inject: {overlap: 0.5, correction: 0.2}\n"));
  const std::string reranked = id(corrects + "inject: {overlap: 0.5, rerank_overlap: 0.1}\n");
  CHECK(reranked != id(corrects + "inject: {overlap: 0.5}\n"));
  CHECK(reranked != id(corrects + "inject: {overlap: 0.5, rerank_overlap: 0.2}\n"));
  CHECK(some == id(selects + "inject: {overlap: 0.5, rerank_overlap: 0.1}\n"));
  const std::string drifts = id(corrects + "inject: {drift: 0.1}\n");
  CHECK(drifts != id(corrects));
  CHECK(drifts != id(corrects + "inject: {drift: 0.2}\n"));
  CHECK(drifts != id(corrects + "inject: {correction: 0.1}\n"));
  CHECK(some == id(selects + "inject: {overlap: 0.5, drift: 0.1}\n"));

  Fingerprints one, two;
  one.model = [](const ModelSpec&) { return "1"; };
  two.model = [](const ModelSpec&) { return "2"; };
  CHECK(id(text, one) != id(text, two));
  one = two = {};
  one.plugin = [](const PluginInfo& p) { return p.name + "1"; };
  two.plugin = [](const PluginInfo& p) { return p.name == "snapkv" ? "snapkv2" : p.name + "1"; };
  CHECK(id(text, one) != id(text, two));
  two.plugin = [](const PluginInfo& p) { return p.name == "f1" ? "f2" : p.name + "1"; };
  CHECK(id(text, one) == id(text, two));
  CHECK(id(scored + "f1}]\n", one) != id(scored + "f1}]\n", two));
}

TEST_CASE("every key of a policy is a part of its cell's id and of its parameters") {
  // Each line differs from the first in one thing that the results depend on.
  const char* const policies[] = {
      "{name: p, scorer: snapkv, budget: {tokens: 64}}",
      "{name: q, scorer: snapkv, budget: {tokens: 64}}",
      "{name: p, scorer: knorm, budget: {tokens: 64}}",
      "{name: p, scorer: {snapkv: {window: 9}}, budget: {tokens: 64}}",
      "{name: p, selector: quest, budget: {tokens: 64}}",
      "{name: p, scorer: snapkv, selector: quest, budget: {tokens: 64}}",
      "{name: p, policy: streaming_llm, budget: {tokens: 64}}",
      "{name: p, selector: quest, pruner: twilight, budget: {tokens: 64}}",
      "{name: p, selector: quest, pruner: {twilight: {p: 0.5}}, budget: {tokens: 64}}",
      "{name: p, policy: streaming_llm, pruner: twilight, budget: {tokens: 64}}",
      "{name: p, scorer: snapkv, rescorer: criticalkv, budget: {tokens: 64}}",
      "{name: p, scorer: snapkv, rescorer: {criticalkv: {first_stage: 0.2}}, budget: {tokens: 64}}",
      "{name: p, scorer: snapkv, budget: {tokens: 65}}",
      "{name: p, scorer: snapkv, budget: {bytes: 64}}",
      "{name: p, scorer: snapkv, budget: {ratio: 0.5}}",
      "{name: p, scorer: snapkv, budget: {tokens: 64, split: uniform}}",
      "{name: p, scorer: snapkv, budget: {tokens: 64, split: pyramid}}",
      "{name: p, scorer: snapkv, budget: {tokens: 64, split: {pyramid: {beta: 3}}}}",
      "{name: p, scorer: snapkv, budget: {tokens: 64}, schedule: {prefill: false, every: 8}}",
      "{name: p, scorer: snapkv, budget: {tokens: 64}, schedule: {every: 8}}",
      "{name: p, scorer: snapkv, budget: {tokens: 64}, schedule: {every: 9}}",
      "{name: p, scorer: snapkv, budget: {tokens: 64}, codec: int8}",
      "{name: p, scorer: snapkv, budget: {tokens: 64}, codec: {int8: {axis: channel}}}",
      "{name: p, scorer: snapkv, budget: {tokens: 64}, placement: {tier: host}}",
      "{name: p, scorer: snapkv, budget: {tokens: 64}, placement: {tier: host, resident: 9}}",
      "{name: p, scorer: snapkv, budget: {tokens: 64}, placement: {tier: host, codec: int8}}",
      "{name: p, scorer: snapkv, budget: {tokens: 64}, placement: {tier: host, codec: {int8: {axis: channel}}}}",
      "{name: p, scorer: snapkv, budget: {tokens: 64}, page_size: 8}",
      "{name: p, scorer: snapkv, budget: {tokens: 64}, profile: a.h5}",
      "{name: p, scorer: snapkv, budget: {tokens: 64}, profile: b.h5}"};
  std::map<std::string, std::string> ids, params;
  for (const std::string policy : policies) {
    CAPTURE(policy);
    const Cell cell = cells(load(head + "policies:\n  - " + policy + "\n"), catalog, {}).at(0);
    CHECK(ids.emplace(cell.id, policy).first->second == policy);
    const std::string label = policy.substr(0, policy.find(','));  // stands beside the parameters, not in them
    CHECK(params.emplace(label + cell.params, policy).first->second == policy);
  }
}

TEST_CASE("every plugin that a cell uses counts with its library") {
  const std::string text = head +
                           "policies:\n  - {name: p, scorer: snapkv, selector: quest, budget: {tokens: 64, split: "
                           "pyramid}, codec: int8, placement: {tier: host, codec: int4}}\n"
                           "  - {name: r, policy: streaming_llm, pruner: twilight, budget: {tokens: 64}}\n"
                           "  - {name: s, scorer: knorm, rescorer: criticalkv, budget: {tokens: 64}}\n";
  test::FakeCatalog plugins;
  plugins.add(Role::codec, "int4", {});
  const auto ids = [&](const std::string& rebuilt) {
    Fingerprints f;
    f.plugin = [&](const PluginInfo& p) { return p.name == rebuilt ? "new" : "old"; };
    std::vector<std::string> out;
    for (const Cell& c : cells(read_experiment(yaml::parse_text(text, "exp.yaml"), plugins), plugins, f))
      out.push_back(c.id);
    return out;
  };
  const auto before = ids("");
  REQUIRE(before.size() == 3);
  CHECK(ids("f1") == before);  // no cell uses it
  for (const char* used : {"snapkv", "quest", "pyramid", "int8", "int4"}) {
    CAPTURE(used);
    CHECK(ids(used)[0] != before[0]);
    CHECK(ids(used)[1] == before[1]);
  }
  for (const char* used : {"streaming_llm", "twilight"}) CHECK(ids(used)[1] != before[1]);
  for (const char* used : {"knorm", "criticalkv"}) CHECK(ids(used)[2] != before[2]);
  CHECK((ids("niah")[0] != before[0] && ids("niah")[1] != before[1]));
}

TEST_CASE("a data file counts with its contents") {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("kvlab_experiment_" + std::to_string(std::random_device{}()));
  fs::create_directories(folder);
  std::ofstream(folder / "exp.yaml") << "model: m\ntasks: [text: {path: data.txt}]\npolicies: [full]\n";
  const auto id = [&] {
    return cells(load_experiment((folder / "exp.yaml").string(), {}, catalog), catalog, content_fingerprints())
        .at(0)
        .id;
  };
  const std::string absent = id();
  std::ofstream(folder / "data.txt") << "one";
  const std::string first = id();
  std::ofstream(folder / "data.txt") << "two";
  const std::string second = id();
  CHECK(absent != first);
  CHECK(first != second);
  std::ofstream(folder / "data.txt") << "one";
  CHECK(id() == first);
  std::ofstream(folder / "exp.yaml", std::ios::app) << "plugin_path: [here, /]\n";
  CHECK_THROWS_WITH(plugin_path_of((folder / "exp.yaml").string(), {}),
                    Catch::Contains("exp.yaml:4:15") && Catch::Contains("got no file or folder"));
  fs::create_directory(folder / "here");
  CHECK(plugin_path_of((folder / "exp.yaml").string(), {}) ==
        std::vector<std::string>{(folder / "here").string(), "/"});
  fs::remove_all(folder);
}

TEST_CASE("a policy's profile counts with its contents, and is an axis as other keys are") {
  namespace fs = std::filesystem;
  const std::string text = head + "policies: [snapkv: {profile: p.h5}, knorm]\n";
  std::string content = "one";
  Fingerprints f;
  f.file = [&](const fs::path& path) { return path.filename() == "p.h5" ? content : "other"; };
  const fs::path folder = fs::temp_directory_path() / ("kvlab_profile_" + std::to_string(std::random_device{}()));
  fs::create_directories(folder);
  std::ofstream(folder / "p.h5") << "any";
  std::ofstream(folder / "exp.yaml") << text;
  const auto ids = [&] {
    std::vector<std::string> out;
    for (const Cell& c : cells(load_experiment((folder / "exp.yaml").string(), {}, catalog), catalog, f))
      out.push_back(c.id);
    return out;
  };
  const auto before = ids();
  content = "two";
  CHECK(ids()[0] != before[0]);
  CHECK(ids()[1] == before[1]);
  fs::remove_all(folder);

  const Experiment swept = load(head + "policies: [snapkv: {profile: p.h5}]\nsweep: {snapkv.profile: [a.h5, b.h5]}\n");
  REQUIRE(swept.policies.size() == 2);
  CHECK(swept.policies[1].profile == "b.h5");
  CHECK(load(text, {"snapkv.profile=c.h5"}).policies[0].profile == "c.h5");
  refused(head + "policies:\n  - snapkv: {profile: ''}\n", "exp.yaml:4:23: ", {"empty text for 'profile'"});
  refused(head + "policies:\n  - snapkv: {profile: {a: b}}\n", "exp.yaml:4:23: ", {"'profile'"});
}

TEST_CASE("order and table of cells") {
  const Experiment e = load(head + "policies: [full, snapkv: {budget: {tokens: 64}}]\nseed: [1, 2]\n");
  const auto all = plain_cells(e);
  REQUIRE(all.size() == 4);
  CHECK(all[0].policy == 0);
  CHECK(all[0].seed == 1);
  CHECK(all[1].policy == 0);
  CHECK(all[1].seed == 2);
  CHECK(all[2].policy == 1);
  CHECK(nlohmann::json::parse(all[2].params)["budget"]["tokens"] == 64);
  const std::string table = cell_table(e, all);
  CHECK(table.substr(0, 8) == "4 cells\n");
  CHECK_THAT(table, Catch::Contains("snapkv"));
  CHECK_THROWS_AS(plain_cells(load(head + "policies: [full, full]\n")), Error);
  std::string seeds = "seed: [0";
  for (int i = 1; i <= 100; ++i) seeds += ", " + std::to_string(i);
  CHECK_THROWS_WITH(plain_cells(load(head + "policies: [full]\nrepeats: 1000\n" + seeds + "]\n")),
                    Catch::Contains("got 101000 cells, wanted at most 100000"));
  CHECK_THROWS_AS(plain_cells(load(head + "policies: [full]\nseed: [1, 1]\n")), Error);
}

TEST_CASE("cut and flipped files never crash") {
  const std::string text =
      "experiment: q\nmodel: {path: a, dtype: bf16}\ntasks:\n  - niah: {context: [2048, 8192], depth: 5}\npolicies:\n"
      "  - full\n  - &a snapkv: {budget: {tokens: 512, split: {pyramid: {beta: 2}}}, window: 32}\n  - {name: b, "
      "scorer: \"snapkv\", "
      "<<: {codec: int8}}\nsweep: {snapkv.window: [1, 2]}\nablate: {quest: all}\nseed: [1, 2]\n";
  std::mt19937 random(7);
  const auto survives = [](const std::string& t) {
    try {
      plain_cells(load(t));
    } catch (const Error&) {
    }
  };
  for (std::size_t n = 0; n <= text.size(); ++n) survives(text.substr(0, n));
  for (int i = 0; i < 4000; ++i) {
    std::string t = text;
    for (unsigned k = 0; k <= random() % 3; ++k) {
      const std::size_t at = random() % t.size();
      switch (random() % 3) {
        case 0: t[at] = static_cast<char>(random()); break;
        case 1: t[at] = "{}[]:,&*-|>'\"\n #!%@"[random() % 19]; break;
        default: t.erase(at, 1 + random() % 4);
      }
    }
    survives(t);
  }
  SUCCEED();
}

TEST_CASE("equal_bytes is the budget of each policy that takes one, and part of a cell's id") {
  const std::string text = R"(model: models/tiny
tasks: [niah]
policies:
  - full
  - {name: codes, policy: full, codec: int8}
  - snapkv
  - {name: split, scorer: knorm, budget: {split: pyramid}}
  - quest
)";
  const Experiment e = load(text + "equal_bytes: 2MiB\n");
  REQUIRE(names(e) == std::vector<std::string>{"full", "codes", "snapkv", "split", "quest"});
  CHECK(e.equal_bytes == 2 << 20);
  for (std::size_t i = 0; i < e.policies.size(); ++i) {
    CAPTURE(e.policies[i].name);
    CHECK(budget_text(e.policies[i]) == (i < 2 ? "-" : "2 MiB"));
  }
  CHECK(e.policies[3].split->name == "pyramid");
  const Experiment own = load(R"(model: models/tiny
tasks: [niah]
policies: [snapkv: {budget: {bytes: 2MiB}}]
)");
  const auto id_of = [](const Experiment& of, std::size_t policy) {
    for (const Cell& cell : plain_cells(of))
      if (cell.policy == policy) return cell.id;
    return std::string();
  };
  CHECK(id_of(e, 2) != id_of(own, 0));
}
