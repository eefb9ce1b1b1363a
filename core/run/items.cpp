#include "run/items.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "base/log.hpp"
#include "base/sha256.hpp"
#include "base/stop.hpp"
#include "base/text.hpp"
#include "run/stops.hpp"
#include "run/task_env.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t most_prompt_tokens = std::int64_t{1} << 27;  // half a GiB of token ids

// Runs body(). An error of the task gets `where` in front of its own place.
template <class Body>
auto placed(const std::string& where, Body body) {
  try {
    return body();
  } catch (const Error& e) {
    throw Error(e.code(), e.message(), e.where().empty() ? where : where + ": " + e.where());
  }
}

// Generated prompts have exactly as many tokens as their parameter `context` says (api/kvlab/prompt.hpp). A number that
// the model cannot take is refused before the first prompt: making that one might take for ever.
void check_context(const TaskSpec& spec, const ModelConfig& config) {
  const auto& values = spec.task.params.values();
  const auto context = values.find("context");
  if (context == values.end()) return;
  const auto* tokens = std::get_if<std::int64_t>(&context->second);
  if (tokens && *tokens > config.context)
    throw Error(Errc::config,
                "got context: " + std::to_string(*tokens) + ", wanted at most " + std::to_string(config.context) +
                    ", the model's context",
                spec.where);
}

// Every prompt stays in memory until the run ends. samples: those of the task. done, tokens: made so far. After a few
// samples their mean length stands for the length of all.
void check_amount(int samples, int done, std::int64_t tokens, const std::string& where) {
  constexpr int enough = 16;
  const double mean = static_cast<double>(tokens) / done;
  if (mean * (done < enough ? done : samples) > static_cast<double>(most_prompt_tokens))
    throw Error(Errc::config,
                "got " + std::to_string(samples) + " samples of about " + std::to_string(std::llround(mean)) +
                    " tokens, wanted at most " + std::to_string(most_prompt_tokens) +
                    " tokens in all: fewer samples, questions or tokens of context",
                where);
}

// The task's data file, where it has one: ": FILE".
std::string data_of(const TaskSpec& spec) {
  const auto& values = spec.task.params.values();
  const auto data = values.find("data");
  const auto* file = data == values.end() ? nullptr : std::get_if<std::string>(&data->second);
  return file && !file->empty() ? ": " + *file : "";
}

const Record& record_of(const Item& item) {
  static const Record none;
  return item.record ? *item.record : none;
}

std::int64_t fed_tokens(const Item& item) { return static_cast<std::int64_t>(item.prompt.size() + item.fed.size()); }

// Every answer would match an empty reference.
void check_references(const std::vector<std::string>& references, const std::string& where) {
  for (const std::string& r : references)
    if (r.find_first_not_of(" \t\r\n") == std::string::npos)
      throw Error(Errc::data, "got an empty reference, wanted text that only a right answer has", where);
}

// An empty one would end every answer before its first token.
std::vector<std::string> stops_of(const Item& item, const std::string& where) {
  const auto found = record_of(item).find(stop_field);
  if (found == record_of(item).end()) return {};
  for (const std::string& stop : found->second)
    if (stop.empty()) throw Error(Errc::data, "got an empty stop text, wanted text that ends an answer", where);
  return found->second;
}

Error unknown_metric(const std::string& metric, const PluginCatalog& catalog) {
  const auto known = catalog.names(Role::metric);
  return Error(Errc::config, "got metric '" + metric + "', wanted the task's score() or one of: " + join(known) +
                                 did_you_mean(metric, known));
}

// The metric by which answers are scored. A task with one of its own needs no plugin.
void choose_metric(TaskItems& out, std::shared_ptr<const Task> task, const TaskSpec& spec,
                   const PluginCatalog& catalog) {
  const auto use = spec.names_metric ? spec.metric : metric_named(task->metric(), catalog);
  out.metric = use ? use->name : task->metric();
  out.use = use;
  if (use) out.plugin = create<AnswerMetric>(*catalog.find(Role::metric, use->name), use->params);
  if (!spec.names_metric) out.task = std::move(task);
}

// Refuses an item with references that nothing can score.
void check_metric(const TaskItems& out, const Item& item, const PluginCatalog& catalog) {
  if (item.references.empty()) return;
  if (out.task && !out.plugin && !out.task->score("", item.references)) throw unknown_metric(out.metric, catalog);
  if (out.plugin) out.plugin->check(item.references, record_of(item));
}

}  // namespace

int Item::most_tokens() const {
  const std::size_t answer = forced.empty() ? static_cast<std::size_t>(max_new) : forced.size();
  return static_cast<int>(prompt.size() + fed.size() + answer) + before;
}

std::string Item::id() const {
  const auto found = record_of(*this).find("id");
  return found == record_of(*this).end() || found->second.empty() ? "" : found->second.front();
}

double TaskItems::score(const Item& item, const std::string& answer) const {
  if (item.references.empty()) return std::numeric_limits<double>::quiet_NaN();
  if (task)
    if (const auto own = task->score(answer, item.references)) return *own;
  if (!plugin)
    throw Error(Errc::plugin, "got no score by the task's own metric '" + metric + "', wanted one of every answer");
  return plugin->score(answer, item.references, record_of(item));
}

