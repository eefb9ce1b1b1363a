// A question about one of many documents, in the format of RULER's qa (Hsieh et al. 2024). Without `data` the documents
// are generated lives of invented people. With it they come from records {context, question, answers}, like flattened
// SQuAD. Score: 1 if the answer contains an accepted one.
#include <kvlab/prompt.hpp>

#include "people.hpp"

namespace {

using qa::Document;

class Qa final : public kvlab::PromptTask {
 public:
  explicit Qa(const kvlab::Params& p)
      : PromptTask(p), data_(p.get<std::string>("data")), most_(p.get<int>("documents")) {}

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    kvlab::Random random = this->random(index, env);
    const int asked = env.questions(), most = most_ > 0 ? most_ : std::max(asked, context() / 8);
    const std::vector<Document> pool =
        data_.empty() ? qa::people(std::min(most, qa::most_people), random) : read(index, env, random);
    if (asked > std::min<int>(most, static_cast<int>(pool.size())))
      throw kvlab::Error(kvlab::Errc::config, "got " + std::to_string(asked) +
                                                  " questions, wanted at most the documents: " +
                                                  std::to_string(std::min<std::size_t>(pool.size(), most)));
    const std::string rule =
        "Answer the question based on the given documents. Only give me the answer and do not output any other words.";
    kvlab::Prompt prompt = open(env, rule + "\n\nThe following are given documents.\n");
    for (int i = 0; i < asked; ++i) {
      const Document& d = pool[static_cast<std::size_t>(i)];
      prompt.ask("\n\n" + rule + "\n\nQuestion: " + d.question, "Answer:", d.answers, max_new());
    }
    std::vector<kvlab::Tokens> heads, texts;
    int taken = 0;
    for (const Document& d : pool) {
      const auto n = static_cast<int>(texts.size());
      if (n == most) break;
      kvlab::Tokens head = env.encode_next((n > 0 ? "\n\nDocument " : "\nDocument ") + std::to_string(n + 1) + ":"),
                    text = env.encode_next("\n" + d.text);
      const int more = kvlab::length(head) + kvlab::length(text);
      if (n >= asked && taken + more > prompt.left()) break;
      taken += more;
      heads.push_back(std::move(head));
      texts.push_back(std::move(text));
    }
    prompt.room(taken, std::to_string(texts.size()) + " documents", 0);
    random.shuffle(texts);
    kvlab::Tokens body;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      kvlab::append(body, heads[i]);
      kvlab::append(body, texts[i]);
    }
    return prompt.finish(body);
  }

 private:
  // One document per different context. Those that sample `index` asks about come first.
  std::vector<Document> read(int index, const kvlab::TaskEnv& env, kvlab::Random& random) const {
    if (records_.empty()) records_ = env.records(data_);
    std::vector<std::size_t> order(records_.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    kvlab::Random(env.seed(), ~0ull).shuffle(order);  // the same order for all samples, so each asks about others
    std::rotate(order.begin(),
                order.begin() + std::ptrdiff_t{index} * env.questions() % static_cast<std::ptrdiff_t>(order.size()),
                order.end());
    std::vector<Document> out;
    for (const std::size_t r : order) {
      const auto field = [&](const char* name) {
        const auto it = records_[r].find(name);
        const std::string where = data_ + ": record " + std::to_string(r + 1);
        if (it == records_[r].end() || it->second.empty())
          throw kvlab::Error(kvlab::Errc::data,
                             "got a record without '" + std::string(name) + "', wanted context, question and answers",
                             where);
        if (const auto part = records_[r].lower_bound(it->first + ".");
            part != records_[r].end() && part->first.rfind(it->first + ".", 0) == 0)
          throw kvlab::Error(kvlab::Errc::data,
                             "got an object or nested lists in '" + std::string(name) + "', wanted text", where);
        for (const std::string& text : it->second)
          if (text.find_first_not_of(" \t\r\n") == std::string::npos)
            throw kvlab::Error(kvlab::Errc::data, "got an empty text in '" + std::string(name) + "', wanted words",
                               where);
        return it->second;
      };
      const std::string text = field("context").front();
      if (std::none_of(out.begin(), out.end(), [&](const Document& d) { return d.text == text; }))
        out.push_back({text, field("question").front(), field("answers")});
      if (static_cast<int>(out.size()) > std::max(context() / 8, env.questions())) break;
    }
    if (static_cast<int>(out.size()) > env.questions()) {
      std::vector<Document> others(out.begin() + env.questions(), out.end());
      random.shuffle(others);
      std::move(others.begin(), others.end(), out.begin() + env.questions());
    }
    return out;
  }

  std::string data_;
  int most_;
  mutable std::vector<kvlab::Record> records_;  // read once
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<Qa>("qa", "a question about one of many documents", 4096, 32)
                 .param("documents", 0, 0, 100000, "documents; 0 = as many as fit, fewer are preceded by noise")
                 .param("data", std::string(),
                        "JSON records with context, question and answers; empty = generated lives"))
