#include "result/attempts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "result/report_blocks.hpp"
#include "result/report_layout.hpp"
#include "result/varying.hpp"

namespace kvlab::results {
namespace {

using Scores = std::map<std::string, std::vector<double>>;  // of a question's answers, by its prompt

struct Policy {
  std::string name, params, budget;
  Scores scores;
};
using Tables = std::map<std::pair<std::string, std::string>, std::vector<Policy>>;  // by model and task

Policy& policy_of(std::vector<Policy>& policies, const SummaryRow& row) {
  const auto same = [&](const Policy& p) { return p.name == row.policy && p.params == row.params; };
  const auto found = std::find_if(policies.begin(), policies.end(), same);
  return found == policies.end() ? policies.emplace_back(Policy{row.policy, row.params, number(row.budget_tokens), {}})
                                 : *found;
}

Tables tables_of(const std::string& path) {
  const auto samples = read_samples(path);
  Tables tables;
  for (const SummaryRow& row : read_summary(path).rows) {
    const auto cell = samples.find(row.cell);
    if (row.status != "ok" || cell == samples.end()) continue;
    if (row.repeat > 0) continue;  // the same answers again, drawn or not
    for (const SampleRow& sample : cell->second)
      if (sample.score >= 0 && sample.score <= 1)  // no perplexity
        policy_of(tables[{row.model, row.task}], row).scores[sample.prompt_sha256].push_back(sample.score);
  }
  return tables;
}

std::size_t fewest(const Scores& scores) {
  std::size_t n = scores.begin()->second.size();
  for (const auto& [prompt, answers] : scores) n = std::min(n, answers.size());
  return n;
}

// Powers of two and n.
std::vector<int> draws(int n) {
  std::vector<int> out;
  for (int k = 1; k < n; k *= 2) out.push_back(k);
  out.push_back(n);
  return out;
}

template <class Of>
std::string mean(const Scores& scores, Of of) {
  double sum = 0;
  for (const auto& [prompt, answers] : scores) sum += of(answers);
  return fmt::format("{:.4g}", sum / static_cast<double>(scores.size()));
}

// The policies by name, with what tells them apart: parameters, and budgets where these are all that does.
std::vector<std::string> labels_of(const std::vector<Policy>& policies) {
  std::vector<std::string> labels;
  for (const Policy& policy : policies) {
    std::vector<std::string> params;
    for (const Policy& other : policies)
      if (other.name == policy.name) params.push_back(other.params);
    const std::string varying = varying_text(policy.params, params);
    labels.push_back(one_line(varying.empty() ? policy.name : policy.name + " " + varying));
  }
  const std::vector<std::string> bare = labels;
  for (std::size_t i = 0; i < labels.size(); ++i)
    if (std::count(bare.begin(), bare.end(), bare[i]) > 1) labels[i] += " " + policies[i].budget;
  return labels;
}

ReportTable table_of(const std::string& title, const std::vector<Policy>& policies) {
  std::size_t n = fewest(policies.front().scores);
  for (const Policy& policy : policies) n = std::min(n, fewest(policy.scores));
  ReportTable table;
  table.title = one_line(title);
  table.header = {"policy", "questions", fmt::format("avg@{}", n)};
  for (const int k : draws(static_cast<int>(n))) table.header.push_back(fmt::format("pass@{}", k));
  const std::vector<std::string> labels = labels_of(policies);
  for (const Policy& policy : policies) {
    table.rows.push_back(
        {labels[table.rows.size()], std::to_string(policy.scores.size()), mean(policy.scores, [](const auto& answers) {
           double sum = 0;
           for (const double score : answers) sum += score;
           return sum / static_cast<double>(answers.size());
         })});
    for (const int k : draws(static_cast<int>(n)))
      table.rows.back().push_back(mean(policy.scores, [k](const auto& answers) {
        const auto right = std::count(answers.begin(), answers.end(), 1.);
        return pass_at_k(static_cast<int>(answers.size()), static_cast<int>(right), k);
      }));
  }
  return table;
}

}  // namespace

double pass_at_k(int n, int right, int k) {
  if (n - right < k) return 1;
  double none = 1;  // C(n - right, k) / C(n, k), factor by factor
  for (int i = n - right + 1; i <= n; ++i) none *= 1 - static_cast<double>(k) / i;
  return 1 - none;
}

std::string attempts_report(const std::string& path, Format format) {
  ReportPage page;
  page.origins = {"several answers to each question"};
  std::string all;
  for (const auto& [key, policies] : tables_of(path)) {
    const auto& [model, task] = key;
    page.tables.push_back(table_of(model + ", " + task, policies));
    all += render_csv(page.tables.back());
    if (page.tables.back().header[2] == "avg@1")
      page.warnings.push_back(one_line(task) + ": a question has one answer: `draws` of `sampling` makes several");
  }
  if (page.tables.empty()) page.warnings.emplace_back("no cell has a score from 0 to 1");
  return format == Format::csv ? all : render(page, format);
}

}  // namespace kvlab::results
