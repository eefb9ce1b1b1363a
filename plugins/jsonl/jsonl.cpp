// Questions from a data file: one JSON object per line (or an array of them), like LongBench and most data sets.
#include <kvlab/plugin.hpp>

#include <memory>

#include "template.hpp"

namespace {

using Tokens = std::vector<int>;

enum class Truncate { none, middle };

}  // namespace

template <>
struct kvlab::Choices<Truncate> {
  static constexpr std::pair<Truncate, const char*> all[] = {{Truncate::none, "none"}, {Truncate::middle, "middle"}};
};

namespace {

void append(Tokens& to, const Tokens& more) { to.insert(to.end(), more.begin(), more.end()); }

class Jsonl final : public kvlab::Task {
 public:
  explicit Jsonl(const kvlab::Params& p)
      : data_(p.get<std::string>("data")),
        references_(p.get<std::string>("references")),
        prompt_(p.get<std::string>("prompt"), "prompt"),
        question_(p.get<std::string>("question_text"), "question_text"),
        opening_(p.get<std::string>("answer_opening"), "answer_opening"),
        max_new_(p.get<int>("max_new_tokens")),
        limit_(p.get<int>("limit")),
        max_context_(p.get<int>("max_context")),
        truncate_(p.get<Truncate>("truncate")),
        shuffle_(p.get<bool>("shuffle")),
        chat_(p.get<bool>("chat")) {
    if (data_.empty()) throw kvlab::Error(kvlab::Errc::config, "got no data, wanted the path of a JSON lines file");
    if (prompt_.empty()) throw kvlab::Error(kvlab::Errc::config, "got an empty prompt, wanted a template");
    if (truncate_ == Truncate::middle && max_context_ == 0)
      throw kvlab::Error(kvlab::Errc::config, "got truncate: middle without max_context, wanted the tokens to cut to");
  }

  int samples(const kvlab::TaskEnv& env) const override { return static_cast<int>(groups(env).size()); }
  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override;
  std::string metric() const override { return "f1"; }

 private:
  struct Group {
    std::string prompt;
    std::vector<std::size_t> records;  // one per question
  };
  std::string place(std::size_t record) const { return data_ + ": record " + std::to_string(record + 1); }
  const std::vector<Group>& groups(const kvlab::TaskEnv& env) const;
  Tokens fitted(Tokens prompt, std::size_t others, const Group& group) const;

