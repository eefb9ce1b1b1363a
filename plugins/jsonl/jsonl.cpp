// Questions from a data file: one JSON object per line (or an array of them), like LongBench and most data sets. A file
// of datasets/convert.py begins with a header: what its set prescribes where the experiment says nothing.
#include <kvlab/plugin.hpp>

#include <map>
#include <memory>
#include <optional>

#include "header.hpp"
#include "template.hpp"

namespace {

using Tokens = std::vector<int>;

enum class Truncate { automatic, none, middle };
enum class Chat { automatic, yes, no };

}  // namespace

template <>
struct kvlab::Choices<Truncate> {
  static constexpr std::pair<Truncate, const char*> all[] = {
      {Truncate::automatic, "auto"}, {Truncate::none, "none"}, {Truncate::middle, "middle"}};
};
template <>
struct kvlab::Choices<Chat> {
  static constexpr std::pair<Chat, const char*> all[] = {
      {Chat::automatic, "auto"}, {Chat::yes, "true"}, {Chat::no, "false"}};
};

namespace {

constexpr const char* usual_question = "\n{input}\n";

void append(Tokens& to, const Tokens& more) { to.insert(to.end(), more.begin(), more.end()); }

// What an entry leaves open comes from the file's header, else it is the usual. A template is one: an entry with a
// prompt of its own brings all three parts.
struct Settings {
  Settings(const kvlab::Params& p, const jsonl::Header& header)
      : prompt(template_of(p, header, "prompt", header.prompt, "", "{context}\n")),
        question(template_of(p, header, "question_text", header.question_text, usual_question, usual_question)),
        opening(template_of(p, header, "answer_opening", header.answer_opening, "", "")),
        references(text(p, "references", header.references, "answers")),
        metric(header.there ? header.metric : "f1"),
        max_new(p.get<int>("max_new_tokens")),
        cut(p.get<Truncate>("truncate") == Truncate::middle),
        chat(p.get<Chat>("chat") != Chat::no) {
    if (max_new == 0) max_new = header.there ? header.max_new_tokens : 64;
    if (p.get<Truncate>("truncate") == Truncate::automatic) cut = header.truncate == "middle";
    if (p.get<Chat>("chat") == Chat::automatic) chat = header.chat;
  }

  jsonl::Template prompt, question, opening;
  std::string references, metric;
  int max_new;
  bool cut, chat;  // cut: a prompt that is too long loses its middle

 private:
  // given, where it is not the parameter's default; else the header's, else the usual
  static jsonl::Template template_of(const kvlab::Params& p, const jsonl::Header& header, const char* name,
                                     const std::string& headers, const std::string& unset, const std::string& usual) {
    const auto given = p.get<std::string>(name);
    const bool whole = !header.there || !p.get<std::string>("prompt").empty();
    if (given != unset) return {given, name};
    return {whole ? usual : headers, name};
  }
  static std::string text(const kvlab::Params& p, const char* name, const std::string& headers, const char* usual) {
    const auto given = p.get<std::string>(name);
    return !given.empty() ? given : !headers.empty() ? headers : usual;
  }
};

class Jsonl final : public kvlab::Task {
 public:
  explicit Jsonl(const kvlab::Params& p)
      : given_(p),
        data_(p.get<std::string>("data")),
        limit_(p.get<int>("limit")),
        max_context_(p.get<int>("max_context")),
        shuffle_(p.get<bool>("shuffle")),
        stops_(p.get<bool>("stops")) {
    if (data_.empty()) throw kvlab::Error(kvlab::Errc::config, "got no data, wanted the path of a JSON lines file");
    if (p.get<Truncate>("truncate") == Truncate::middle && max_context_ == 0)
      throw kvlab::Error(kvlab::Errc::config, "got truncate: middle without max_context, wanted the tokens to cut to");
    settings_.emplace(p, jsonl::Header());
  }

  int samples(const kvlab::TaskEnv& env) const override { return static_cast<int>(groups(env).size()); }
  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override;
  std::string metric() const override { return settings_->metric; }  // the header's is known after samples()

 private:
  struct Group {
    std::string prompt;
    std::vector<std::size_t> records;  // one per question
  };
  std::string place(std::size_t record) const { return data_ + ": record " + std::to_string(record + 1); }
  void check_ids(const std::vector<kvlab::Record>& records) const;
  const std::vector<Group>& groups(const kvlab::TaskEnv& env) const;
  Tokens fitted(Tokens prompt, std::size_t others, const Group& group) const;

