#include "run/profile.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <kvlab/error.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/log.hpp"
#include "base/stop.hpp"
#include "base/threads.hpp"
#include "engine/host_mirror.hpp"
#include "model/bundled.hpp"
#include "plugin/callback.hpp"
#include "plugin/loader.hpp"
#include "result/output.hpp"
#include "result/profile_report.hpp"
#include "run/answer.hpp"
#include "run/device.hpp"
#include "run/items.hpp"
#include "run/nonfinite.hpp"
#include "run/progress.hpp"
#include "run/summary.hpp"

namespace kvlab {
namespace {

// The full cache under observation: it forwards all calls to the profilers and edits nothing. On a GPU they see a
// mirror.
class Watched final : public Policy {
 public:
  Watched(const Experiment& e, const PluginCatalog& catalog) : device_(device_of(e)) {
    for (const PluginUse& use : e.profilers)
      profilers_.push_back(create<Profiler>(*catalog.find(Role::profiler, use.name), use.params));
    for (const auto& p : profilers_) join(p->needs());
  }

  Needs needs() const override { return needs_; }
  void attach(const Shape& shape, const BudgetAmount&, Workspace& w) override {
    if (device_ == Device::cuda) mirror_.emplace(shape, needs_.page_summary(), needs_.summary_bits());
    for (const auto& p : profilers_) mirror_ ? p->attach(mirror_->shape(), mirror_->workspace()) : p->attach(shape, w);
  }
  void prefill(const LayerPrefill& layer, Edits&, Stream s) override {
    LayerPrefill here = mirror_ ? mirror_->of(layer, s) : layer;
    here.chunk_queries = {};
    for (const auto& p : profilers_) p->prefill(here, Stream::cpu());
  }
  void observe(const LayerStep& step, Edits&, Stream s) override {
    const LayerStep here = mirror_ ? mirror_->of(step, s) : step;
    for (const auto& p : profilers_) p->observe(here, Stream::cpu());
  }
  void release(int slot) override {
    if (mirror_) mirror_->release(slot);
    for (const auto& p : profilers_) p->release(slot);
  }
  bool by_pages() const {
    return std::any_of(profilers_.begin(), profilers_.end(), [](const auto& p) { return p->by_pages(); });
  }
  EngineObserver* observer() { return mirror_ ? &*mirror_ : nullptr; }

  std::vector<Profile> finish() {
    std::vector<Profile> out(profilers_.size());
    for (std::size_t i = 0; i < out.size(); ++i) profilers_[i]->finish(out[i]);
    return out;
  }

 private:
  void join(const Needs& n) {
    const auto refuse = [](const char* what) {
      throw Error(Errc::unsupported, std::string("got profilers that need ") + what + ", wanted one of them in a run");
    };
    needs_.window_queries(std::max(needs_.window_queries(), n.window_queries()));
    needs_.mass(std::max(needs_.mass(), n.mass()));
    if (n.page_summary() != Summary::none) {
      if (needs_.page_summary() != Summary::none &&
          (needs_.page_summary() != n.page_summary() || needs_.summary_bits() != n.summary_bits()))
        refuse("different page summaries");
      needs_.page_summary(n.page_summary(), n.summary_bits());
    }
    if (n.rope() != RopeRegime::original) refuse("keys that are not at their text positions");
    if (!n.token_state().empty()) refuse("token state");
    if (!n.devices().empty()) {
      if (!needs_.devices().empty() && needs_.devices() != n.devices()) refuse("different devices");
      needs_.devices(n.devices());
    }
    if (!n.dtypes().empty()) {
      if (!needs_.dtypes().empty() && needs_.dtypes() != n.dtypes()) refuse("different dtypes");
      needs_.dtypes(n.dtypes());
    }
    needs_.chunked_prompts(needs_.chunked_prompts() && n.chunked_prompts());
  }

  Device device_;
  std::vector<Instance<Profiler>> profilers_;
  Needs needs_;
  std::optional<HostMirror> mirror_;
};

// The full cache with the needs of the profilers, but without the profilers.
class Unwatched final : public Policy {
 public:
  explicit Unwatched(const Needs& needs) : needs_(needs) {}
  Needs needs() const override { return needs_; }

