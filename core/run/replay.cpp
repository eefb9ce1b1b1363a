#include "run/replay.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/log.hpp"
#include "experiment/overrides.hpp"
#include "experiment/variants.hpp"
#include "run/nonfinite.hpp"
#include "run/shadow.hpp"
#include "run/step_log.hpp"
#include "run/summary.hpp"
#include "run/verify.hpp"

namespace kvlab {
namespace {

// Takes the place of `of`, whose lines are another file's.
yaml::Node elsewhere(yaml::Node of) {
  of.place = {};
  for (yaml::Node& item : of.items) item = elsewhere(std::move(item));
  for (yaml::Entry& e : of.entries) e = {elsewhere(std::move(e.key)), elsewhere(std::move(e.value))};
  return of;
}

void refuse(const Experiment& e, bool given, const std::string& key, const std::string& why) {
  if (given) throw Error(Errc::config, "got '" + key + "' for a replay, wanted none: " + why, e.file.string());
}

// The policy's pass over one cell.
class Replay {
 public:
  Replay(const CellInput& in, results::CellResult& out)
      : in_(in),
        out_(out),
        engine_(make_engine(in, 1)),
        shadow_(*in.model, in.policy().page_size, engine_.store().shape().max_tokens),
        log_(engine_, false, out) {
    engine_.observe(&shadow_);
    out_.fidelity.layers = in.model->config.layers;
    out_.fidelity.offsets.push_back(0);
  }

  void run() {
    const auto& items = in_.items->items;
    for (std::size_t i = 0; i < items.size(); ++i) {
      run_case(items[i], i);
      if (in_.progress) in_.progress("replay", static_cast<int>(i) + 1, static_cast<int>(items.size()));
    }
    log_.finish(false);
    if (steps_ > 0) out_.summary.kept_tokens = kept_ / steps_;
  }

 private:
  void run_case(const Item& item, std::size_t number) {
    if (in_.full_runs) in_.full_runs->prepare(in_, {item.sample});
    in_.rows->use(number);
    shadow_.reset();
    const ReplayShared::Key key{in_.rows->number(number), in_.policy().page_size,
                                engine_.store().options().rope != RopeRegime::original};
    const std::shared_ptr<const FullAttention> known = in_.replay_shared->attention(key);
    FullAttention noted(in_.replay_shared->left());
    known ? shadow_.use(known.get()) : shadow_.note(&noted);
    slot_ = engine_.open(static_cast<std::uint32_t>(item.sample));
    engine_.ask(slot_, static_cast<std::uint32_t>(number));
    want_room(engine_.prefill(slot_, item.prompt, true, {}), engine_);
    log_.prompt(0, {});
    shadow_.skip(static_cast<int>(item.fed.size()) - 1);  // a question's last step yields the first token
    for (const int token : item.fed) step(token);
    take(number, 0);
    for (std::size_t t = 1; t < item.forced.size(); ++t) {
      step(item.forced[t - 1]);
      take(number, t);
    }
    engine_.close(slot_);
    if (!known) in_.replay_shared->keep(key, std::move(noted));
    out_.fidelity.offsets.push_back(out_.fidelity.offsets.back() + static_cast<std::int64_t>(item.forced.size()));
    results::SampleRow row = sample_row(item, static_cast<std::int64_t>(number));
    row.prompt_tokens = static_cast<std::int64_t>(item.prompt.size() + item.fed.size());
    row.output_tokens = static_cast<std::int64_t>(item.forced.size());
    out_.samples.push_back(std::move(row));
  }

  void step(int token) {
    const std::vector<std::int32_t> slots{slot_};
    want_room(engine_.step(slots, {&token, 1}, {}), engine_);
    log_.decode(0, {}, slots);
    const Shape& s = engine_.store().shape();
    double tokens = 0;
    for (int layer = 0; layer < s.layers; ++layer) {
      const PagedKv kv = engine_.store().view(layer, slots);
      for (int head = 0; head < s.kv_heads; ++head) tokens += kv.tokens(0, head);
    }
    kept_ += tokens / (s.layers * s.kv_heads);
    ++steps_;
  }

  // The layers of the step that yields answer token t. A prompt yields the first one where nothing is fed after it.
  void take(std::size_t number, std::size_t t) {
    const Shadow::Rows rows = shadow_.take();
    if (rows.nonfinite > 0)
      throw NonFinite(rows.nonfinite, Error(Errc::model,
                                            fmt::format("got {} numbers of attention over all tokens that are not "
                                                        "finite, the first of them in layer {}; wanted none",
                                                        rows.nonfinite, rows.layer),
                                            fmt::format("sample {}, answer token {}", number, t)));
    results::Fidelity& f = out_.fidelity;
    for (const auto& [from, to] :
         {std::pair{&rows.mass, &f.mass}, {&rows.page_recall, &f.page_recall}, {&rows.output_error, &f.output_error}}) {
      if (from->empty())
        to->insert(to->end(), static_cast<std::size_t>(f.layers), std::nanf(""));
      else
        to->insert(to->end(), from->begin(), from->end());
    }
  }

