#include "result/choice.hpp"

#include <fmt/format.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <map>
#include <set>

#include "base/text.hpp"
#include "result/varying.hpp"

namespace kvlab::results {
namespace {

struct Setting {
  const SummaryRow* row = nullptr;
  std::map<const Block*, const Group*> groups;
  double score = 0, compression = 0;  // means over the tasks
  std::string missing;                // why it cannot be chosen
};

bool is_text(const Group& group, const Samples& samples) {
  return std::ranges::any_of(answers_of(group, samples), [](const auto& a) { return a.second.forced; });
}

double score_of(const Group& group) {
  return mean_over(group, [](const SummaryRow& r) { return r.score; });
}
double compression_of(const Group& group) {
  return mean_over(group, [](const SummaryRow& r) { return r.compression; });
}

// Settings in the order of their rows, of the blocks of one model.
std::vector<Setting> settings_of(const std::string& policy, const std::vector<const Block*>& blocks,
                                 std::vector<std::string>& warnings) {
  std::vector<Setting> out;
  for (const Block* block : blocks)
    for (const Group& group : block->groups) {
      const SummaryRow& row = group.first();
      if (row.policy != policy || !row.ablated.empty()) continue;
      auto at = std::ranges::find_if(out, [&](const Setting& s) { return s.row->params == row.params; });
      if (at == out.end()) at = out.insert(at, Setting{&row, {}, 0, 0, ""});
      if (!at->groups.emplace(block, &group).second)
        warnings.push_back(policy + " has several rows of equal parameters in " + title_of(*block) +
                           ": the first one counts");
    }
  return out;
}

void average(Setting& setting, const std::vector<const Block*>& blocks) {
  for (const Block* block : blocks) {
    const auto group = setting.groups.find(block);
    if (group == setting.groups.end())
      setting.missing = "it has no row in " + title_of(*block);
    else if (!group->second->bad.empty())
      setting.missing = fmt::format("{} in {}", group->second->bad.front()->status, title_of(*block));
    else if (!measured(score_of(*group->second)))
      setting.missing = "no score in " + title_of(*block);
    else if (!measured(compression_of(*group->second)))
      setting.missing = "no bytes in " + title_of(*block) + ", which metrics: [memory] measures";
    else
      setting.score += score_of(*group->second) / static_cast<double>(blocks.size()),
          setting.compression += compression_of(*group->second) / static_cast<double>(blocks.size());
    if (!setting.missing.empty()) return;
  }
}

// The parameters whose values differ between the settings.
std::set<std::string> varying(const std::vector<Setting>& settings) {
  std::map<std::string, std::set<std::string>> values;
  for (const Setting& s : settings)
    for (const auto& [name, value] : flat_parameters(s.row->params)) values[name].insert(value);
  std::set<std::string> out;
  for (const auto& value : values) {
    const std::string& name = value.first;
    const auto has = [&](const Setting& s) { return flat_parameters(s.row->params).contains(name); };
    if (value.second.size() > 1 || !std::ranges::all_of(settings, has)) out.insert(name);
  }
  return out;
}

std::string text_of(const Setting& setting, const std::set<std::string>& names, const std::string& before,
                    const std::string& between) {
  std::vector<std::string> words;
  for (const auto& [name, value] : flat_parameters(setting.row->params))
    if (names.contains(name)) words.push_back(before + name + "=" + value);
  return join(words, between);
}

const Setting* chosen(const std::vector<Setting>& settings, double lose) {
  const Setting *best = nullptr, *out = nullptr;
  for (const Setting& s : settings)
    if (s.missing.empty() && (!best || s.score > best->score)) best = &s;
  constexpr double equal = 1e-9;  // means of the same scores in another order
  for (const Setting& s : settings)
    if (s.missing.empty() && s.score >= best->score - lose - equal && (!out || s.compression > out->compression))
      out = &s;
  return out;
}

ReportTable table_of(const std::string& policy, double lose, const std::vector<const Block*>& blocks,
                     std::vector<std::string>& warnings) {
  std::vector<Setting> settings = settings_of(policy, blocks, warnings);
  for (Setting& s : settings) average(s, blocks);
  const std::set<std::string> names = varying(settings);
  const Setting* best = chosen(settings, lose);
  ReportTable table;
  table.title = fmt::format("{}: settings of {}, {}", blocks.front()->model, policy, settings.size());
  table.header = {"", "setting"};
  table.text_columns = 2;
  for (const Block* block : blocks) table.header.push_back(block->task);
  table.header.insert(table.header.end(), {"mean score", "compr. ×"});
  for (const Setting& s : settings) {
    const std::string setting = text_of(s, names, "", " ");
    auto& row = table.rows.emplace_back(std::vector<std::string>{&s == best ? "*" : "", setting});
    for (const Block* block : blocks) {
      const auto group = s.groups.find(block);
      row.push_back(group == s.groups.end() ? "-" : number(score_of(*group->second)));
    }
    const bool whole = s.missing.empty();
    row.insert(row.end(), {whole ? number(s.score) : "-", whole ? number(s.compression) : "-"});
    if (!whole) warnings.push_back(fmt::format("{} {} was not considered: {}", policy, setting, s.missing));
  }
  if (!best)
    table.under.emplace_back("no setting has finished in every task");
  else if (names.empty())
    table.under.emplace_back("one setting alone: a list of values, such as `--set " + policy + ".KEY=[A,B]`, sweeps");
  else
    table.under.push_back(
        fmt::format("*: {}\nthe fewest bytes of those that lose at most {} against the best mean score. Score other "
                    "samples than these",
                    text_of(*best, names, "--set " + policy + ".", " "), lose));
  return table;
}

}  // namespace

void add_choices(const std::string& policy, double lose, const std::vector<Block>& blocks, const Samples& samples,
                 ReportPage& page) {
  std::vector<std::pair<std::string, std::vector<const Block*>>> models;
  std::set<std::string> known;
  for (const Block& block : blocks) {
    bool has = false;
    for (const Group& group : block.groups) {
      known.insert(group.first().policy);
      if (group.first().policy != policy || !group.first().ablated.empty()) continue;
      has = true;
      if (is_text(group, samples))
        throw Error(Errc::config, "got the task " + block.task + ", a text, wanted tasks with scores", "--choose");
    }
    if (!has) continue;
    if (std::ranges::count(identity_of(block.groups.front().first()), "synthetic")) {
      page.warnings.push_back(title_of(block) + ": no choice: random weights have scores that say nothing");
      continue;
    }
    auto at = std::ranges::find_if(models, [&](const auto& m) { return m.first == block.model; });
    if (at == models.end()) at = models.insert(at, {block.model, {}});
    at->second.push_back(&block);
  }
  if (!known.contains(policy))
    throw Error(Errc::config,
                fmt::format("got '{}', wanted the name of a policy in the file: {}", policy,
                            join(std::vector<std::string>(known.begin(), known.end()))),
                "--choose");
  for (const auto& [model, own] : models) page.tables.push_back(table_of(policy, lose, own, page.warnings));
}

}  // namespace kvlab::results
