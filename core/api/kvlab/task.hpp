// Tasks: prompts, references and how an answer is scored. A task's samples are deterministic in its parameters and seed
// and do not depend on the machine.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

struct TaskQuestion {
  std::vector<int> tokens;              // appended to the context: the question and whatever opens the answer
  std::vector<std::string> references;  // accepted answers
  int max_new_tokens = 0;
  std::vector<int> forced;  // instead of an answer: these tokens are fed one by one and their loss is measured
  bool follows = false;     // asked after the previous question's answer, which stays in the cache (a turn)
};

struct TaskSample {
  std::vector<int> context;  // never empty
  std::vector<TaskQuestion>
      questions;  // each starts from the cache as it was after the context, unless it follows the one before
};

// One record of a data file: field -> text, or several texts (a JSON array).
using Record = std::map<std::string, std::vector<std::string>, std::less<>>;

// What core offers a task.
class TaskEnv {
 public:
  virtual ~TaskEnv() = default;
  // No special tokens added; none parsed. encode: a text of its own; encode_next: text that follows other text, so that
  // tokens of pieces may be put one after the other (no vocabulary's leading space in between).
  virtual std::vector<int> encode(std::string_view text) const = 0;
  virtual std::vector<int> encode_next(std::string_view text) const = 0;
  virtual std::string decode(const std::vector<int>& tokens) const = 0;
  virtual std::vector<int> text_open() const = 0;  // what the model wants before any text: BOS or nothing
  virtual std::vector<int> bos() const = 0;        // the tokenizer's BOS, whether the model wants it or not; or nothing
  // The model's chat template around one user message: the tokens before and after it. A model without one: text_open()
  // and nothing.
  virtual std::vector<int> chat_open() const = 0;
  virtual std::vector<int> chat_close() const = 0;
  // Between an answer and the user's next message; the answer's own end belongs to it. Without a template: nothing.
  virtual std::vector<int> chat_next() const = 0;
  // Relative paths are the experiment file's; "bundled/NAME" lies in kvlab's data folder.
  virtual std::string read_text(const std::string& path) const = 0;
  virtual std::vector<Record> records(const std::string& path) const = 0;  // JSON lines, or a JSON array
  virtual std::uint64_t seed() const = 0;                                  // of this cell
  virtual int questions() const = 0;  // wanted per context, turns counted: the `questions` axis times `turns`
  virtual int turns() const = 0;      // the `turns` axis: so many of them follow each other
};

class Task {
 public:
  virtual ~Task() = default;
  virtual int samples(const TaskEnv& env) const = 0;
  virtual TaskSample sample(int index, const TaskEnv& env) const = 0;
  // The metric that scores an answer: kvlab's of this name (core/run/metrics.hpp), or the task's own.
  virtual std::string metric() const { return "contains"; }
  // By the task's own metric, 0 to 1; nothing = kvlab's. The references are a question's and are never empty.
  virtual std::optional<double> score(const std::string& /*answer*/,
                                      const std::vector<std::string>& /*references*/) const {
    return std::nullopt;
  }
};

}  // namespace kvlab
