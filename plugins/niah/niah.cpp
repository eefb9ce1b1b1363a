// Needle in a haystack: facts hidden at chosen depths of a long text, one question for each fact. Wording and kinds are
// those of RULER's single needles (Hsieh et al. 2024). `haystack: noise` is niah_single_1, the default niah_single_2
// with another text, `answer: uuid` niah_single_3.
#include <kvlab/prompt.hpp>

namespace {

using kvlab::Tokens;
constexpr int most_needles = 1000;

class Niah final : public kvlab::PromptTask {
 public:
  explicit Niah(const kvlab::Params& p)
      : PromptTask(p),
        haystack_(p.get<std::string>("haystack")),
        intro_(p.get<std::string>("intro")),
        needle_(p.get<std::string>("needle")),
        question_(p.get<std::string>("question_text")),
        opening_(p.get<std::string>("answer_opening")),
        answer_(p.get<kvlab::Identifier>("answer")),
        depths_(p.get<int>("depth")),
        needles_(p.get<int>("needles")),
        ask_(p.get<int>("ask")) {
    if (needle_.find("{value}") == std::string::npos)
      throw kvlab::Error(kvlab::Errc::config, "got a needle without {value}, wanted the answer in it");
  }

  int samples(const kvlab::TaskEnv&) const override { return depths_ * per_depth(); }
  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override;

 private:
  kvlab::HaystackText haystack_;
  std::string intro_, needle_, question_, opening_;
  kvlab::Identifier answer_;
  int depths_, needles_, ask_;
};

kvlab::TaskSample Niah::sample(int index, const kvlab::TaskEnv& env) const {
  const int asked = env.questions(), count = needles_ > 0 ? needles_ : ask_ + asked;
  if (count > most_needles)
    throw kvlab::Error(kvlab::Errc::config,
                       "got " + std::to_string(count) + " needles, wanted at most " + std::to_string(most_needles));
  if (ask_ + asked > count)
    throw kvlab::Error(kvlab::Errc::config, "got questions about needles " + std::to_string(ask_) + " to " +
                                                std::to_string(ask_ + asked - 1) +
                                                ", wanted less than needles: " + std::to_string(count));
  const kvlab::Haystack& text = haystack_.of(env);
  kvlab::Random random = this->random(index, env);
  const std::size_t start = random.below(text.pieces.size());
  const auto keys = kvlab::identifiers(kvlab::Identifier::word, count, random);
  const auto values = kvlab::identifiers(answer_, count, random, " ");

  kvlab::Prompt prompt = open(env, kvlab::filled(intro_, {{"kind", kvlab::name_of(answer_)}}));
  std::vector<Tokens> needles;
  std::vector<double> depths;
  int taken = 0;
  // The first needle is at the grid's depth. The others follow at even distances and wrap at the end.
  const double depth = this->depth(index, depths_);
  for (int i = 0; i < count; ++i) {
    const auto n = static_cast<std::size_t>(i);
    const kvlab::Fields fields = {{"key", keys[n]}, {"value", values[n]}, {"kind", kvlab::name_of(answer_)}};
    needles.push_back(env.encode_next(haystack_.joint() + kvlab::filled(needle_, fields)));
    taken += kvlab::length(needles.back());
    const double d = depth + static_cast<double>(i) / count;
    depths.push_back(d > 1 ? d - 1 : d);
    if (i >= ask_ && i < ask_ + asked)
      prompt.ask(kvlab::filled(question_, fields), kvlab::filled(opening_, fields), {values[n]}, max_new());
    else if (needles_ > 0 && env.turns() == 1)  // the text must not depend on `ask`
      prompt.reserve(kvlab::filled(question_, fields), kvlab::filled(opening_, fields), max_new());
  }
  const int room = prompt.room(taken, std::to_string(count) + (count > 1 ? " needles" : " needle"));
  return prompt.finish(kvlab::hidden(text.take(start, room, env), needles, depths));
}

}  // namespace

KVLAB_PLUGIN(
    kvlab::prompt_task<Niah>("niah", "needle in a haystack: facts hidden in a long text at chosen depths", 4096, 16)
        .param("haystack", std::string("bundled/niah/haystack.txt"),
               "text file, which repeats when it is too short; or noise")
        .param("depth", 5, 1, 1000, "number of depths, evenly from 0 to 100 %; 1 = the middle")
        .param("answer", kvlab::Identifier::number, "a number of 7 digits, words, or a UUID")
        .param("needles", 0, 0, most_needles, "facts in the text; 0 = as many as are asked for")
        .param("ask", 0, 0, most_needles - 1,
               "which needle the first question is about; with needles: N the text does not depend on it")
        .param("intro",
               std::string("A special magic {kind} is hidden within the following text. Make sure to memorize it. I "
                           "will quiz you about the {kind} afterwards."),
               "what stands before the text")
        .param("needle", std::string("One of the special magic {kind}s for {key} is: {value}."), "a fact")
        .param("question_text",
               std::string("\nWhat is the special magic {kind} for {key} mentioned in the provided text?"),
               "what stands after the text")
        .param("answer_opening", std::string("The special magic {kind} for {key} mentioned in the provided text is"),
               "first words of the model's answer"))
