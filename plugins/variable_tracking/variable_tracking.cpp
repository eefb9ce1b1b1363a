// Chains of variable assignments in lines of noise, after worked examples: RULER's variable_tracking (Hsieh et al.
// 2024). The question asks for all variables that hold a value. Score: the share of variables in the answer.
#include <kvlab/prompt.hpp>

namespace {

class VariableTracking final : public kvlab::PromptTask {
 public:
  explicit VariableTracking(const kvlab::Params& p)
      : PromptTask(p),
        haystack_(p.get<std::string>("haystack")),
        chains_(p.get<int>("chains")),
        hops_(p.get<int>("hops")),
        examples_(p.get<int>("examples")) {}

  std::string metric() const override { return "contains_all"; }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    if (env.questions() > chains_)
      throw kvlab::Error(kvlab::Errc::config, "got " + std::to_string(env.questions()) +
                                                  " questions, wanted at most chains: " + std::to_string(chains_));
    if (const int variables = chains_ * (hops_ + 1); variables > context())
      throw kvlab::Error(kvlab::Errc::config, "got context: " + std::to_string(context()) + ", wanted at least " +
                                                  std::to_string(variables) +
                                                  ": so many variables take a token each and more");
    kvlab::Random random = this->random(index, env);
    const auto names = kvlab::distinct(chains_ * (hops_ + 1), [&] { return random.letters(5, 'A'); });
    const auto values = kvlab::distinct(chains_, [&] { return random.digits(5); });
    std::string before;
    for (int i = 0; i < examples_; ++i) before += example(env, random);
    kvlab::Prompt prompt = open(env, before + intro);
    std::vector<kvlab::Tokens> facts;
    std::vector<double> depths;
    int taken = 0;
    for (int c = 0; c < chains_; ++c) {
      const Names chain = chain_of(c, hops_, names);
      const std::string& value = values[static_cast<std::size_t>(c)];
      if (c < env.questions()) prompt.ask(question(value), opening(value, chain), chain, max_new());
      for (const double d : places(chain.size(), random)) depths.push_back(d);
      for (const std::string& fact : assignments(chain, value)) {
        facts.push_back(env.encode_next(haystack_.joint() + fact));
        taken += kvlab::length(facts.back());
      }
    }
    const int room = prompt.room(taken, std::to_string(facts.size()) + " assignments");
    const kvlab::Haystack& text = haystack_.of(env);
    return prompt.finish(kvlab::hidden(text.take(random.below(text.pieces.size()), room, env), facts, depths));
  }

 private:
  using Names = std::vector<std::string>;
  static constexpr const char* intro =
      "Memorize and track the chain(s) of variable assignment hidden in the following text.\n";
  static constexpr int example_tokens = 500, example_hops = 10;  // at most, as in RULER

  static std::string question(const std::string& value) {
    return "\nQuestion: Find all variables that are assigned the value " + value + " in the text above.";
  }
  static std::string opening(const std::string& value, const Names& chain) {  // "assgined" is RULER's
    return "Answer: According to the chain(s) of variable assignment in the text above, " +
           std::to_string(chain.size()) + " variables are assgined the value " + value + ", they are:";
  }
  static Names chain_of(int c, int hops, const Names& names) {
    const auto first = names.begin() + std::ptrdiff_t{c} * (hops + 1);
    return {first, first + hops + 1};
  }
  static Names assignments(const Names& chain, const std::string& value) {
    Names out;
    for (std::size_t i = 0; i < chain.size(); ++i)
      out.push_back("VAR " + chain[i] + " = " + (i == 0 ? value : "VAR " + chain[i - 1]));
    return out;
  }
  static std::vector<double> places(std::size_t count, kvlab::Random& random) {
    std::vector<double> out;
    while (out.size() < count) out.push_back(random.unit());
    std::sort(out.begin(), out.end());
    return out;
  }

  // A prompt of its own and its answer. It has names of three letters, and lines of noise up to 500 tokens.
  std::string example(const kvlab::TaskEnv& env, kvlab::Random& random) const {
    const int hops = std::min(hops_, example_hops);
    const Names names = kvlab::distinct(chains_ * (hops + 1), [&] { return random.letters(3, 'A'); }),
                values = kvlab::distinct(chains_, [&] { return random.digits(5); });
    Names facts;
    std::vector<double> depths;
    for (int c = 0; c < chains_; ++c) {
      const Names chain = chain_of(c, hops, names);
      for (const double d : places(chain.size(), random)) depths.push_back(d);
      for (std::string& fact : assignments(chain, values[static_cast<std::size_t>(c)]))
        facts.push_back(std::move(fact));
    }
    const Names chain = chain_of(0, hops, names);
    const std::string noise = std::string("\n") + kvlab::noise_line, tail = question(values[0]) + " " +
                                                                            opening(values[0], chain) + " " +
                                                                            kvlab::joined(chain, " ") + "\n\n";
    const int line = kvlab::length(env.encode_next(noise)),
              room = example_tokens - kvlab::length(env.encode(intro + ("\n" + kvlab::joined(facts, "\n")) + tail)),
              lines = std::max(1, room / line);
    std::string out = intro;
    for (int i = 0; i <= lines; ++i) {
      for (std::size_t f = 0; f < facts.size(); ++f)
        if (static_cast<int>(depths[f] * (lines + 1)) == i) out += "\n" + facts[f];
      if (i < lines) out += noise;
    }
    return out + tail;
  }

  kvlab::HaystackText haystack_;
  int chains_, hops_, examples_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<VariableTracking>("variable_tracking",
                                                  "all variables that hold a value, through chains of assignments",
                                                  4096, 48)
                 .param("chains", 1, 1, 1000, "values, each with variables of its own")
                 .param("hops", 4, 1, 1000, "assignments from variable to variable in a chain")
                 .param("examples", 1, 0, 10, "worked examples before the text")
                 .param("haystack", std::string("noise"), "noise, or a text file"))
