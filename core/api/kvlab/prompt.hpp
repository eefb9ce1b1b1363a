// Parts of generated tasks: prompts of an exact number of tokens, facts hidden in a text at chosen depths, and common
// parameters. A generated task is a PromptTask. Its sample() makes a Prompt, asks its questions, fills the room that is
// left, and finishes:
//   kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
//     kvlab::Random random(env.seed(), index);
//     kvlab::Prompt prompt = open(env, "Remember the number in this text.");
//     prompt.ask("\nWhich number was it?", "The number is", {"1234567"}, max_new());
//     const kvlab::Tokens fact = env.encode_next(" The number is 1234567.");
//     const auto hay = text.of(env).take(0, prompt.room(fact.size(), "the fact"), env);
//     return prompt.finish(kvlab::hidden(hay, {fact}, {random.unit()}));
//   }
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvlab/plugin.hpp"
#include "kvlab/random.hpp"
#include "kvlab/task.hpp"

namespace kvlab {

using Tokens = std::vector<int>;
inline void append(Tokens& to, const Tokens& more) { to.insert(to.end(), more.begin(), more.end()); }
inline int length(const Tokens& t) { return static_cast<int>(t.size()); }

// Returns `text` with each {name} of the list replaced. Other names stay.
using Fields = std::vector<std::pair<std::string, std::string>>;
inline std::string filled(const std::string& text, const Fields& fields) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const auto hit = std::find_if(fields.begin(), fields.end(), [&](const auto& f) {
      return text.compare(at, f.first.size() + 2, "{" + f.first + "}") == 0;
    });
    out += hit == fields.end() ? std::string(1, text[at]) : hit->second;
    at += hit == fields.end() ? 1 : hit->first.size() + 2;
  }
  return out;
}

inline std::string joined(const std::vector<std::string>& parts, std::string_view joint) {
  std::string out;
  for (const std::string& p : parts) {
    if (&p != &parts.front()) out += joint;
    out += p;
  }
  return out;
}

// A text in pieces that a prompt may be cut between: sentences (after '.', '!' or '?' with closing quotes and brackets,
// and at line ends) or whole lines. The first piece of a line begins with a line end, each other piece with a space.
struct Haystack {
  enum class Cut { sentences, lines };
  explicit Haystack(const std::string& text, Cut cut = Cut::sentences) {
    const std::string space = " \t\r\n\f\v", closing = "\"')]}";
    std::string piece, joint = "\n";
    const auto finish = [&](const char* next) {
      if (!piece.empty()) pieces.push_back(joint + piece);
      if (!piece.empty() || *next == '\n') joint = next;
      piece.clear();
    };
    for (const char c : text) {
      if (c == '\n') {
        finish("\n");
      } else if (space.find(c) == std::string::npos) {
        piece += c;
      } else if (!piece.empty()) {
        const std::size_t last = piece.find_last_not_of(closing);
        const bool end = last != std::string::npos && std::string(".!?").find(piece[last]) != std::string::npos;
        if (end && cut == Cut::sentences)
          finish(" ");
        else if (piece.back() != ' ')
          piece += ' ';
      }
    }
    finish("\n");
  }

  // Returns exactly `count` tokens, piece by piece from `start`, over and over. It cuts the last piece if it must, and
  // then fills it up with periods. The text must not be empty.
  std::vector<Tokens> take(std::size_t start, int count, const TaskEnv& env) const;

  std::vector<std::string> pieces;
};

// The sentences between which RULER and InfiniteBench hide their facts, one line of them.
inline constexpr const char* noise_line =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

namespace detail {

// Does the decoded text end within a character of several bytes?
inline bool ends_inside_character(const std::string& s) {
  std::size_t tail = 0;
  while (tail < std::min<std::size_t>(3, s.size()) && (s[s.size() - 1 - tail] & 0xC0) == 0x80) ++tail;
  if (tail == s.size()) return tail != 0;
  const auto lead = static_cast<unsigned char>(s[s.size() - 1 - tail]);
  return tail != (lead < 0xC0 ? 0u : lead < 0xE0 ? 1u : lead < 0xF0 ? 2u : 3u);
}

}  // namespace detail

