// The question asks for one fact among others like it: RULER's niah_multikey (Hsieh et al. 2024). The defaults are
// niah_multikey_1. `keys: 0` fills the context with facts alone, as niah_multikey_2; with `key: uuid, answer: uuid`
// besides it is niah_multikey_3.
#include <kvlab/prompt.hpp>

namespace {

using kvlab::Tokens;

class Multikey final : public kvlab::PromptTask {
 public:
  explicit Multikey(const kvlab::Params& p)
      : PromptTask(p),
        haystack_(p.get<std::string>("haystack")),
        key_(p.get<kvlab::Identifier>("key")),
        answer_(p.get<kvlab::Identifier>("answer")),
        keys_(p.get<int>("keys")),
        depths_(p.get<int>("depth")) {}

  int samples(const kvlab::TaskEnv&) const override { return depths_ * per_depth(); }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    kvlab::Random random = this->random(index, env);
    const int asked = env.questions();
    // A fact has at least 12 tokens.
    const int count = keys_ > 0 ? keys_ : std::max(asked, context() / 12);
    if (asked > count)
      throw kvlab::Error(kvlab::Errc::config,
                         "got " + std::to_string(asked) + " questions, wanted at most keys: " + std::to_string(count));
    const auto keys = kvlab::identifiers(key_, count, random), values = kvlab::identifiers(answer_, count, random, " ");
    const std::string kind = kvlab::name_of(answer_);
    kvlab::Prompt prompt = open(env, "A special magic " + kind +
                                         " is hidden within the following text. Make sure to memorize it. I will quiz "
                                         "you about the " +
                                         kind + " afterwards.");
    for (int i = 0; i < asked; ++i) {
      const std::string about = kind + " for " + keys[static_cast<std::size_t>(i)] + " mentioned in the provided text";
      prompt.ask("\nWhat is the special magic " + about + "?", "The special magic " + about + " is",
                 {values[static_cast<std::size_t>(i)]}, max_new());
    }
    const auto fact = [&](std::size_t i) {
      return env.encode_next((keys_ > 0 ? haystack_.joint() : "\n") + "One of the special magic " + kind + "s for " +
                             keys[i] + " is: " + values[i] + ".");
    };
    std::vector<Tokens> facts;
    int taken = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      Tokens t = fact(i);
      if (keys_ == 0 && static_cast<int>(i) >= asked && taken + kvlab::length(t) > prompt.left()) break;
      taken += kvlab::length(t);
      facts.push_back(std::move(t));
    }
    // The first question's fact is at the grid's depth, the others anywhere.
    const double depth = this->depth(index, depths_);
    if (keys_ == 0) {
      prompt.room(taken, std::to_string(facts.size()) + " facts", 0);
      std::vector<Tokens> others(facts.begin() + 1, facts.end());
      random.shuffle(others);
      others.insert(others.begin() + static_cast<std::ptrdiff_t>(depth * static_cast<double>(others.size()) + 0.5),
                    facts.front());
      return prompt.finish(kvlab::hidden(others, {}, {}));
    }
    const int room = prompt.room(taken, std::to_string(count) + " facts");
    const kvlab::Haystack& text = haystack_.of(env);
    std::vector<double> depths{depth};
    while (depths.size() < facts.size()) depths.push_back(random.unit());
    return prompt.finish(kvlab::hidden(text.take(random.below(text.pieces.size()), room, env), facts, depths));
  }

 private:
  kvlab::HaystackText haystack_;
  kvlab::Identifier key_, answer_;
  int keys_, depths_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<Multikey>("multikey", "one fact is asked for among others that look like it", 4096, 16)
                 .param("keys", 4, 0, 1000, "facts; 0 = as many as fit, in place of a text")
                 .param("key", kvlab::Identifier::word, "what a fact is about")
                 .param("answer", kvlab::Identifier::number, "what it says: a number of 7 digits, words, or a UUID")
                 .param("depth", 5, 1, 1000,
                        "depths of the first question's fact, evenly from 0 to 100 %; 1 = the middle")
                 .param("haystack", std::string("bundled/niah/haystack.txt"),
                        "text file, which repeats when it is too short; or noise"))
