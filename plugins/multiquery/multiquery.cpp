// One question asks about several keys: RULER's niah_multiquery (Hsieh et al. 2024). Score: the share of values in the
// answer. `keys` beyond the asked ones distract.
#include <kvlab/prompt.hpp>

namespace {

class Multiquery final : public kvlab::PromptTask {
 public:
  explicit Multiquery(const kvlab::Params& p)
      : PromptTask(p),
        haystack_(p.get<std::string>("haystack")),
        answer_(p.get<kvlab::Identifier>("answer")),
        queries_(p.get<int>("queries")),
        others_(p.get<int>("others")) {}

  std::string metric() const override { return "contains_all"; }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    kvlab::Random random = this->random(index, env);
    const int asked = env.questions(), count = asked * queries_ + others_;
    const auto keys = kvlab::identifiers(kvlab::Identifier::word, count, random);
    const auto values = kvlab::identifiers(answer_, count, random, " ");
    const std::string kinds = std::string(kvlab::name_of(answer_)) + "s";
    kvlab::Prompt prompt = open(env, "Some special magic " + kinds +
                                         " are hidden within the following text. Make sure to memorize it. I will quiz "
                                         "you about the " +
                                         kinds + " afterwards.");
    for (int q = 0; q < asked; ++q) {
      const auto slice = [&](const std::vector<std::string>& all) {
        const auto first = all.begin() + std::ptrdiff_t{q} * queries_;
        return std::vector<std::string>(first, first + queries_);
      };
      // "a", "a, and b", "a, b, and c"
      auto names = slice(keys);
      if (names.size() > 1) names.back() = "and " + names.back();
      const std::string about = kinds + " for " + kvlab::joined(names, ", ") + " mentioned in the provided text";
      prompt.ask("\nWhat are all the special magic " + about + "?", "The special magic " + about + " are",
                 slice(values), max_new());
    }
    std::vector<kvlab::Tokens> facts;
    std::vector<double> depths;
    int taken = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      facts.push_back(env.encode_next(haystack_.joint() + "One of the special magic " + kinds + " for " + keys[i] +
                                      " is: " + values[i] + "."));
      taken += kvlab::length(facts.back());
      depths.push_back(random.unit());
    }
    const int room = prompt.room(taken, std::to_string(count) + " facts");
    const kvlab::Haystack& text = haystack_.of(env);
    return prompt.finish(kvlab::hidden(text.take(random.below(text.pieces.size()), room, env), facts, depths));
  }

 private:
  kvlab::HaystackText haystack_;
  kvlab::Identifier answer_;
  int queries_, others_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<Multiquery>("multiquery", "several keys asked about at once", 4096, 64)
                 .param("queries", 4, 1, 1000, "keys in one question")
                 .param("others", 0, 0, 1000, "facts that no question is about")
                 .param("answer", kvlab::Identifier::number, "what a fact says: a number of 7 digits, words, or a UUID")
                 .param("haystack", std::string("bundled/niah/haystack.txt"),
                        "text file, which repeats when it is too short; or noise"))