  kvlab::Params given_;
  std::string data_;
  int limit_, max_context_;
  bool shuffle_, stops_;
  mutable std::optional<Settings> settings_;
  mutable std::vector<std::shared_ptr<const kvlab::Record>> records_;  // read once
  mutable std::vector<Group> groups_;
};

// A result names its questions by the records' ids.
void Jsonl::check_ids(const std::vector<kvlab::Record>& records) const {
  std::map<std::string, std::size_t> seen;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const auto id = records[i].find("id");
    if (id == records[i].end() || id->second.size() != 1) continue;
    if (const auto [earlier, is_new] = seen.emplace(id->second.front(), i); !is_new)
      throw kvlab::Error(kvlab::Errc::data,
                         "got the id '" + id->second.front() + "' of record " + std::to_string(earlier->second + 1) +
                             ", wanted an id of its own",
                         place(i));
  }
}

// With one question per context each record is a group. Else up to so many neighbours with one prompt are.
const std::vector<Jsonl::Group>& Jsonl::groups(const kvlab::TaskEnv& env) const {
  if (!groups_.empty()) return groups_;
  std::vector<kvlab::Record> records = env.records(data_);
  const jsonl::Header header = jsonl::take_header(records, data_);
  settings_.emplace(given_, header);
  check_ids(records);
  for (kvlab::Record& record : records) {
    if (!stops_)
      record.erase(jsonl::stop_field);
    else if (!header.stops.empty())
      record.emplace(jsonl::stop_field, header.stops);  // unless the record has its own
    records_.push_back(std::make_shared<const kvlab::Record>(std::move(record)));
  }
  for (std::size_t i = 0; i < records_.size(); ++i) {
    std::string prompt = settings_->prompt.render(*records_[i], place(i));
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
  if (!settings_->cut)
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
  const Settings& set = *settings_;
  kvlab::TaskSample out;
  out.context = set.chat ? env.chat_open() : env.text_open();
  const Tokens close = set.chat ? env.chat_close() : Tokens{};
  std::size_t longest = 0, conversation = 0;
  for (const std::size_t i : group.records) {
    const kvlab::Record& record = *records_[i];
    kvlab::TaskQuestion q;
    q.record = records_[i];
    q.follows = out.questions.size() % static_cast<std::size_t>(env.turns()) != 0;
    if (q.follows && set.chat) q.tokens = env.chat_next();
    append(q.tokens, env.encode_next(set.question.render(record, place(i))));
    append(q.tokens, close);
    append(q.tokens, env.encode_next(set.opening.render(record, place(i))));
    q.references = jsonl::field(record, set.references, place(i));
    if (jsonl::has_parts(record, set.references))
      throw kvlab::Error(kvlab::Errc::data,
                         "got an object or nested lists in '" + set.references +
                             "', wanted texts: name a part, like '" + record.lower_bound(set.references + ".")->first +
                             "'",
                         place(i));
    if (q.references.empty())
      throw kvlab::Error(kvlab::Errc::data, "got no texts in '" + set.references + "', wanted at least one reference",
                         place(i));
    if (std::any_of(q.references.begin(), q.references.end(), jsonl::blank))
      throw kvlab::Error(
          kvlab::Errc::data,
          "got an empty text in '" + set.references + "', wanted a reference: every answer contains an empty one",
          place(i));
    q.max_new_tokens = set.max_new;
    conversation = (q.follows ? conversation : 0) + q.tokens.size() + static_cast<std::size_t>(set.max_new);
    longest = std::max(longest, conversation);
    out.questions.push_back(std::move(q));
  }
  const std::size_t others = out.context.size() + longest;
  append(out.context,
         fitted(out.context.empty() ? env.encode(group.prompt) : env.encode_next(group.prompt), others, group));
  return out;
}

}  // namespace

KVLAB_PLUGIN(
    kvlab::task<Jsonl>("jsonl", "questions out of a file of JSON records, with a prompt template")
        .param("data", std::string(), "JSON lines, or a JSON array")
        .param("prompt", std::string(),
               "text before the question; {field} is replaced, {{ and }} are braces; empty: the file's, else {context} "
               "and a line end")
        .param("question_text", std::string(usual_question),
               "the part that is the question; may be empty; a file with a header has its own")
        .param("answer_opening", std::string(), "first words of the model's answer")
        .param("references", std::string(),
               "field with the accepted answers; answers.text: a part of an object; empty: the file's, else answers")
        .param("max_new_tokens", 0, 0, 100000, "longest answer; 0 = the file's, else 64")
        .param("limit", 0, 0, kvlab::any, "samples; 0 = all")
        .param("shuffle", false, "in an order that follows from the seed, before the limit")
        .param("chat", Chat::automatic,
               "put the model's chat template around the prompt; auto: as the file says, else true")
        .param("stops", true, "an answer ends at the stop texts of the file or the record; false: they do not count")
        .param("max_context", 0, 0, kvlab::any, "most tokens of template, prompt and longest answer; 0 = no limit")
        .param("truncate", Truncate::automatic,
               "what to do with a longer prompt: refuse it, or cut out its middle; auto: as the file says, else none"))
