#include "run/verify.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "base/content_hash.hpp"
#include "base/log.hpp"
#include "base/version.hpp"
#include "experiment/override_lines.hpp"
#include "experiment/variants.hpp"
#include "model/bundled.hpp"
#include "run/items.hpp"
#include "run/model_record.hpp"

namespace kvlab {
namespace {

using results::PluginRow;
using results::SampleRow;
using results::SummaryRow;

// A cell of the file, and the one of this tree that stands in its place.
struct Matched {
  const SummaryRow* row = nullptr;
  const Cell* cell = nullptr;  // null: not here
};

// Prompts of one model, task and seed; nothing where they cannot be made here.
struct Prompts {
  std::optional<TaskItems> items;
  std::map<std::pair<std::int64_t, std::int64_t>, const Item*> by_question;  // by sample and question
  bool no_file = false;                                                      // the task reads a file that is not here
};

class Verification {
 public:
  Verification(const std::string& file, const Experiment& experiment, const PluginCatalog& catalog)
      : e_(experiment),
        catalog_(catalog),
        summary_(results::read_summary(file)),
        plugins_(results::read_plugins(file)),
        samples_(results::read_samples(file)) {
    // An id holds the backend that ran, which `auto` may choose otherwise here.
    if (!summary_.info.backend.empty()) e_.backend = summary_.info.backend;
    for (const std::string& warning : summary_.warnings) log::warn(warning);
  }

  std::vector<Compared> run() {
    text("kvlab version", summary_.info.kvlab_version, version());
    text("commit", summary_.info.git_commit, git_commit());
    for (Compared& line : out_) line.counts = false;  // what they change shows in the lines below
    compare_models();
    compare_plugins();
    match_cells();
    compare_cells();
    compare_prompts();
    return std::move(out_);
  }

 private:
  void text(const std::string& what, const std::string& recorded, const std::string& here) {
    out_.push_back({what, recorded, here,
                    recorded.empty()   ? Finding::not_recorded
                    : here.empty()     ? Finding::not_here
                    : recorded == here ? Finding::same
                                       : Finding::differs});
  }
  void compare_models();
  void compare_plugins();
  void compare_profile(const PluginRow& row);
  void match_cells();
  void compare_cells();
  void compare_prompts();
  const Prompts& prompts_of(const Cell& cell);
  bool has_files(const Cell& cell);
  std::string name_of_cell(const SummaryRow& row) const;

