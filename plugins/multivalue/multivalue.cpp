// One question asks for several values of one key: RULER's niah_multivalue (Hsieh et al. 2024). Score: the share of
// values in the answer.
#include <kvlab/prompt.hpp>

namespace {

class Multivalue final : public kvlab::PromptTask {
 public:
  explicit Multivalue(const kvlab::Params& p)
      : PromptTask(p),
        haystack_(p.get<std::string>("haystack")),
        answer_(p.get<kvlab::Identifier>("answer")),
        values_(p.get<int>("values")) {}

  std::string metric() const override { return "contains_all"; }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    kvlab::Random random = this->random(index, env);
    const int asked = env.questions();
    const auto keys = kvlab::identifiers(kvlab::Identifier::word, asked, random);
    const auto values = kvlab::identifiers(answer_, asked * values_, random, " ");
    const std::string kinds = std::string(kvlab::name_of(answer_)) + "s";
    kvlab::Prompt prompt = open(env, "Some special magic " + kinds +
                                         " are hidden within the following text. Make sure to memorize it. I will quiz "
                                         "you about the " +
                                         kinds + " afterwards.");
    std::vector<kvlab::Tokens> facts;
    std::vector<double> depths;
    int taken = 0;
    for (std::size_t k = 0; k < keys.size(); ++k) {
      const std::string about = kinds + " for " + keys[k] + " mentioned in the provided text";
      const auto first = values.begin() + static_cast<std::ptrdiff_t>(k) * values_;
      const std::vector<std::string> mine(first, first + values_);
      prompt.ask("\nWhat are all the special magic " + about + "?", "The special magic " + about + " are", mine,
                 max_new());
      // Ascending depths put the values into the text in the references' order.
      std::vector<double> places;
      while (places.size() < mine.size()) places.push_back(random.unit());
      std::sort(places.begin(), places.end());
      depths.insert(depths.end(), places.begin(), places.end());
      for (const std::string& v : mine) {
        facts.push_back(env.encode_next(haystack_.joint() + "One of the special magic " + kinds + " for " + keys[k] +
                                        " is: " + v + "."));
        taken += kvlab::length(facts.back());
      }
    }
    const int room = prompt.room(taken, std::to_string(facts.size()) + " facts");
    const kvlab::Haystack& text = haystack_.of(env);
    return prompt.finish(kvlab::hidden(text.take(random.below(text.pieces.size()), room, env), facts, depths));
  }

 private:
  kvlab::HaystackText haystack_;
  kvlab::Identifier answer_;
  int values_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<Multivalue>("multivalue", "several values of one key, all of them asked for at once",
                                            4096, 64)
                 .param("values", 4, 1, 1000, "values of each key that is asked for")
                 .param("answer", kvlab::Identifier::number, "what a fact says: a number of 7 digits, words, or a UUID")
                 .param("haystack", std::string("bundled/niah/haystack.txt"),
                        "text file, which repeats when it is too short; or noise"))
