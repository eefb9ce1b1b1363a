#include "run/record.hpp"

#include <fmt/format.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/host_memory.hpp"
#include "base/log.hpp"
#include "base/new_file.hpp"
#include "base/stop.hpp"
#include "base/text.hpp"
#include "base/threads.hpp"
#include "experiment/variants.hpp"
#include "model/bundled.hpp"
#include "plugin/callback.hpp"
#include "replay/recorder.hpp"
#include "result/output.hpp"
#include "run/answer.hpp"
#include "run/cell_input.hpp"
#include "run/items.hpp"
#include "run/nonfinite.hpp"
#include "run/progress.hpp"
#include "run/runner.hpp"

namespace kvlab {
namespace {

struct ToRecord {
  const TaskSpec* task = nullptr;
  std::int64_t seed = 0;
  Item item;
};

std::vector<ToRecord> questions_of(const Experiment& e, const PluginCatalog& catalog, const Model& model,
                                   const RecordOptions& options) {
  if (e.sampling.on())
    throw Error(Errc::config, "got sampling for a recording, wanted none: it holds the most likely answers",
                e.file.string());
  std::vector<ToRecord> out;
  std::size_t turns = 0;
  for (const TaskSpec& task : e.tasks)
    for (const std::int64_t seed : task.seed ? std::vector<std::int64_t>{*task.seed} : e.seeds)
      for (Item& item : make_items(task, catalog, model.tokenizer, model.config, e, seed).items) {
        if (options.samples && item.sample >= *options.samples) continue;
        if (item.follows)
          ++turns;
        else
          out.push_back({&task, seed, std::move(item)});
      }
  if (turns > 0) log::warn(fmt::format("{} later turns are not recorded: their prompts are answers", turns));
  if (out.empty()) throw Error(Errc::config, "got no question to record, wanted one at least", e.file.string());
  return out;
}

// Tokens of the longest answer.
int most_answer(const Item& item, const Experiment& e) {
  return item.forced.empty() ? std::min(item.max_new, e.fidelity_tokens) : static_cast<int>(item.forced.size());
}

// The most bytes that the recording takes.
std::int64_t most_bytes(const RecordingHead& head, const std::vector<ToRecord>& questions, const Experiment& e) {
  std::int64_t bytes = 0;
  for (const ToRecord& q : questions)
    bytes += case_bytes(head, std::ssize(q.item.prompt), std::ssize(q.item.fed) + most_answer(q.item, e) - 1);
  return bytes;
}

std::string megabytes(std::int64_t bytes) { return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6); }

void want_room_for(std::int64_t bytes, const std::string& out) {
  const std::int64_t memory = free_host_bytes(), disk = free_bytes(folder_of(follow_links(out)));
  const bool few = memory < bytes;
  if (!few && (disk < 0 || disk >= bytes)) return;
  throw Error(Errc::config,
              fmt::format("got {} of free {}, wanted {}, which the recording may take: --samples records fewer",
                          megabytes(few ? memory : disk), few ? "memory" : "disk", megabytes(bytes)),
              out);
}

// Runs the question and its answer. The rows lie in the recorder then.
std::vector<int> answered(Engine& engine, const Item& item, int most) {
  Sequence full(engine);
  const Sequence::Asked asked[] = {{0, static_cast<std::uint32_t>(item.sample)}};
  want_room(full.begin(item, asked), engine);
  Answer answer(item, most);
  while (!answer.ended()) {
    if (!answer.tokens().empty()) want_room(full.feed(answer.tokens().back()), engine);
    answer.take(full.logits(), *engine.model().tokenizer);
  }
  full.close();
  return answer.tokens();
}

void check(const Experiment& e) {
  const auto refuse = [&](bool given, const char* what) {
    if (given) throw Error(Errc::config, what, e.file.string());
  };
  refuse(e.models.size() != 1, "got several models, wanted one: a recording is of one model");
  refuse(e.models.front().dtype == DType::f16, "got dtype fp16, wanted bf16 or f32: replay runs on the CPU");
  refuse(e.backend == "cuda", "got backend: cuda, wanted cpu: a recording is made on the CPU");
  refuse(e.prefill_chunk > 0, "got prefill_chunk, wanted none: a recording has whole prompts");
  refuse(!e.workloads.empty(), "got a workload, wanted none: questions are recorded one by one");
}

}  // namespace

int run_record(const Experiment& given, const PluginCatalog& catalog, const RecordOptions& options) {
  Experiment e = given;
  check(e);
  e.backend = "cpu";
  use_threads(e.threads);
  const std::string& out = options.output;
  results::check_output(out, results::OutputKind::recording);
  stop::watch();
  name_callback_at_end();
  const ModelSpec& spec = e.models.front();
  const auto checkpoint = open_model(spec.path, spec.adapter, e.folder);
  const auto outline = model_outline(*checkpoint, spec.dtype, spec.name());
  const std::vector<ToRecord> questions = questions_of(e, catalog, *outline, options);
  RecordingHead head{run_info(e, options.command), outline};
  const std::int64_t bytes = most_bytes(head, questions, e);
  if (!options.quiet)
    fmt::print("{} {} of the full cache: at most {} in {}\n", questions.size(),
               questions.size() == 1 ? "question" : "questions", megabytes(bytes), out);
  std::fflush(stdout);
  const auto held = results::open_output(out, options.command, results::OutputKind::recording);
  want_room_for(bytes, out);

  const auto model = load_model(*checkpoint, spec.dtype, spec.name());
  head.model = model;
  EngineOptions o;
  for (const ToRecord& q : questions) o.max_tokens = std::max(o.max_tokens, q.item.most_tokens());
  o.page_size = e.page_size;
  Engine engine(model, std::make_shared<RecordedCache>(), o);
  Recorder recorder;
  engine.observe(&recorder);
  Progress progress(static_cast<int>(questions.size()));
  try {
    write_recording(out, head, questions.size(), [&](std::size_t i, RecordedCase& c, RecordedLayers& layers) {
      const ToRecord& q = questions[i];
      const Item& item = q.item;
      progress.begin(fmt::format("{} sample {}", task_label(*q.task), item.sample));
      c.task = to_json(*q.task).dump(), c.seed = q.seed;
      c.sample = item.sample, c.question = item.question, c.shared = item.shared, c.max_new = item.max_new;
      c.sha256 = item.sha256, c.prompt = item.prompt, c.fed = item.fed;
      c.answer = answered(engine, item, most_answer(item, e));
      layers = recorder.take();
      progress.end("ok");
    });
  } catch (const NonFiniteStep& n) {
    throw located(
        model, [] { return std::make_shared<RecordedCache>(); }, o, n);
  } catch (const OutOfMemory& full) {
    throw NoRoom(full.what);
  }
  if (!options.quiet)
    fmt::print("recording: {}, {}\n", out, megabytes(static_cast<std::int64_t>(std::filesystem::file_size(out))));
  return 0;
}

}  // namespace kvlab