  Experiment e_;
  const PluginCatalog& catalog_;
  results::Summary summary_;
  std::map<std::string, std::vector<PluginRow>> plugins_;
  std::map<std::string, std::vector<SampleRow>> samples_;
  std::vector<std::unique_ptr<Checkpoint>> checkpoints_;  // of the experiment's models; null: not here
  std::vector<Cell> cells_;                               // of this tree
  std::vector<Matched> matched_;
  std::map<std::tuple<std::size_t, std::size_t, std::int64_t>, Prompts> prompts_;
  std::vector<Compared> out_;
};

void Verification::compare_models() {
  const std::vector<ModelRecord> recorded = read_models(summary_.info.models);
  std::set<std::string> done;
  for (const ModelSpec& spec : e_.models) {
    try {
      checkpoints_.push_back(open_model(spec.path, spec.adapter, e_.folder));
    } catch (const Error& error) {
      log::warn(error.what());
      checkpoints_.push_back(nullptr);
    }
    if (!done.insert(spec.name()).second) continue;
    const auto was =
        std::find_if(recorded.begin(), recorded.end(), [&](const auto& r) { return r.name == spec.name(); });
    const ModelRecord none, &old = was == recorded.end() ? none : *was;
    const Checkpoint* model = checkpoints_.back().get();
    const ModelRecord now = model ? record_of(spec.name(), model->fingerprint(), model->tokenizer().get()) : none;
    text(spec.name() + ": content", old.content, now.content);
    text(spec.name() + ": tokenizer", old.tokenizer, now.tokenizer);
    text(spec.name() + ": chat template", old.chat, now.chat);
    text(spec.name() + ": stop ids", old.stop_ids, now.stop_ids);
  }
}

std::optional<Role> role_named(const std::string& word) {
  for (std::uint32_t r = 0; r < role_count; ++r)
    if (word == name_of(static_cast<Role>(r))) return static_cast<Role>(r);
  return std::nullopt;
}

void Verification::compare_profile(const PluginRow& row) {
  std::string here;
  try {
    here = content_hashes().sha256_of(e_.resolve(row.name));
  } catch (const Error& error) {
    log::warn(error.what());
  }
  text("profile " + row.name, row.sha256, here);
}

void Verification::compare_plugins() {
  std::set<PluginRow> all;
  std::size_t without = 0;
  for (const auto& [cell, rows] : plugins_) {
    all.insert(rows.begin(), rows.end());
    without += rows.empty();
  }
  for (const PluginRow& row : all) {
    if (row.role == "profile") {
      compare_profile(row);
      continue;
    }
    const std::optional<Role> role = role_named(row.role);
    const PluginInfo* plugin = role ? catalog_.find(*role, row.name) : nullptr;
    text(row.role + " " + row.name + ": version", row.version, plugin ? plugin->version : "");
    if (!row.sha256.empty()) text(row.role + " " + row.name + ": SHA-256", row.sha256, plugin ? plugin->sha256 : "");
  }
  if (without > 0) text(fmt::format("plugins of {} of {} cells", without, plugins_.size()), "", "");
}

// What a cell is, whatever its contents: model, task, workload, policy, seed and repeat.
using Key = std::tuple<std::string, std::string, std::string, std::string, std::int64_t, std::int64_t>;

Key key_of(const SummaryRow& row) { return {row.model, row.task, row.workload, row.policy, row.seed, row.repeat}; }

Key key_of(const Experiment& e, const Cell& c) {
  return {e.models[c.model].name(),
          task_label(e.tasks[c.task]),
          e.workloads.empty() ? "" : e.workloads[c.workload].text(),
          e.policies[c.policy].name,
          c.seed,
          c.repeat};
}

// Finds the cell of this tree for each cell of the file: by id, else by its key and parameters. Where lists of values
// give several cells the same key, their order decides, if there are as many here as in the file.
void Verification::match_cells() {
  Fingerprints prints = content_fingerprints();
  prints.model = [&](const ModelSpec& spec) {
    const auto& model = checkpoints_[static_cast<std::size_t>(&spec - e_.models.data())];
    return model ? model->fingerprint() : std::string();
  };
  cells_ = cells(e_, catalog_, prints);
  std::map<std::string, const Cell*> by_id;
  std::map<Key, std::vector<const Cell*>> here;  // those that the file's ids do not name
  std::map<Key, std::vector<Matched*>> open;
  for (const Cell& cell : cells_) by_id[cell.id] = &cell;
  for (const SummaryRow& row : summary_.rows) matched_.push_back({&row, nullptr});
  std::set<const Cell*> taken;
  for (Matched& m : matched_) {
    const auto same = by_id.find(m.row->cell);
    if (same != by_id.end())
      taken.insert(m.cell = same->second);
    else
      open[key_of(*m.row)].push_back(&m);
  }
  for (const Cell& cell : cells_)
    if (!taken.count(&cell)) here[key_of(e_, cell)].push_back(&cell);
  for (auto& [key, rows] : open) {
    const std::vector<const Cell*>& candidates = here[key];
    for (std::size_t r = 0; r < rows.size(); ++r) {
      std::vector<const Cell*> alike;
      for (const Cell* cell : candidates)
        if (cell->params == rows[r]->row->params) alike.push_back(cell);
      if (candidates.size() == rows.size())
        rows[r]->cell = candidates[r];
      else if (alike.size() == 1)
        rows[r]->cell = alike.front();
    }
  }
}

std::string Verification::name_of_cell(const SummaryRow& row) const {
  std::string name = row.task + ", " + row.policy;
  if (e_.models.size() > 1) name = row.model + ", " + name;
  if (row.budget_tokens >= 0) name += fmt::format(" {:.4g}", row.budget_tokens);
  if (row.context_tokens >= 0) name += fmt::format(", context {}", row.context_tokens);
  if (e_.seeds.size() > 1) name += fmt::format(", seed {}", row.seed);
  if (row.repeat > 0) name += fmt::format(", repeat {}", row.repeat);
  return name;
}

// Whether the files that a cell names are here.
bool Verification::has_files(const Cell& cell) {
  const PolicySpec& policy = e_.policies[cell.policy];
  std::vector<std::string> files{policy.profile};
  if (e_.inject.used(policy)) files.push_back(e_.inject.trace);
  if (!e_.workloads.empty()) files.push_back(e_.workloads[cell.workload].file);
  const auto lacks = [&](const std::string& file) {
    std::error_code error;
    return !file.empty() && !std::filesystem::is_regular_file(e_.resolve(file), error);
  };
  // Only the task knows which of its texts is a file.
  return std::ranges::none_of(files, lacks) && !prompts_of(cell).no_file;
}

void Verification::compare_cells() {
  std::size_t same = 0, differ = 0, absent = 0;
  std::vector<Compared> lines;
  for (const Matched& m : matched_) {
    // Without the model's contents there is no id.
    const bool known = m.cell && checkpoints_[m.cell->model];
    if (known && m.cell->id == m.row->cell)
      ++same;
    else if (known && !has_files(*m.cell))
      ++absent;
    else if (known || std::ranges::all_of(checkpoints_, [](const auto& c) { return c != nullptr; }))
      ++differ,
          lines.push_back({"cell " + name_of_cell(*m.row), m.row->cell, known ? m.cell->id : "none", Finding::differs});
    else
      ++absent;
  }
  out_.push_back({"cells", fmt::format("{}", matched_.size()),
                  fmt::format("{} with the same id", same) + (absent ? fmt::format(", {} not here", absent) : ""),
                  differ                ? Finding::differs
                  : matched_.empty()    ? Finding::not_recorded
                  : same == 0 && absent ? Finding::not_here
                                        : Finding::same});
  out_.insert(out_.end(), lines.begin(), lines.end());
}

const Prompts& Verification::prompts_of(const Cell& cell) {
  const auto [at, fresh] = prompts_.try_emplace({cell.model, cell.task, cell.seed});
  const Checkpoint* model = checkpoints_[cell.model].get();
  if (!fresh || !model) return at->second;
  try {
    at->second.items = make_items(e_.tasks[cell.task], catalog_, model->tokenizer(), model->config(), e_, cell.seed);
    for (const Item& item : at->second.items->items)
      at->second.by_question.try_emplace({item.sample, item.question}, &item);
  } catch (const Error& error) {
    at->second.no_file = error.code() == Errc::io;
    log::warn(error.what());
  }
  return at->second;
}

// The prompt of a question here. Samples of earlier versions have only their number, which counts the items in turn.
const Item* item_of(const Prompts& prompts, const SampleRow& sample) {
  const std::vector<Item>& items = prompts.items->items;
  if (sample.task_sample < 0)
    return items.empty() || sample.sample < 0 ? nullptr
                                              : &items[static_cast<std::size_t>(sample.sample) % items.size()];
  const auto found = prompts.by_question.find({sample.task_sample, sample.question});
  return found == prompts.by_question.end() ? nullptr : found->second;
}

void Verification::compare_prompts() {
  std::size_t all = 0, same = 0, differ = 0, absent = 0;
  std::vector<Compared> lines;
  std::set<std::tuple<std::size_t, std::size_t, std::int64_t>> said;  // policies share prompts
  for (const Matched& m : matched_) {
    const std::vector<SampleRow>& samples = samples_[m.row->cell];
    const Prompts* here = m.cell ? &prompts_of(*m.cell) : nullptr;
    const SampleRow* first = nullptr;  // that differs
    std::string other;
    std::size_t differ_here = 0;
    for (const SampleRow& sample : samples) {
      if (sample.prompt_sha256.empty()) continue;
      ++all;
      if (!here || !here->items) {
        ++absent;
        continue;
      }
      const Item* item = item_of(*here, sample);
      if (item && item->sha256 == sample.prompt_sha256) {
        ++same;
        continue;
      }
      if (differ_here++ == 0) first = &sample, other = item ? item->sha256 : "no such question";
    }
    differ += differ_here;
    if (first && said.insert({m.cell->model, m.cell->task, m.cell->seed}).second)
      lines.push_back({fmt::format("prompts of {}: {} of {} differ, first sample {}", name_of_cell(*m.row), differ_here,
                                   samples.size(), first->sample),
                       first->prompt_sha256, other, Finding::differs});
  }
  out_.push_back({"prompts", fmt::format("{}", all),
                  fmt::format("{} the same", same) + (absent ? fmt::format(", {} not here", absent) : ""),
                  differ      ? Finding::differs
                  : all == 0  ? Finding::not_recorded
                  : same == 0 ? Finding::not_here
                              : Finding::same});
  out_.insert(out_.end(), lines.begin(), lines.end());
}

}  // namespace

const char* name_of(Finding finding) {
  switch (finding) {
    case Finding::same: return "same";
    case Finding::differs: return "differs";
    case Finding::not_recorded: return "not recorded";
    case Finding::not_here: break;
  }
  return "not here";
}

yaml::Document recorded_experiment(const std::string& text, const std::string& file) {
  std::string rest = text;
  std::vector<std::string> sets = take_overrides(rest);
  yaml::Document document = yaml::parse_text(rest, file);
  document.sets = std::move(sets);
  return document;
}

std::vector<Compared> compare_with_tree(const std::string& result_file, const Experiment& experiment,
                                        const PluginCatalog& catalog) {
  return Verification(result_file, experiment, catalog).run();
}

}  // namespace kvlab
