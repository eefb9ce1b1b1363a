// Needle in a haystack: facts hidden at chosen depths of a long text, one question for each fact. Wording as in RULER
// (Hsieh et al. 2024).
#include <kvlab/plugin.hpp>

#include <memory>

#include "haystack.hpp"

namespace {
enum class Answer { number, word };
}

template <>
struct kvlab::Choices<Answer> {
  static constexpr std::pair<Answer, const char*> all[] = {{Answer::number, "number"}, {Answer::word, "word"}};
};

namespace {

using Tokens = std::vector<int>;
constexpr int most_needles = 1000;

void append(Tokens& to, const Tokens& more) { to.insert(to.end(), more.begin(), more.end()); }
int length(const Tokens& t) { return static_cast<int>(t.size()); }

class Niah final : public kvlab::Task {
 public:
  explicit Niah(const kvlab::Params& p)
      : haystack_(p.get<std::string>("haystack")),
        intro_(p.get<std::string>("intro")),
        needle_(p.get<std::string>("needle")),
        question_(p.get<std::string>("question_text")),
        opening_(p.get<std::string>("answer_opening")),
        words_(p.get<Answer>("answer") == Answer::word),
        chat_(p.get<bool>("chat")),
        context_(p.get<int>("context")),
        depths_(p.get<int>("depth")),
        samples_(p.get<int>("samples")),
        needles_(p.get<int>("needles")),
        ask_(p.get<int>("ask")),
        max_new_(p.get<int>("max_new_tokens")) {
    if (needle_.find("{value}") == std::string::npos)
      throw kvlab::Error(kvlab::Errc::config, "got a needle without {value}, wanted the answer in it");
  }

  int samples(const kvlab::TaskEnv&) const override { return depths_ * samples_; }
  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override;

 private:
  // {key}, {value} and {kind} filled in.
  std::string fill(const std::string& text, const niah::Fact& fact) const;
  const niah::Haystack& haystack(const kvlab::TaskEnv& env) const;

  std::string haystack_, intro_, needle_, question_, opening_;
  bool words_, chat_;
  int context_, depths_, samples_, needles_, ask_, max_new_;
  mutable std::unique_ptr<niah::Haystack> text_;  // read once
};

std::string Niah::fill(const std::string& text, const niah::Fact& fact) const {
  const std::pair<std::string, std::string> all[] = {
      {"{key}", fact.key}, {"{value}", fact.value}, {"{kind}", words_ ? "word" : "number"}};
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const auto hit = std::find_if(std::begin(all), std::end(all),
                                  [&](const auto& f) { return text.compare(at, f.first.size(), f.first) == 0; });
    out += hit == std::end(all) ? std::string(1, text[at]) : hit->second;
    at += hit == std::end(all) ? 1 : hit->first.size();
  }
  return out;
}

const niah::Haystack& Niah::haystack(const kvlab::TaskEnv& env) const {
  if (!text_) text_ = std::make_unique<niah::Haystack>(env.read_text(haystack_));
  if (text_->sentences.empty())
    throw kvlab::Error(kvlab::Errc::data, "got a haystack without text, wanted some sentences", haystack_);
  return *text_;
}