TaskItems make_items(const TaskSpec& spec, const PluginCatalog& catalog, std::shared_ptr<const Tokenizer> tokenizer,
                     const ModelConfig& config, const Experiment& experiment, std::int64_t seed) {
  const PluginInfo* info = catalog.find(Role::task, spec.task.name);
  if (!info) throw Error(Errc::plugin, "got unknown task '" + spec.task.name + "'", spec.where);
  if (!tokenizer) throw Error(Errc::tokenizer, "got a model without a tokenizer, wanted one: tasks are made of text");
  check_context(spec, config);
  const std::shared_ptr<const Task> task = create<Task>(*info, spec.task.params);
  const ModelTaskEnv env(tokenizer, experiment.folder, static_cast<std::uint64_t>(spec.seed.value_or(seed)),
                         spec.questions, spec.turns);
  TaskItems out;
  out.samples = placed(spec.where, [&] { return task->samples(env); });
  placed(spec.where, [&] { choose_metric(out, task, spec, catalog); });  // after samples(): a data file may name it
  if (out.samples <= 0) throw Error(Errc::data, "got a task without samples, wanted at least one", spec.where);
  std::int64_t prompt_tokens = 0;  // of all items so far
  const auto start = std::chrono::steady_clock::now();
  bool noted = false;
  for (int i = 0; i < out.samples; ++i) {
    stop::check();
    if (!noted && std::chrono::steady_clock::now() - start > std::chrono::seconds(2)) {
      noted = true;
      log::info("making " + std::to_string(out.samples) + " prompts of " + spec.name);
    }
    const std::string where = spec.where + ": sample " + std::to_string(i);
    const TaskSample sample = placed(where, [&] { return task->sample(i, env); });
    if (sample.questions.empty()) throw Error(Errc::data, "got a sample without questions", where);
    std::ptrdiff_t conversations = 0;
    for (const TaskQuestion& q : sample.questions) {
      conversations += !q.follows;
      if (!q.follows) continue;
      if (conversations == 0) throw Error(Errc::data, "got a first question that follows another one", where);
      if (q.tokens.empty() || !q.forced.empty())
        throw Error(Errc::data, "got a later turn without a question, or with forced tokens", where);
    }
    if (spec.turns > 1 && conversations == static_cast<std::ptrdiff_t>(sample.questions.size()))
      throw Error(Errc::config,
                  "got turns: " + std::to_string(spec.turns) + ", wanted 1: no question of '" + spec.task.name +
                      "' follows another one here",
                  where);
    std::string bytes;  // of the conversation
    for (std::size_t q = 0; q < sample.questions.size(); ++q) {
      const TaskQuestion& question = sample.questions[q];
      Item item;
      item.sample = i;
      item.question = static_cast<int>(q);
      item.prompt = sample.context;
      item.forced = question.forced;
      item.max_new = question.max_new_tokens;
      item.references = question.references;
      item.record = question.record;
      item.stops = stops_of(item, where);
      item.follows = question.follows;
      if (item.follows) {
        const Item& last = out.items.back();
        item.prompt = last.prompt;
        item.before = last.most_tokens() - static_cast<int>(last.prompt.size());
        item.fed = question.tokens;
      } else if (spec.question == Question::prompt) {
        item.prompt.insert(item.prompt.end(), question.tokens.begin(), question.tokens.end());
      } else {
        item.fed = question.tokens;
        item.shared = conversations > 1;
      }
      check_references(item.references, where);
      placed(where, [&] { check_metric(out, item, catalog); });
      if (item.prompt.empty()) throw Error(Errc::data, "got an empty prompt, wanted at least one token", where);
      if (item.forced.empty() && item.max_new < 1)
        throw Error(Errc::data, "got a question that asks for no token, wanted max_new_tokens of at least 1", where);
      for (const std::vector<int>* tokens : {&item.prompt, &item.fed, &item.forced})
        for (int t : *tokens)
          if (t < 0 || t >= config.vocab)
            throw Error(Errc::data,
                        "got token " + std::to_string(t) + ", wanted 0 to " + std::to_string(config.vocab - 1), where);
      const int most = item.most_tokens();
      if (most > config.context)
        throw Error(Errc::config,
                    "got " + std::to_string(most) + " tokens of prompt and answer, wanted at most " +
                        std::to_string(config.context) + ", the model's context",
                    spec.where + data_of(spec) + ": sample " + std::to_string(i) +
                        (item.id().empty() ? "" : ", id " + item.id()));
      prompt_tokens += fed_tokens(item);
      check_amount(out.samples, i + 1, prompt_tokens, spec.where);
      const auto add = [&](const std::vector<int>& tokens) {
        for (int t : tokens)
          for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(t >> shift));
      };
      if (!item.follows) {
        bytes.clear();
        add(item.prompt);
      }
      add(item.fed);
      item.sha256 = sha256_hex(bytes);
      out.items.push_back(std::move(item));
    }
  }
  return out;
}

TaskItems drawn(TaskItems given, int draws, const std::string& where) {
  const std::vector<Item> all = std::move(given.items);
  given.items.clear();
  std::int64_t tokens = 0;
  for (std::size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    for (end = begin + 1; end < all.size() && all[end].follows; ++end) {
    }
    const bool forced = !all[begin].forced.empty();
    for (int draw = 0; draw < (forced ? 1 : draws); ++draw)
      for (std::size_t i = begin; i < end; ++i) {
        tokens += fed_tokens(all[i]);
        if (tokens > most_prompt_tokens)
          throw Error(Errc::config,
                      "got " + std::to_string(draws) + " draws for " + std::to_string(all.size()) +
                          " questions, wanted at most " + std::to_string(most_prompt_tokens) +
                          " tokens of prompts in all: fewer draws, samples or tokens of context",
                      where);
        given.items.push_back(all[i]);
        if (!forced) given.items.back().draw = draw;
      }
  }
  return given;
}

}  // namespace kvlab