  std::string data_, references_;
  jsonl::Template prompt_, question_, opening_;
  int max_new_, limit_, max_context_;
  Truncate truncate_;
  bool shuffle_, chat_;
  mutable std::vector<std::shared_ptr<const kvlab::Record>> records_;  // read once
  mutable std::vector<Group> groups_;
};

// With one question per context each record is a group. Else up to so many neighbours with one prompt are.
const std::vector<Jsonl::Group>& Jsonl::groups(const kvlab::TaskEnv& env) const {
  if (!groups_.empty()) return groups_;
  for (kvlab::Record& record : env.records(data_))
    records_.push_back(std::make_shared<const kvlab::Record>(std::move(record)));
  for (std::size_t i = 0; i < records_.size(); ++i) {
    std::string prompt = prompt_.render(*records_[i], place(i));
    if (groups_.empty() || static_cast<int>(groups_.back().records.size()) == env.questions() ||
        groups_.back().prompt != prompt)
      groups_.push_back({std::move(prompt), {}});
    groups_.back().records.push_back(i);
  }
  if (shuffle_) jsonl::shuffle(groups_, env.seed());
  if (limit_ > 0 && static_cast<std::size_t>(limit_) < groups_.size()) groups_.resize(static_cast<std::size_t>(limit_));
  return groups_;
}

// Cuts the prompt in its middle, so that prompt and `others` tokens fit max_context.
Tokens Jsonl::fitted(Tokens prompt, std::size_t others, const Group& group) const {
  const auto limit = static_cast<std::size_t>(max_context_);
  if (limit == 0 || prompt.size() + others <= limit) return prompt;
  const std::string where = place(group.records.front());
  if (truncate_ == Truncate::none)
    throw kvlab::Error(kvlab::Errc::config,
                       "got " + std::to_string(prompt.size() + others) +
                           " tokens of template, prompt and longest answer, wanted at most max_context: " +
                           std::to_string(limit) + " (truncate: middle cuts the prompt)",
                       where);
  if (others >= limit)
    throw kvlab::Error(kvlab::Errc::config,
                       "got max_context: " + std::to_string(limit) + ", wanted more than the " +
                           std::to_string(others) + " tokens of template, question and longest answer",
                       where);
  const std::size_t room = limit - others;
  const auto tail = static_cast<std::ptrdiff_t>(room / 2), head = static_cast<std::ptrdiff_t>(room) - tail;
  prompt.erase(prompt.begin() + head, prompt.end() - tail);
  return prompt;
}

kvlab::TaskSample Jsonl::sample(int index, const kvlab::TaskEnv& env) const {
  const Group& group = groups(env)[static_cast<std::size_t>(index)];
  kvlab::TaskSample out;
  out.context = chat_ ? env.chat_open() : env.text_open();
  const Tokens close = chat_ ? env.chat_close() : Tokens{};
  std::size_t longest = 0, conversation = 0;
  for (const std::size_t i : group.records) {
    const kvlab::Record& record = *records_[i];
    kvlab::TaskQuestion q;
    q.record = records_[i];
    q.follows = out.questions.size() % static_cast<std::size_t>(env.turns()) != 0;
    if (q.follows && chat_) q.tokens = env.chat_next();
    append(q.tokens, env.encode_next(question_.render(record, place(i))));
    append(q.tokens, close);
    append(q.tokens, env.encode_next(opening_.render(record, place(i))));
    q.references = jsonl::field(record, references_, place(i));
    if (jsonl::has_parts(record, references_))
      throw kvlab::Error(kvlab::Errc::data,
                         "got an object or nested lists in '" + references_ + "', wanted texts: name a part, like '" +
                             record.lower_bound(references_ + ".")->first + "'",
                         place(i));
    if (q.references.empty())
      throw kvlab::Error(kvlab::Errc::data, "got no texts in '" + references_ + "', wanted at least one reference",
                         place(i));
    if (std::any_of(q.references.begin(), q.references.end(), jsonl::blank))
      throw kvlab::Error(
          kvlab::Errc::data,
          "got an empty text in '" + references_ + "', wanted a reference: every answer contains an empty one",
          place(i));
    q.max_new_tokens = max_new_;
    conversation = (q.follows ? conversation : 0) + q.tokens.size() + static_cast<std::size_t>(max_new_);
    longest = std::max(longest, conversation);
    out.questions.push_back(std::move(q));
  }
  const std::size_t others = out.context.size() + longest;
  append(out.context,
         fitted(out.context.empty() ? env.encode(group.prompt) : env.encode_next(group.prompt), others, group));
  return out;
}

}  // namespace

KVLAB_PLUGIN(kvlab::task<Jsonl>("jsonl", "questions out of a file of JSON records, with a prompt template")
                 .param("data", std::string(), "JSON lines, or a JSON array")
                 .param("prompt", std::string("{context}\n"),
                        "text before the question; {field} is replaced, {{ and }} are braces")
                 .param("question_text", std::string("\n{input}\n"), "the part that is the question; may be empty")
                 .param("answer_opening", std::string(), "first words of the model's answer")
                 .param("references", std::string("answers"),
                        "field with the accepted answers; answers.text: a part of an object")
                 .param("max_new_tokens", 64, 1, 100000, "longest answer")
                 .param("limit", 0, 0, kvlab::any, "samples; 0 = all")
                 .param("shuffle", false, "in an order that follows from the seed, before the limit")
                 .param("chat", true, "put the model's chat template around the prompt")
                 .param("max_context", 0, 0, kvlab::any,
                        "most tokens of template, prompt and longest answer; 0 = no limit")
                 .param("truncate", Truncate::none,
                        "what to do with a longer prompt: refuse it, or cut out its middle"))
