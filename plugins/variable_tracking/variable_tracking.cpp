// Chains of variable assignments in lines of noise; asked for are all variables that hold a value: RULER's
// variable_tracking (Hsieh et al. 2024), without its worked example. Score: the share of variables that the answer has.
#include <kvlab/prompt.hpp>

namespace {

class VariableTracking final : public kvlab::PromptTask {
 public:
  explicit VariableTracking(const kvlab::Params& p)
      : PromptTask(p),
        haystack_(p.get<std::string>("haystack")),
        chains_(p.get<int>("chains")),
        hops_(p.get<int>("hops")) {}

  std::string metric() const override { return "contains_all"; }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    if (env.questions() > chains_)
      throw kvlab::Error(kvlab::Errc::config, "got " + std::to_string(env.questions()) +
                                                  " questions, wanted at most chains: " + std::to_string(chains_));
    kvlab::Random random = this->random(index, env);
    const auto names = kvlab::distinct(chains_ * (hops_ + 1), [&] { return random.letters(5, 'A'); });
    const auto values = kvlab::distinct(chains_, [&] { return random.digits(5); });
    kvlab::Prompt prompt =
        open(env, "Memorize and track the chain(s) of variable assignment hidden in the following text.\n");
    std::vector<kvlab::Tokens> facts;
    std::vector<double> depths;
    int taken = 0;
    for (int c = 0; c < chains_; ++c) {
      const auto first = names.begin() + std::ptrdiff_t{c} * (hops_ + 1);
      const std::vector<std::string> chain(first, first + hops_ + 1);
      const std::string& value = values[static_cast<std::size_t>(c)];
      if (c < env.questions())  // "assgined" is RULER's
        prompt.ask("\nQuestion: Find all variables that are assigned the value " + value + " in the text above.",
                   "Answer: According to the chain(s) of variable assignment in the text above, " +
                       std::to_string(hops_ + 1) + " variables are assgined the value " + value + ", they are:",
                   chain, max_new());
      std::vector<double> places;
      while (places.size() < chain.size()) places.push_back(random.unit());
      std::sort(places.begin(), places.end());
      depths.insert(depths.end(), places.begin(), places.end());
      for (std::size_t i = 0; i < chain.size(); ++i) {
        facts.push_back(
            env.encode_next(haystack_.joint() + "VAR " + chain[i] + " = " + (i == 0 ? value : "VAR " + chain[i - 1])));
        taken += kvlab::length(facts.back());
      }
    }
    const int room = prompt.room(taken, std::to_string(facts.size()) + " assignments");
    const kvlab::Haystack& text = haystack_.of(env);
    return prompt.finish(kvlab::hidden(text.take(random.below(text.pieces.size()), room, env), facts, depths));
  }

 private:
  kvlab::HaystackText haystack_;
  int chains_, hops_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<VariableTracking>("variable_tracking",
                                                  "all variables that hold a value, through chains of assignments",
                                                  4096, 48)
                 .param("chains", 1, 1, 1000, "values, each with variables of its own")
                 .param("hops", 4, 1, 1000, "assignments from variable to variable in a chain")
                 .param("haystack", std::string("noise"), "noise, or a text file"))