  const CellInput& in_;
  results::CellResult& out_;
  Engine engine_;
  Shadow shadow_;
  StepLog log_;
  int slot_ = -1;
  double kept_ = 0, steps_ = 0;  // sum over decode steps of the mean tokens of a KV head; their number
};

}  // namespace

Experiment replayed_experiment(const Recording& recording, const std::string& file,
                               const std::vector<std::string>& sets, const PluginCatalog& catalog) {
  const results::RunInfo& info = recording.head().info;
  yaml::Document recorded = recorded_experiment(info.experiment_yaml, info.experiment_file);
  yaml::Document document;
  if (file.empty()) {
    document = recorded;
    document.sets.insert(document.sets.end(), sets.begin(), sets.end());
  } else {
    document = yaml::parse_file(file);
    document.sets = sets;
    Problems none(recorded);
    apply_sets(recorded, none);
    apply_sweep(recorded.root, none);
    for (const char* key : {"model", "tasks", "seed"})
      if (const yaml::Entry* entry = recorded.root.find(key); entry && !document.root.find(key))
        document.root.entries.push_back({elsewhere(entry->key), elsewhere(entry->value)});
  }
  Experiment e = read_experiment(std::move(document), catalog);
  refuse(e, !e.profilers.empty(), "profilers", "they watch a model run; give policies");
  refuse(e, !e.workloads.empty(), "workload", "a recording has one sequence at a time");
  refuse(e, e.equal_bytes > 0, "equal_bytes", "it tries budgets with the model; give each policy a budget");
  refuse(e, e.prefill_chunk > 0, "prefill_chunk", "a recording has whole prompts");
  refuse(e, e.backend == "cuda", "backend: cuda", "replay runs on the CPU");
  e.backend = "cpu";
  e.batch = e.repeats = 1;
  e.metrics = {Metric::fidelity, Metric::memory};
  e.recording = recording.path();
  return e;
}

void check_model(const Experiment& e, const Recording& recording) {
  const Model& model = *recording.head().model;
  const auto text = [](const std::string& name, DType dtype) { return name + " in " + name_of(dtype); };
  if (e.models.size() == 1 && e.models[0].name() == model.name && e.models[0].dtype == model.dtype) return;
  const ModelSpec& other = e.models[e.models.size() > 1 && e.models[0].name() == model.name ? 1 : 0];
  throw Error(Errc::config,
              fmt::format("got the model {}, wanted none or {}, of which {} is the recording",
                          text(other.name(), other.dtype), text(model.name, model.dtype), recording.path()),
              other.where);
}

TaskItems recorded_items(const Recording& recording, const TaskSpec& task, std::int64_t seed) {
  TaskItems out;
  out.metric = "none";
  for (const std::size_t i : recording.cases_of(to_json(task).dump(), seed)) {
    const RecordedCase& c = recording.cases()[i];
    Item item;
    item.sample = c.sample, item.question = c.question, item.shared = c.shared;
    item.prompt = c.prompt, item.fed = c.fed, item.forced = c.answer;
    item.max_new = c.max_new;
    // Room for the longest answer, which a live run has, too.
    item.before = std::max(0, c.max_new - static_cast<int>(c.answer.size()));
    item.sha256 = c.sha256;
    out.items.push_back(std::move(item));
    out.samples = std::max(out.samples, c.sample + 1);
  }
  if (out.items.empty())
    throw Error(Errc::config, fmt::format("got {} with seed {}, wanted a task of the recording {}", task_label(task),
                                          seed, recording.path()));
  return out;
}

std::shared_ptr<ReplayedRows> replayed_rows(std::shared_ptr<const Recording> recording, const TaskSpec& task,
                                            std::int64_t seed) {
  std::vector<std::size_t> cases = recording->cases_of(to_json(task).dump(), seed);
  return std::make_shared<ReplayedRows>(std::move(recording), std::move(cases));
}

results::CellResult replay(const CellInput& in) {
  const log::Timed timed("cell " + in.cell->id + ": replay");
  results::CellResult out;
  describe_cell(in, out);
  results::add_label(out.summary, "replayed");
  Replay(in, out).run();
  summarize(in, {}, out);
  return out;
}

}  // namespace kvlab