inline std::vector<Tokens> Haystack::take(std::size_t start, int count, const TaskEnv& env) const {
  std::vector<Tokens> out;
  for (std::size_t i = start; count > 0; i = (i + 1) % pieces.size()) {
    Tokens t = env.encode_next(out.empty() ? "\n" + pieces[i].substr(1) : pieces[i]);
    if (length(t) > count) {
      t.resize(static_cast<std::size_t>(count));
      const Tokens period = env.encode_next(".");
      if (period.size() == 1) {
        do t.pop_back();
        while (!t.empty() && detail::ends_inside_character(env.decode(t)));
        t.resize(static_cast<std::size_t>(count), period[0]);
      }
    }
    count -= length(t);
    if (!t.empty()) out.push_back(std::move(t));
  }
  return out;
}

// A haystack by name: "noise" for lines of the noise sentences, otherwise the path of a text file. It is read once.
class HaystackText {
 public:
  explicit HaystackText(std::string name) : name_(std::move(name)) {}
  const Haystack& of(const TaskEnv& env) const {
    if (!text_)
      text_ = name_ == "noise" ? std::make_unique<Haystack>(noise_line, Haystack::Cut::lines)
                               : std::make_unique<Haystack>(env.read_text(name_));
    if (text_->pieces.empty()) throw Error(Errc::data, "got a haystack without text, wanted some sentences", name_);
    return *text_;
  }
  // Separator before a hidden fact: among noise a fact is a line of its own, in a text a sentence.
  std::string joint() const { return name_ == "noise" ? "\n" : " "; }

 private:
  std::string name_;
  mutable std::unique_ptr<Haystack> text_;
};

// Returns `hay` with each fact before the piece whose beginning is nearest to its depth. depths: 0 to 1 of hay's
// tokens, 1 = after everything. Ties go to the earlier piece. Facts at the same place keep the order of the list.
inline Tokens hidden(const std::vector<Tokens>& hay, const std::vector<Tokens>& facts,
                     const std::vector<double>& depths) {
  std::vector<double> begins{0};
  for (const Tokens& t : hay) begins.push_back(begins.back() + length(t));
  std::vector<std::vector<std::size_t>> before(begins.size());
  for (std::size_t f = 0; f < facts.size(); ++f) {
    const double at = depths[f] * begins.back();
    const auto away = [&](std::size_t i) { return begins[i] > at ? begins[i] - at : at - begins[i]; };
    std::size_t best = 0;
    for (std::size_t i = 1; i < begins.size(); ++i)
      if (away(i) < away(best)) best = i;
    before[best].push_back(f);
  }
  Tokens out;
  for (std::size_t s = 0; s < before.size(); ++s) {
    for (const std::size_t f : before[s]) append(out, facts[f]);
    if (s < hay.size()) append(out, hay[s]);
  }
  return out;
}

// One prompt: template, intro, body, questions. Its longest conversation (context, questions that follow each other and
// their longest answers) has exactly `context` tokens.
class Prompt {
 public:
  Prompt(const TaskEnv& env, bool chat, int context, std::string_view intro)
      : env_(env), chat_(chat), context_(context) {
    out_.context = chat ? env.chat_open() : env.text_open();
    append(out_.context, out_.context.empty() ? env.encode(intro) : env.encode_next(intro));
    if (chat) close_ = env.chat_close();
  }

  // Adds a question and the first words of its answer. Each env.turns() questions form one conversation, where a
  // question follows the answer before it. `follows` makes this question follow in any case.
  void ask(std::string question, const std::string& opening, std::vector<std::string> references, int max_new,
           bool follows = false) {
    TaskQuestion q;
    q.follows = follows || static_cast<int>(out_.questions.size()) % env_.turns() != 0;
    if (q.follows && chat_) append(q.tokens, env_.chat_next());
    if (!q.tokens.empty() && question.rfind('\n', 0) == 0) question.erase(0, 1);  // the template separates messages
    append(q.tokens, env_.encode_next(question));
    append(q.tokens, close_);
    if (!opening.empty())
      append(q.tokens, env_.encode_next((close_.empty() && question.back() != '\n' ? " " : "") + opening));
    for (const std::string& r : references)
      if (const int least = length(env_.encode_next(" " + r)); least > max_new)
        throw Error(Errc::config, "got max_new_tokens: " + std::to_string(max_new) + ", wanted at least " +
                                      std::to_string(least) + ": the answer '" + r + "' has so many");
    q.references = std::move(references);
    q.max_new_tokens = max_new;
    conversation_ = (q.follows ? conversation_ : 0) + length(q.tokens) + max_new;
    longest_ = std::max(longest_, conversation_);
    out_.questions.push_back(std::move(q));
  }

  // Reserves room for a question that another run asks over the same text, as if it were asked.
  void reserve(std::string question, const std::string& opening, int max_new) {
    const int conversation = conversation_;
    ask(std::move(question), opening, {}, max_new);
    out_.questions.pop_back();
    conversation_ = conversation;
  }

