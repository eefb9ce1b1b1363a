// A cell result with every field set, for the tests of result files.
#pragma once
#include <limits>
#include <string>

#include "result/results.hpp"
#include "support/temporary_folder.hpp"

namespace kvlab::results {

inline RunInfo sample_info() {
  RunInfo info;
  info.kvlab_version = "0.1.0";
  info.git_commit = "8c3065a";
  info.created_utc = "2025-01-02T03:04:05Z";
  info.command = "kvlab run \"été.yaml\"";
  info.experiment_yaml = "experiment: été\n# 日本語\n" + std::string(100000, 'x');  // an attribute takes at most 64 KiB
  info.host = "host";
  info.cpu = "cpu";
  info.backend = "cpu";
  info.threads = 2;
  info.experiment_file = "/somewhere/été.yaml";
  info.models = R"([{"name": "récall"}])";
  return info;
}

// Numbers depend on n, so no two cells are alike.
inline CellResult sample_cell(const std::string& id, int n = 0) {
  CellResult c;
  c.id = id;
  SummaryRow& s = c.summary;
  s.cell = id;
  s.model = "bundled/récall";
  s.policy = "snapkv";
  s.params = R"({"window": 32, "text": "日本"})";
  s.task = "niah";
  s.context_tokens = 2048 + n;
  s.budget_tokens = 511.5;
  s.budget_bytes = std::int64_t{1} << 40;
  s.seed = 7;
  s.repeat = n;
  s.error = "";
  s.labels = "functional,synthetic";
  s.samples = 2;
  s.score = 0.1;
  s.score_lo = 0.05;
  s.score_hi = 0.25;
  s.kl = 1e-300;
  s.top1 = 1;
  s.device_bytes_peak = 123456789012345;
  s.host_bytes_peak = 0;
  s.device_bytes_decode = 1234.5;
  s.compression = 4;
  s.fired = 3;
  s.output_tokens = 5;
  s.ttft_ms = 12.25;
  s.tpot_ms_p50 = 1.5;
  s.tpot_ms_p95 = 2.5;
  s.tpot_ms_p99 = 3.5;
  s.tpot_ms_mean = 1.75;
  s.tokens_per_s = 640;
  s.workload = "2 requests, poisson 2/s";
  s.ttft_ms_p95 = 20.5;
  s.queue_ms_p50 = 0.5;
  s.preemptions = 4;
  s.overhead = 0.125;
  s.ablated = "window";
  s.by_age = 1;
  s.warnings = "été\na second one";
  s.nonfinite = 7;
  c.samples.resize(2);
  c.samples[0].sample = 0;
  c.samples[0].task_sample = c.samples[0].question = c.samples[0].follows = 0;
  c.samples[0].prompt_sha256 = std::string(64, 'a');
  c.samples[0].id = "r-7";
  c.samples[0].prompt_tokens = 2000;
  c.samples[0].output = "naïve 🙂 \"quoted\",\n\ttab";
  c.samples[0].output_tokens = 3;
  c.samples[0].stop = "eos";
  c.samples[0].score = 1;
  c.samples[0].kl = 0.5;
  c.samples[0].top1 = 0.75;
  c.samples[0].first_divergence = 2;
  c.samples[0].ttft_ms = 9;
  c.samples[1].sample = 1;
  c.samples[1].task_sample = 0;
  c.samples[1].question = c.samples[1].follows = 1;
  c.samples[1].output_tokens = 2;
  c.samples[1].arrival_ms = 1;
  c.samples[1].queue_ms = 2;
  c.samples[1].end_ms = 44.5;
  c.samples[1].preemptions = 3;
  c.token_ms = {1, 2, 3, 4, 5};
  c.token_offsets = {0, 3, 5};
  c.step_ms = {6, 7, 8};
  c.step_device_ms = {std::numeric_limits<float>::quiet_NaN(), 6, 7};
  c.parts = {"score", "attend"};
  c.step_parts = {1, 2, 3, 4, 5, 6};
  c.plugins = {{"task", "niah", "0.1.0", std::string(64, 'a')}, {"policy", "mine", "2.\xc3\xa9", ""}};
  c.ledger = {{0, "device", "keys", 4096, 100}, {1, "host", "codec metadata", 0, -1, 24, "k8v4"}};
  c.fidelity.kl = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f};
  c.fidelity.top1 = {1, 0, 1, 1, std::numeric_limits<float>::quiet_NaN()};
  c.fidelity.offsets = {0, 1, 5};
  c.fidelity.layers = 2;
  c.fidelity.mass = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  c.fidelity.page_recall = c.fidelity.mass;
  c.fidelity.output_error = {0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  Trace& t = c.trace;
  t.tokens = {3, 1, 4, 1, 5, 9, 2};
  t.token_offsets = {0, 2, 2, 4, 4, 5, 6, 7};
  t.pages = 12;
  t.samples = 2;
  t.layers = 1;
  t.kv_heads = 2;
  t.kept = {0, 1, 5, 0, 3, 4};
  t.kept_offsets = {0, 3, 3, 3, 3, 5, 5, 6};
  t.selected = {9, 8, 7};
  t.events = {{0, 0, 0, 1, TraceKind::select, 0, 2}, {1, 1, 0, 0, TraceKind::trigger, 2, 1}};
  return c;
}

using test::TemporaryFolder;

}  // namespace kvlab::results
