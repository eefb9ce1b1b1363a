#include "result/report_blocks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.hpp"
#include "result/varying.hpp"

namespace kvlab::results {
namespace {

constexpr std::pair<const char*, const char*> label_meanings[] = {
    {"injected", "the selection follows a recorded or made-up trace, not this model's attention"},
    {"functional",
     "stored values are changed as the method would change them; bytes and times are those of the full-width cache and "
     "of what the method keeps beside it"},
    {"synthetic", "random weights: times and bytes count, scores and fidelity say nothing"},
    {"graph", "decode steps are launched as CUDA graphs"},
    {"disturbed", "other processes took cores that this cell needed: its times are too long"},
    {"replayed", "a recording gave each step the full cache's queries, keys and values; no text was generated"},
    {"events", "events lie between the parts of steps, and no two parts of the main stream overlap, which costs time"},
    {"eager", "steps are launched kernel by kernel with events between their parts, which costs time"},
};

const char* oracle_meaning(Way way) {
  switch (way) {
    case Way::evicts:
      return "keeps what the full cache's recorded answer attends to: a reference, no bound, never timed";
    case Way::selects: return "chooses by the true attention of the step that reads: a bound, never timed";
    default: return "knows what no method can know in time, never timed";
  }
}

bool near(double a, double b) {
  return a == b || (!measured(a) && !measured(b)) || std::fabs(a - b) <= 0.05 * std::fabs(b);
}

bool belongs(const Group& group, const SummaryRow& row) {
  const SummaryRow& first = group.first();
  if (row.policy != first.policy || row.params != first.params || identity_of(row) != identity_of(first) ||
      row.budget_bytes != first.budget_bytes)
    return false;
  // Failed cells may have no measured budget. The same seed and repeat twice mean two configurations.
  // Equal bytes may be other tokens for each seed.
  if (row.budget_bytes < 0 && row.status == "ok" && first.status == "ok" &&
      !near(row.budget_tokens, first.budget_tokens))
    return false;
  const auto same_run = [&](const SummaryRow* other) { return other->seed == row.seed && other->repeat == row.repeat; };
  return std::none_of(group.good.begin(), group.good.end(), same_run) &&
         std::none_of(group.bad.begin(), group.bad.end(), same_run);
}

}  // namespace

std::vector<std::string> split_labels(const std::string& labels) {
  std::vector<std::string> out;
  for (std::size_t at = 0; at <= labels.size();) {
    const std::size_t end = std::min(labels.find_first_of(", ", at), labels.size());
    if (end > at) out.push_back(labels.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

Way way_of(const SummaryRow& row) {
  const auto params = nlohmann::json::parse(row.params, nullptr, false);
  if (!params.is_object()) return Way::unknown;
  return params.contains("scorer") ? Way::evicts : params.contains("selector") ? Way::selects : Way::unknown;
}

std::string label_note(const std::string& label, const SummaryRow& row) {
  if (label == "sampled")
    return label + ": answers are drawn (" + of_one_row(row.sampling) + "); the score is the mean over draws";
  if (label == "oracle") return label + ": " + oracle_meaning(way_of(row));
  for (const auto& [name, meaning] : label_meanings)
    if (label == name) return label + ": " + meaning;
  return label;
}

std::vector<std::string> identity_of(const SummaryRow& row) {
  auto labels = split_labels(row.labels);
  std::erase(labels, "disturbed");
  return labels;
}

std::vector<Block> blocks_of(const std::vector<SummaryRow>& rows) {
  std::vector<Block> blocks;
  for (const SummaryRow& row : rows) {
    auto block = std::find_if(blocks.begin(), blocks.end(), [&](const Block& b) {
      return b.model == row.model && b.task == row.task && b.workload == row.workload &&
             b.context == row.context_tokens;
    });
    if (block == blocks.end())
      block = blocks.insert(blocks.end(), {row.model, row.task, row.workload, row.context_tokens, {}});
    auto group =
        std::find_if(block->groups.begin(), block->groups.end(), [&](const Group& g) { return belongs(g, row); });
    if (group == block->groups.end()) group = block->groups.insert(group, Group{});
    (row.status == "ok" ? group->good : group->bad).push_back(&row);
  }
  return blocks;
}

std::string title_of(const Block& block) {
  return of_one_row(block.model + ", " + block.task) +
         (block.context >= 0 ? fmt::format(", context {}", block.context) : std::string()) +
         (block.workload.empty() ? "" : ", " + of_one_row(block.workload));
}

std::string of_one_row(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\n' || c == '\t'; }, ' ');
  return printable(text);
}

std::string number(double v) { return measured(v) ? fmt::format("{:.4g}", v) : "-"; }

std::string budget_text(const Group& group) {
  const SummaryRow& row = group.first();
  const std::string tokens = number(
      mean_over(group, [](const SummaryRow& r) { return r.budget_tokens < 0 ? not_measured : r.budget_tokens; }));
  if (row.budget_bytes < 0) return tokens;
  const std::string bytes = fmt::format("{:.4g} MB", static_cast<double>(row.budget_bytes) / 1e6);
  return tokens == "-" ? bytes : bytes + " = " + tokens;
}

std::string policy_text(const Group& group, const Block& block) {
  std::vector<std::string> params;
  for (const Group& other : block.groups)
    if (other.first().policy == group.first().policy) params.push_back(other.first().params);
  const std::string varying = varying_text(group.first().params, params);
  return of_one_row(group.first().policy + (varying.empty() ? "" : " " + varying));
}

std::string Notes::mark(const std::string& note) {
  const auto found = std::find(list_.begin(), list_.end(), note);
  const std::size_t index = static_cast<std::size_t>(found - list_.begin());
  if (found == list_.end()) list_.push_back(note);
  return fmt::format(" [{}]", index + 1);
}

}  // namespace kvlab::results