  // Tokens that are left for the body; may be negative.
  int left() const { return context_ - length(out_.context) - longest_; }
  // left() less `taken` tokens of the body. Errc::config if that is below `least`; `what` names the taken tokens.
  int room(int taken, const std::string& what, int least = 1) const {
    if (left() - taken < least)
      throw Error(Errc::config, "got context: " + std::to_string(context_) + ", wanted at least " +
                                    std::to_string(context_ - left() + taken + least) + ": instruction, " + what +
                                    ", question and answer alone take " + std::to_string(context_ - left() + taken) +
                                    " tokens");
    return left() - taken;
  }

  // Fills the room that is left with the body, exactly. Noise sentences go before a shorter body.
  TaskSample finish(const Tokens& body) {
    const int spare = left() - length(body);
    if (spare < 0)
      throw Error(Errc::internal, "got a body of " + std::to_string(length(body)) + " tokens, wanted at most " +
                                      std::to_string(left()));
    for (const Tokens& t : Haystack(noise_line, Haystack::Cut::lines).take(0, spare, env_)) append(out_.context, t);
    append(out_.context, body);
    return std::move(out_);
  }

 private:
  const TaskEnv& env_;
  bool chat_;
  int context_, conversation_ = 0, longest_ = 0;
  Tokens close_;
  TaskSample out_;
};

// A task whose prompts are generated. Register it with prompt_task.
class PromptTask : public Task {
 public:
  explicit PromptTask(const Params& p)
      : chat_(p.get<bool>("chat")),
        context_(p.get<int>("context")),
        samples_(p.get<int>("samples")),
        max_new_(p.get<int>("max_new_tokens")) {}

  int samples(const TaskEnv&) const override { return samples_; }

 protected:
  Prompt open(const TaskEnv& env, std::string_view intro) const { return {env, chat_, context_, intro}; }
  // Errc::config unless the run asks one question for each context. `why` ends the message.
  static void one_question(const TaskEnv& env, const char* why) {
    if (env.questions() != 1)
      throw Error(Errc::config, "got " + std::to_string(env.questions()) + " questions, wanted 1: " + why);
  }
  static Random random(int index, const TaskEnv& env) { return {env.seed(), static_cast<std::uint64_t>(index)}; }
  // Depth (0 to 1) of prompt `index` in a grid of `depths` depths, per_depth() prompts each. A single depth is 0.5.
  double depth(int index, int depths) const {
    return depths > 1 ? static_cast<double>(index / samples_) / (depths - 1) : 0.5;
  }
  int per_depth() const { return samples_; }
  int context() const { return context_; }
  int max_new() const { return max_new_; }

 private:
  bool chat_;
  int context_, samples_, max_new_;
};

// max_new: the default of max_new_tokens; 0 = the task knows how long its answers are.
template <class T>
constexpr Registration prompt_task(std::string_view name, std::string_view help, int context, int max_new) {
  static_assert(std::is_base_of_v<PromptTask, T>);
  return task<T>(name, help)
      .param("context", context, 1, any, "tokens of template, prompt and longest answer, met exactly")
      .param("samples", 1, 1, 100000, "prompts; per depth where there are depths")
      .param("max_new_tokens", max_new, max_new > 0 ? 1 : 0, 100000,
             max_new > 0 ? "longest answer" : "longest answer; 0 = as long as it needs")
      .param("chat", true, "put the model's chat template around the prompt");
}

// Kinds of keys and values of facts, as in RULER.
enum class Identifier { number, word, uuid };

}  // namespace kvlab

template <>
struct kvlab::Choices<kvlab::Identifier> {
  static constexpr std::pair<kvlab::Identifier, const char*> all[] = {
      {kvlab::Identifier::number, "number"}, {kvlab::Identifier::word, "word"}, {kvlab::Identifier::uuid, "uuid"}};
};

namespace kvlab {

inline const char* name_of(Identifier kind) {
  for (const auto& [k, name] : Choices<Identifier>::all)
    if (k == kind) return name;
  return "?";
}
// `count` different keys or values: seven digits, two words, or a UUID.
inline std::vector<std::string> identifiers(Identifier kind, int count, Random& random, std::string_view joint = "-") {
  return distinct(count, [&] {
    return kind == Identifier::number ? random.digits(7)
           : kind == Identifier::word ? random.two_words(joint)
                                      : random.uuid();
  });
}

}  // namespace kvlab
