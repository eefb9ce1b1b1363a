// The questions of a task's samples as tokens: a prompt to prefill, a question to feed, an answer to force or to make.
#pragma once
#include <kvlab/metric.hpp>
#include <kvlab/task.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "experiment/experiment.hpp"
#include "model/config.hpp"
#include "model/tokenizer.hpp"

namespace kvlab {

struct Item {
  int sample = 0, question = 0;
  int draw = -1;            // of the answers that are drawn to the question; -1 = none is
  bool shared = false;      // the context's cache serves several questions of the sample
  bool follows = false;     // continues the item before it; `prompt` is then that of its conversation
  int before = 0;           // most tokens of the conversation between its prompt and this question
  std::vector<int> prompt;  // what the policy sees before it compresses
  std::vector<int> fed;     // fed one by one afterwards
  std::vector<int> forced;  // scored instead of generated
  int max_new = 0;
  std::vector<std::string> references;
  std::vector<std::string> stops;        // texts that end an answer, none empty (run/stops.hpp)
  std::shared_ptr<const Record> record;  // of the question; or null
  std::string sha256;                    // of prompt and fed tokens of the conversation so far, little-endian i32

  int most_tokens() const;  // of the conversation to this answer's end
  std::string id() const;   // the record's field "id"; empty without one
};

struct TaskItems {
  std::vector<Item> items;
  std::string metric;                          // its name
  std::optional<PluginUse> use;                // the metric's plugin; nothing where the task has its own
  std::shared_ptr<const Task> task;            // asked first: it may have a metric of its own; or null
  std::shared_ptr<const AnswerMetric> plugin;  // the metric; or null, where the task has its own
  int samples = 0;

  // 0 to 1; NaN without references.
  double score(const Item& item, const std::string& answer) const;
};
// Throws Errc::data or Errc::config for samples that cannot run on this model (too long, empty context, bad token).
TaskItems make_items(const TaskSpec& spec, const PluginCatalog& catalog, std::shared_ptr<const Tokenizer> tokenizer,
                     const ModelConfig& config, const Experiment& experiment, std::int64_t seed);

// Each conversation `draws` times in a row, with Item::draw from 0 on. Texts that the task forces stay as they are.
// Throws Errc::config for too many tokens.
TaskItems drawn(TaskItems items, int draws, const std::string& where);

}  // namespace kvlab
