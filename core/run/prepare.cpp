#include "run/prepare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "base/log.hpp"
#include "experiment/build_policy.hpp"
#include "experiment/variants.hpp"
#include "model/bundled.hpp"
#include "result/output.hpp"
#include "run/cell.hpp"
#include "run/device.hpp"
#include "run/policy_profile.hpp"
#include "run/replay.hpp"
#include "run/requests.hpp"

namespace kvlab {
namespace {

class Preparation {
 public:
  Preparation(const Experiment& e, const PluginCatalog& catalog, const std::string& only,
              const std::set<std::filesystem::path>& later)
      : e_(e), catalog_(catalog), only_(only), later_(later) {}

  Prepared run() {
    open_models();
    list_cells();
    read_recorded_trace();
    for (const Cell& c : p_.cells) check(c);
    if (only_.empty()) check_output();
    if (!wrong_.empty()) throw ExperimentError(std::move(wrong_));
    return std::move(p_);
  }

 private:
  void open_models();
  void list_cells();
  void read_recorded_trace();
  bool made_later(const std::filesystem::path& file) const {
    return !later_.empty() && later_.count(std::filesystem::weakly_canonical(file)) != 0;
  }
  bool read_profile(const Cell& cell);
  void check(const Cell& cell);
  void check_output();

  // Whether body() found nothing wrong.
  template <class Body>
  bool attempt(const std::string& where, Body body) {
    try {
      placed(where, body);
      return true;
    } catch (const Error& error) {
      if (seen_.insert(error.what()).second) wrong_.push_back(error);
      return false;
    }
  }

  const Experiment& e_;
  const PluginCatalog& catalog_;
  const std::string& only_;
  const std::set<std::filesystem::path>& later_;
  Prepared p_;
  std::vector<std::string> inputs_;  // files that the cells depend on
  std::vector<Error> wrong_;
  std::set<std::string> seen_;
  std::set<ItemsKey> tried_;
};

void Preparation::open_models() {
  if (!e_.recording.empty()) {
    p_.recording = std::make_shared<Recording>(e_.recording.string());
    p_.replay_shared = std::make_shared<ReplayShared>();
    inputs_.push_back(e_.recording.string());
    check_model(e_, *p_.recording);
    p_.models = {p_.recording->head().model};
    p_.checkpoints.resize(1);
    return;
  }
  for (const ModelSpec& spec : e_.models)
    placed(spec.where, [&] {
      p_.checkpoints.push_back(open_model(spec.path, spec.adapter, e_.folder));
      p_.models.push_back(model_outline(*p_.checkpoints.back(), spec.dtype, spec.name(), device_of(e_)));
      log::debug("model " + spec.name() + ": contents " + p_.models.back()->fingerprint);
    });
}

void Preparation::list_cells() {
  Fingerprints prints = content_fingerprints();
  const std::string recorded = p_.recording ? " " + prints.file(e_.recording) : "";
  prints.model = [&](const ModelSpec& spec) {
    return recorded + p_.models[static_cast<std::size_t>(&spec - e_.models.data())]->fingerprint;
  };
  prints.file = [&, hash = prints.file](const std::filesystem::path& file) {
    if (made_later(file)) return file.string();
    inputs_.push_back(file.string());
    return hash(file);
  };
  p_.cells = cells(e_, catalog_, prints);
  log::debug(fmt::format("{}: {} cells on {}", e_.file.string(), p_.cells.size(), e_.backend));
  if (!only_.empty()) std::erase_if(p_.cells, [&](const Cell& c) { return c.id != only_; });
}

void Preparation::read_recorded_trace() {
  if (e_.inject.trace.empty()) return;
  placed(e_.inject.where, [&] {
    inputs_.push_back(e_.resolve(e_.inject.trace).string());
    p_.recorded = std::make_shared<RecordedTrace>(read_recorded(inputs_.back(), e_.inject.cell));
    for (const Cell& c : p_.cells)
      if (const PolicySpec& policy = e_.policies[c.policy]; e_.inject.used(policy))
        if (const std::string text = other_shape(*p_.recorded, p_.models[c.model]->config, policy.page_size);
            !text.empty())
          log::warn(e_.inject.where + ": " + text);
  });
}

// Whether the policy's profile is there, if its entry names one.
bool Preparation::read_profile(const Cell& c) {
  const PolicySpec& policy = e_.policies[c.policy];
  const ProfileKey key{c.model, policy.profile, policy.page_size};
  if (!policy.profile.empty() && made_later(e_.resolve(policy.profile))) return false;
  return policy.profile.empty() || p_.profiles.count(key) != 0 || attempt(policy.where, [&] {
           p_.profiles[key] = std::make_shared<Profile>(read_policy_profile(
               e_.resolve(policy.profile).string(), *p_.models[c.model], policy.page_size, catalog_));
         });
}

// Checks the cell's prompts, requests, recorded lists, profile and policy; without prompts or profile only how the
// policy is built.
void Preparation::check(const Cell& c) {
  const ItemsKey key{c.model, c.task, c.seed};
  const Model& model = *p_.models[c.model];
  if (tried_.insert(key).second)
    attempt(e_.tasks[c.task].where, [&] {
      const log::Timed timed("prompts of " + task_label(e_.tasks[c.task]));
      p_.items[key] = p_.recording ? recorded_items(*p_.recording, e_.tasks[c.task], c.seed)
                                   : make_items(e_.tasks[c.task], catalog_, model.tokenizer, model.config, e_, c.seed);
      if (e_.sampling.on()) p_.items[key] = drawn(std::move(p_.items[key]), e_.sampling.draws, e_.tasks[c.task].where);
    });
  const PolicySpec& policy = e_.policies[c.policy];
  const bool has_items = p_.items.count(key) != 0;
  if (has_items && !e_.workloads.empty())
    attempt(e_.workloads[c.workload].where,
            [&] { make_requests(e_.workloads[c.workload], p_.items[key].items, c.seed, e_.folder); });
  const bool followed = !has_items || !p_.recorded || !e_.inject.used(policy) ||
                        attempt(e_.inject.where, [&] { follow(*p_.recorded, p_.items[key].items); });
  if (read_profile(c) && has_items && followed)
    attempt(policy.where, [&] { check_cell(input(e_, catalog_, p_, c)); });
  else
    attempt(policy.where, [&] { build_policy(policy, catalog_); });
}

// The process of an isolated cell does not call this: the run that started it holds the output.
void Preparation::check_output() {
  attempt("", [&] {
    results::check_output(e_.output.string());
    results::check_apart(e_.output.string(), inputs_);
  });
}

}  // namespace

Prepared prepare(const Experiment& e, const PluginCatalog& catalog, const std::string& only,
                 const std::set<std::filesystem::path>& later) {
  return Preparation(e, catalog, only, later).run();
}

CellInput input(const Experiment& e, const PluginCatalog& catalog, const Prepared& p, const Cell& cell) {
  CellInput in;
  in.experiment = &e;
  in.cell = &cell;
  in.model = p.models[cell.model];
  in.items = &p.items.at({cell.model, cell.task, cell.seed});
  in.catalog = &catalog;
  const ProfileKey key{cell.model, in.policy().profile, in.policy().page_size};
  if (const auto own = p.profiles.find(key); own != p.profiles.end()) in.profile = own->second;
  in.recorded = p.recorded;
  in.replay_shared = p.replay_shared;
  if (p.recording) in.rows = replayed_rows(p.recording, e.tasks[cell.task], cell.seed);
  return in;
}

}  // namespace kvlab
