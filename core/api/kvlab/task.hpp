// Tasks: prompts, references and how an answer is scored. A task's samples are deterministic in its parameters and seed
// and do not depend on the machine.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

// One record of a data file: field -> text, or several texts (a JSON array).
using Record = std::map<std::string, std::vector<std::string>, std::less<>>;

struct TaskQuestion {
  std::vector<int> tokens;              // appended to the context: the question and whatever opens the answer
  std::vector<std::string> references;  // accepted answers
  int max_new_tokens = 0;
  std::vector<int> forced;  // instead of an answer: these tokens are fed one by one and their loss is measured
  bool follows = false;     // asked after the previous question's answer, which stays in the cache (a turn)
  // The data of the question, for metrics that read more than references; or null.
  std::shared_ptr<const Record> record;
};

struct TaskSample {
  std::vector<int> context;  // never empty
  std::vector<TaskQuestion>
      questions;  // each starts from the cache as it was after the context, unless it follows the one before
};

// What core offers a task.
class TaskEnv {
 public:
  virtual ~TaskEnv() = default;
  // Neither adds or parses special tokens. encode takes a text of its own. encode_next takes text that follows other
  // text: the tokens of pieces can be concatenated, and no vocabulary puts its leading space between them.
  virtual std::vector<int> encode(std::string_view text) const = 0;
  virtual std::vector<int> encode_next(std::string_view text) const = 0;
  virtual std::string decode(const std::vector<int>& tokens) const = 0;
  virtual std::vector<int> text_open() const = 0;  // tokens before any text: BOS if the model wants it, else nothing
  virtual std::vector<int> bos() const = 0;        // the tokenizer's BOS, whether the model wants it or not; or nothing
  // The tokens of the model's chat template before and after one user message. Without a template: text_open(), and
  // nothing.
  virtual std::vector<int> chat_open() const = 0;
  virtual std::vector<int> chat_close() const = 0;
  // The tokens between an answer and the user's next message, the answer's end included. Without a template: nothing.
  virtual std::vector<int> chat_next() const = 0;
  // Relative paths start at the experiment file's folder; "bundled/NAME" lies in kvlab's data folder.
  virtual std::string read_text(const std::string& path) const = 0;
  virtual std::vector<Record> records(const std::string& path) const = 0;  // JSON lines, or a JSON array
  virtual std::uint64_t seed() const = 0;                                  // of this cell
  virtual int questions() const = 0;  // wanted per context, turns counted: the `questions` axis times `turns`
  virtual int turns() const = 0;      // questions of one conversation: the `turns` axis
};

class Task {
 public:
  virtual ~Task() = default;
  virtual int samples(const TaskEnv& env) const = 0;
  virtual TaskSample sample(int index, const TaskEnv& env) const = 0;
  // The metric that scores an answer: the plugin of this name (metric.hpp), or the task's own. The experiment may name
  // another one.
  virtual std::string metric() const { return "contains"; }
  // The score by the task's own metric, 0 to 1; nothing = the plugin decides. references: the question's, never
  // empty.
  virtual std::optional<double> score(const std::string& /*answer*/,
                                      const std::vector<std::string>& /*references*/) const {
    return std::nullopt;
  }
};

}  // namespace kvlab