kvlab::TaskSample Niah::sample(int index, const kvlab::TaskEnv& env) const {
  const int asked = env.questions(), count = needles_ > 0 ? needles_ : ask_ + asked;
  if (count > most_needles)
    throw kvlab::Error(kvlab::Errc::config,
                       "got " + std::to_string(count) + " needles, wanted at most " + std::to_string(most_needles));
  if (ask_ + asked > count)
    throw kvlab::Error(kvlab::Errc::config, "got questions about needles " + std::to_string(ask_) + " to " +
                                                std::to_string(ask_ + asked - 1) +
                                                ", wanted less than needles: " + std::to_string(count));
  const niah::Haystack& text = haystack(env);
  niah::Random random(env.seed(), static_cast<std::uint64_t>(index));
  const std::size_t start = random.below(text.sentences.size());
  const std::vector<niah::Fact> facts = niah::facts(count, words_, random);

  kvlab::TaskSample out;
  out.context = chat_ ? env.chat_open() : env.text_open();
  append(out.context, intro_.empty() || !out.context.empty() ? env.encode_next(intro_) : env.encode(intro_));
  const Tokens close = chat_ ? env.chat_close() : Tokens{};
  std::vector<Tokens> questions, needles;
  int fixed = length(out.context) + max_new_, longest = 0;
  for (const niah::Fact& fact : facts) {
    Tokens q = env.encode_next(fill(question_, fact));
    append(q, close);
    if (!opening_.empty()) append(q, env.encode_next((close.empty() ? " " : "") + fill(opening_, fact)));
    needles.push_back(env.encode_next(" " + fill(needle_, fact)));
    longest = std::max(longest, length(q));
    fixed += length(needles.back());
    questions.push_back(std::move(q));
  }
  fixed += longest;
  const int room = context_ - fixed;
  if (room < 1)
    throw kvlab::Error(kvlab::Errc::config,
                       "got context: " + std::to_string(context_) + ", wanted at least " + std::to_string(fixed + 1) +
                           ": instruction, " + std::to_string(count) + (count > 1 ? " needles" : " needle") +
                           ", question and answer alone take " + std::to_string(fixed) + " tokens");

  const std::vector<Tokens> hay = niah::take(text, start, room, env);
  // The grid's depth is the first needle's; the others follow at even distances, past the end from the beginning again.
  const int step = index / samples_;
  const double depth = depths_ > 1 ? static_cast<double>(step) / (depths_ - 1) : 0.5;
  std::vector<std::size_t> before;  // each needle: the sentence that it stands before
  for (int i = 0; i < count; ++i) {
    double d = depth + static_cast<double>(i) / count;
    if (d > 1) d -= 1;
    before.push_back(niah::boundary(hay, d * room));
  }
  for (std::size_t s = 0; s <= hay.size(); ++s) {
    for (std::size_t i = 0; i < before.size(); ++i)
      if (before[i] == s) append(out.context, needles[i]);
    if (s < hay.size()) append(out.context, hay[s]);
  }
  for (int i = ask_; i < ask_ + asked; ++i) {
    kvlab::TaskQuestion q;
    q.tokens = questions[static_cast<std::size_t>(i)];
    q.references = {facts[static_cast<std::size_t>(i)].value};
    q.max_new_tokens = max_new_;
    out.questions.push_back(std::move(q));
  }
  return out;
}

}  // namespace

KVLAB_PLUGIN(
    kvlab::task<Niah>("niah", "needle in a haystack: facts hidden in a long text at chosen depths")
        .param("haystack", std::string("bundled/niah/haystack.txt"), "text file; repeats when it is too short")
        .param("context", 4096, 1, kvlab::any, "tokens of template, prompt and longest answer, met exactly")
        .param("depth", 5, 1, 1000, "number of depths, evenly from 0 to 100 %; 1 = the middle")
        .param("samples", 1, 1, 100000, "prompts per depth")
        .param("answer", Answer::number, "a number of 7 digits or a word")
        .param("needles", 0, 0, most_needles, "facts in the text; 0 = as many as are asked for")
        .param("ask", 0, 0, most_needles - 1, "which needle the first question is about")
        .param("max_new_tokens", 16, 1, 4096, "longest answer")
        .param("chat", true, "put the model's chat template around the prompt")
        .param("intro",
               std::string("Some special magic {kind}s are hidden within the following text. Make sure to memorize "
                           "them. I will quiz you about the {kind}s afterwards."),
               "what stands before the text")
        .param("needle", std::string("One of the special magic {kind}s for {key} is: {value}."), "a fact")
        .param("question_text",
               std::string("\nWhat is the special magic {kind} for {key} mentioned in the provided text?"),
               "what stands after the text")
        .param("answer_opening", std::string("The special magic {kind} for {key} mentioned in the provided text is"),
               "first words of the model's answer"))
