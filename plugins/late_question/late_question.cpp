// A second question after the first answer, in the same cache. A policy that kept the first question's tokens may have
// dropped those of the second. Facts and questions are RULER's. `turns: N` asks N questions one after the other, at
// least two. Score: late questions only, unless `score_first`.
#include <kvlab/prompt.hpp>

namespace {

class LateQuestion final : public kvlab::PromptTask {
 public:
  explicit LateQuestion(const kvlab::Params& p)
      : PromptTask(p),
        haystack_(p.get<std::string>("haystack")),
        others_(p.get<int>("others")),
        score_first_(p.get<bool>("score_first")) {}

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    kvlab::Random random = this->random(index, env);
    const int turns = std::max(2, env.turns()), asked = env.questions() / env.turns() * turns;
    const auto keys = kvlab::identifiers(kvlab::Identifier::word, asked + others_, random),
               values = kvlab::identifiers(kvlab::Identifier::number, asked + others_, random);
    kvlab::Prompt prompt =
        open(env,
             "Some special magic numbers are hidden within the following text. Make sure to memorize "
             "it. I will quiz you about the numbers afterwards.");
    std::vector<kvlab::Tokens> facts;
    std::vector<double> depths;
    int taken = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (const auto n = static_cast<int>(i); n < asked) {
        const std::string about = "number for " + keys[i] + " mentioned in the provided text";
        const bool late = n % turns != 0;
        std::vector<std::string> references;
        if (late || score_first_) references = {values[i]};
        prompt.ask("\nWhat is the special magic " + about + "?", "The special magic " + about + " is", references,
                   max_new(), late);
      }
      facts.push_back(env.encode_next(haystack_.joint() + "One of the special magic numbers for " + keys[i] +
                                      " is: " + values[i] + "."));
      taken += kvlab::length(facts.back());
      depths.push_back(random.unit());
    }
    const int room = prompt.room(taken, std::to_string(facts.size()) + " facts");
    const kvlab::Haystack& text = haystack_.of(env);
    return prompt.finish(kvlab::hidden(text.take(random.below(text.pieces.size()), room, env), facts, depths));
  }

 private:
  kvlab::HaystackText haystack_;
  int others_;
  bool score_first_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<LateQuestion>("late_question", "a second question after the first answer", 4096, 16)
                 .param("others", 0, 0, 1000, "facts that no question is about")
                 .param("score_first", false, "the first question counts too")
                 .param("haystack", std::string("bundled/niah/haystack.txt"),
                        "text file, which repeats when it is too short; or noise"))
