#include "run/summary.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "base/content_hash.hpp"
#include "experiment/variants.hpp"
#include "result/interval.hpp"
#include "run/averages.hpp"
#include "run/device.hpp"

namespace kvlab {
namespace {

// A workload asks the items in turn, so several samples may belong to one item.
std::vector<Scored> scored_questions(const CellInput& in, const Forced& forced, const results::CellResult& out) {
  const std::vector<Item>& items = in.items->items;
  std::vector<Scored> scored;
  for (std::size_t i = 0; i < out.samples.size(); ++i) {
    const Item& item = items[i % items.size()];
    if (forced.nll.empty())
      scored.push_back({item.sample, out.samples[i].score});
    else
      scored.push_back({item.sample, forced.nll[i], static_cast<double>(item.forced.size())});
  }
  return scored;
}

// Whether any draw to a question is right, as a score: pass@k of k draws.
std::vector<Scored> passed_questions(const CellInput& in, const results::CellResult& out) {
  const std::vector<Item>& items = in.items->items;
  std::map<std::pair<int, int>, double> passed;  // by sample and question
  for (std::size_t i = 0; i < out.samples.size(); ++i) {
    const Item& item = items[i % items.size()];
    if (item.draw < 0 || std::isnan(out.samples[i].score)) continue;
    double& any = passed[{item.sample, item.question}];
    any = std::max(any, out.samples[i].score == 1 ? 1. : 0.);
  }
  std::vector<Scored> scored;
  for (const auto& [question, any] : passed) scored.push_back({question.first, any});
  return scored;
}

double perplexity(const std::vector<Scored>& texts) {
  double nll = 0, tokens = 0;
  for (const Scored& text : texts) {
    nll += text.value;
    tokens += text.weight;
  }
  return std::exp(nll / tokens);
}

// The plugins, and the profile file that the policy reads.
std::vector<results::PluginRow> plugins_of(const CellInput& in) {
  const Experiment& e = *in.experiment;
  const PolicySpec& policy = in.policy();
  const PluginCatalog& catalog = *in.catalog;
  std::vector<results::PluginRow> rows;
  add_plugin(rows, e.tasks[in.cell->task].task, catalog);
  if (in.items->use) add_plugin(rows, *in.items->use, catalog);
  for_each_use(policy, [&](const PluginUse& use) { add_plugin(rows, use, catalog); });
  if (!policy.profile.empty())
    rows.push_back({"profile", policy.profile, "", content_hashes().sha256_of(e.resolve(policy.profile))});
  return rows;
}

}  // namespace

void add_plugin(std::vector<results::PluginRow>& rows, const PluginUse& use, const PluginCatalog& catalog) {
  const PluginInfo* p = catalog.find(use.role, use.name);
  if (!p) return;
  const results::PluginRow row{name_of(p->role), p->name, p->version, p->sha256};
  if (std::find(rows.begin(), rows.end(), row) == rows.end()) rows.push_back(row);
}

void describe_cell(const CellInput& in, results::CellResult& out) {
  const Experiment& e = *in.experiment;
  const PolicySpec& policy = in.policy();
  auto& s = out.summary;
  out.id = s.cell = in.cell->id;
  out.plugins = plugins_of(in);
  s.model = in.model->name;
  if (in.model->synthetic) add_label(s, "synthetic");
  if (e.inject.used(policy)) add_label(s, "injected");
  if (in.oracle) add_label(s, "oracle");
  if (in.functional) add_label(s, "functional");
  if (device_of(e) == Device::cuda && in.wants(Metric::parts)) add_label(s, "events");
  s.policy = policy.name;
  s.params = in.cell->params;
  s.ablated = policy.ablated;
  s.task = task_label(e.tasks[in.cell->task]);
  if (in.workload()) s.workload = in.workload()->text();
  if (const SamplingSpec& sampling = e.sampling;
      sampling.on() &&
      std::any_of(in.items->items.begin(), in.items->items.end(), [](const Item& item) { return item.draw >= 0; })) {
    add_label(s, "sampled");
    s.sampling = sampling.text();
    s.draws = sampling.draws;
  }
  s.seed = in.cell->seed;
  s.repeat = in.cell->repeat;
  for (const Item& item : in.items->items)
    s.context_tokens = std::max<std::int64_t>(s.context_tokens, item.most_tokens());
  const BudgetAmount budget = in.budget();
  if (budget.kind == BudgetAmount::tokens) s.budget_tokens = budget.value;
  if (budget.kind == BudgetAmount::ratio) s.budget_tokens = budget.value * static_cast<double>(s.context_tokens);
  if (policy.budget.kind == BudgetAmount::bytes) s.budget_bytes = static_cast<std::int64_t>(policy.budget.value);
}

results::SampleRow sample_row(const Item& item, std::int64_t number) {
  results::SampleRow s;
  s.sample = number;
  s.task_sample = item.sample;
  s.question = item.question;
  s.draw = item.draw;
  s.follows = item.follows;
  s.prompt_sha256 = item.sha256;
  s.id = item.id();
  return s;
}

void summarize(const CellInput& in, const Forced& forced, results::CellResult& out) {
  auto& s = out.summary;
  std::vector<double> scores, ttft;
  std::int64_t tokens = 0;
  for (const auto& sample : out.samples) {
    scores.push_back(sample.score);
    tokens += sample.output_tokens;
    if (std::isfinite(sample.ttft_ms)) ttft.push_back(sample.ttft_ms);
  }
  s.samples = static_cast<std::int64_t>(out.samples.size());
  s.output_tokens = tokens;
  if (in.wants(Metric::score)) {
    const std::vector<Scored> scored = scored_questions(in, forced, out);
    s.score = forced.nll.empty() ? mean(scores) : perplexity(scored);
    const Interval interval = forced.nll.empty() ? score_interval(scored) : perplexity_interval(scored);
    s.score_lo = interval.low;
    s.score_hi = interval.high;
    if (const auto passed = passed_questions(in, out); !passed.empty()) {
      s.pass = 0;
      for (const Scored& question : passed) s.pass += question.value / static_cast<double>(passed.size());
      const Interval of_pass = score_interval(passed);
      s.pass_lo = of_pass.low;
      s.pass_hi = of_pass.high;
    }
  }
  const auto mean_of = [](const std::vector<float>& v) { return mean(std::vector<double>(v.begin(), v.end())); };
  s.kl = mean_of(out.fidelity.kl);
  s.top1 = mean_of(out.fidelity.top1);
  s.mass = mean_of(out.fidelity.mass);
  s.page_recall = mean_of(out.fidelity.page_recall);
  if (!in.wants(Metric::latency)) return;
  s.ttft_ms = percentile(ttft, 0.5);
  std::vector<double> tpot;  // answer tokens after each sample's first
  for (std::size_t i = 0; i + 1 < out.token_offsets.size(); ++i)
    for (std::int64_t t = out.token_offsets[i] + 1; t < out.token_offsets[i + 1]; ++t)
      tpot.push_back(out.token_ms[static_cast<std::size_t>(t)]);
  s.tpot_ms_mean = mean(tpot);
  s.tpot_ms_p50 = percentile(tpot, 0.50);
  s.tpot_ms_p95 = percentile(tpot, 0.95);
  s.tpot_ms_p99 = percentile(tpot, 0.99);
}

}  // namespace kvlab