 private:
  Needs needs_;
};

struct Sample {
  std::string task;
  Item item;
};

std::vector<Sample> samples_of(const Experiment& e, const PluginCatalog& catalog, const Model& model) {
  if (e.sampling.on()) log::warn("sampling is left out: a profile is of the most likely answers");
  std::vector<Sample> out;
  for (const TaskSpec& task : e.tasks)
    for (const std::int64_t seed : e.seeds)
      for (Item& item : make_items(task, catalog, model.tokenizer, model.config, e, seed).items)
        if (!item.follows) out.push_back({task.name, std::move(item)});  // a later turn needs the answers before it
  return out;
}

// Feeds prompt, question and answer. The cache then holds all of them but the token that ends the answer.
Fit watch(Sequence& sequence, const Item& item, const Tokenizer& tokenizer) {
  const Sequence::Asked asked[] = {{0, static_cast<std::uint32_t>(item.sample)}};
  Fit fit = sequence.begin(item, asked);
  for (Answer answer(item); fit == Fit::ok && !answer.ended();) {
    const int token = answer.take(sequence.logits(), tokenizer);
    if (answer.stop() != Answer::Stop::eos) fit = sequence.feed(token);
  }
  sequence.close();
  return fit;
}

// Runs all samples, shows each outcome and returns the profiles; nothing where a sample failed. Profilers finish before
// the engine ends, because their state lies in its workspace.
std::optional<std::vector<Profile>> watch_all(const std::vector<Sample>& samples,
                                              const std::shared_ptr<const Model>& model,
                                              const std::shared_ptr<Watched>& watched, const EngineOptions& options) {
  Progress progress(static_cast<int>(samples.size()));
  try {
    Engine engine(model, watched, options);
    engine.observe(watched->observer());
    Sequence sequence(engine);
    for (const Sample& s : samples) {
      progress.begin(fmt::format("{} sample {}", s.task, s.item.sample));
      if (watch(sequence, s.item, *model->tokenizer) != Fit::ok) {
        progress.end("oom: a sample does not fit; nothing is written");
        return std::nullopt;
      }
      progress.end("ok");
    }
    return watched->finish();
  } catch (const NonFiniteStep& e) {
    const auto unwatched = [&] { return std::make_shared<Unwatched>(watched->needs()); };
    progress.end(fmt::format("failed: {}; nothing is written", located(model, unwatched, options, e).what()));
    return std::nullopt;
  }
}

// An experiment that has passed every check, and what its engine takes.
struct Checks {
  Experiment experiment;
  std::unique_ptr<Checkpoint> checkpoint;
  std::vector<Sample> samples;
  EngineOptions options;
};

Checks checks_of(const Experiment& given, const PluginCatalog& catalog) {
  Experiment e = given;
  if (e.profilers.empty())
    throw Error(Errc::config, "got no 'profilers', wanted e.g. profilers: [NAME]; `kvlab list profilers` has the names",
                e.file.string());
  std::set<std::string> names;
  for (const PluginUse& use : e.profilers)
    if (!names.insert(use.name).second)
      throw Error(Errc::config,
                  fmt::format("got profiler '{}' twice, wanted each once: a profile has one of a name", use.name),
                  e.file.string());
  if (e.models.size() != 1)
    throw Error(Errc::config,
                fmt::format("got {} models, wanted one: a profile is keyed by its model", e.models.size()),
                e.file.string());
  results::check_output(e.output.string(), results::OutputKind::profile);
  e = with_backend(std::move(e));
  const ModelSpec& spec = e.models.front();
  auto checkpoint = open_model(spec.path, spec.adapter, e.folder);
  const auto outline = model_outline(*checkpoint, spec.dtype, spec.name(), device_of(e));
  std::vector<Sample> samples = samples_of(e, catalog, *outline);
  EngineOptions o;
  o.device = device_of(e);
  for (const Sample& s : samples) o.max_tokens = std::max(o.max_tokens, s.item.most_tokens());
  o.page_size = e.page_size;
  o.prefill_chunk = e.prefill_chunk;
  {
    Watched unused(e, catalog);
    Engine::check(*outline, unused, o);
  }
  if (e.device_memory > 0) {
    Watched unused(e, catalog);
    try {
      Engine::fit(o, e.device_memory, *outline, unused);
    } catch (const NoRoom& small) {
      throw Error(Errc::config, small.what(), e.file.string());
    }
    o.scratch_limit = -1;  // what profilers take serves no cache
  }
  return {std::move(e), std::move(checkpoint), std::move(samples), o};
}

}  // namespace

void check_profile(const Experiment& experiment, const PluginCatalog& catalog) { checks_of(experiment, catalog); }

int run_profile(const Experiment& given, const PluginCatalog& catalog, const RunOptions& options) {
  use_threads(given.threads);
  stop::watch();
  name_callback_at_end();
  auto [e, checkpoint, samples, o] = checks_of(given, catalog);
  const ModelSpec& spec = e.models.front();
  const std::string out = e.output.string();
  const auto held = results::open_output(out, options.command, results::OutputKind::profile);

  const auto model = load_model(*checkpoint, spec.dtype, spec.name(), o.device);
  checkpoint.reset();
  const auto watched = std::make_shared<Watched>(e, catalog);
  auto profiles = watch_all(samples, model, watched, o);
  if (!profiles) return 1;

  results::ProfileFile file{spec.name(), model->fingerprint, {}, {}, watched->by_pages() ? e.page_size : 0};
  for (const TaskSpec& task : e.tasks) add_plugin(file.plugins, task.task, catalog);
  for (const PluginUse& use : e.profilers) add_plugin(file.plugins, use, catalog);
  for (std::size_t i = 0; i < profiles->size(); ++i)
    file.profilers.push_back({e.profilers[i].name, to_json(e.profilers[i].params).dump(), std::move((*profiles)[i])});
  bool written = true;
  try {
    results::write_profile(out, run_info(e, options.command), file);
  } catch (const Error& error) {
    log::error(fmt::format("the profile could not be written: {}; nothing of it is kept", error.what()));
    written = false;
  }
  if (!options.quiet) {
    fmt::print("{}", results::profile_report(file, results::Format::table));
    if (written) fmt::print("profile: {}\n", out);
  }
  return written ? 0 : 1;
}

}  // namespace kvlab
