// Requests of given or drawn lengths, for measuring speed. Prompts are random letters without references.
#include <kvlab/plugin.hpp>
#include <kvlab/random.hpp>

#include <algorithm>
#include <charconv>

namespace {

constexpr int most = 1 << 20;  // tokens

struct Lengths {
  int prompt, answer;
};

class RandomPrompts final : public kvlab::Task {
 public:
  explicit RandomPrompts(const kvlab::Params& p)
      : file_(p.get<std::string>("file")),
        prompt_(p.get<int>("prompt")),
        prompt_max_(p.get<int>("prompt_max")),
        answer_(p.get<int>("answer")),
        answer_max_(p.get<int>("answer_max")),
        samples_(p.get<int>("samples")) {}

  std::string metric() const override { return "none"; }
  int samples(const kvlab::TaskEnv& env) const override {
    return file_.empty() ? samples_ : static_cast<int>(lines(env).size());
  }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    kvlab::Random random(env.seed(), static_cast<std::uint64_t>(index));
    const Lengths l = file_.empty() ? Lengths{drawn(random, prompt_, prompt_max_), drawn(random, answer_, answer_max_)}
                                    : lines(env)[static_cast<std::size_t>(index)];
    kvlab::TaskSample out;
    out.context = env.text_open();
    while (out.context.size() < static_cast<std::size_t>(l.prompt)) {
      const auto word = env.encode_next(" " + random.letters(2 + static_cast<int>(random.below(7)), 'a'));
      out.context.insert(out.context.end(), word.begin(), word.end());
    }
    out.context.resize(static_cast<std::size_t>(l.prompt));
    out.questions.resize(1);
    out.questions[0].max_new_tokens = l.answer;
    return out;
  }

 private:
  static int drawn(kvlab::Random& random, int low, int high) {
    return high <= low ? low : low + static_cast<int>(random.below(static_cast<std::size_t>(high - low + 1)));
  }

  // The second and third fields of each line. Empty lines and comments are skipped.
  const std::vector<Lengths>& lines(const kvlab::TaskEnv& env) const {
    if (!lines_.empty()) return lines_;
    const std::string text = env.read_text(file_);
    int number = 1;
    for (std::size_t at = 0; at < text.size(); ++number) {
      const std::size_t end = std::min(text.find('\n', at), text.size());
      std::string line = text.substr(at, end - at);
      at = end + 1;
      if (const auto last = line.find_last_not_of(" \t\r");
          last == std::string::npos || line[line.find_first_not_of(" \t")] == '#')
        continue;
      lines_.push_back({field(line, 1, number), field(line, 2, number)});
    }
    if (lines_.empty()) throw kvlab::Error(kvlab::Errc::data, "got no lines, wanted ARRIVAL,PROMPT,ANSWER", file_);
    return lines_;
  }

  int field(const std::string& line, int which, int number) const {
    std::size_t begin = 0;
    for (int i = 0; i < which && begin != std::string::npos; ++i) begin = line.find(',', i == 0 ? 0 : begin + 1);
    begin = begin == std::string::npos ? begin : line.find_first_not_of(" \t", begin + 1);
    int value = 0;
    if (begin != std::string::npos) {
      const char* end = line.data() + line.size();
      const auto read = std::from_chars(line.data() + begin, end, value);
      const bool ends =
          read.ptr == end || *read.ptr == ',' || *read.ptr == ' ' || *read.ptr == '\t' || *read.ptr == '\r';
      if (read.ec != std::errc() || !ends) value = 0;
    }
    if (value < 1 || value > most)
      throw kvlab::Error(kvlab::Errc::data,
                         "got '" + line + "', wanted ARRIVAL,PROMPT,ANSWER: seconds and two numbers of tokens",
                         file_ + ":" + std::to_string(number));
    return value;
  }

  std::string file_;
  int prompt_, prompt_max_, answer_, answer_max_, samples_;
  mutable std::vector<Lengths> lines_;  // read once
};

}  // namespace

KVLAB_PLUGIN(kvlab::task<RandomPrompts>("random_prompts",
                                        "random letters of given or drawn lengths, for workloads; no score")
                 .param("prompt", 512, 1, most, "tokens of a prompt, the fewest when prompt_max is more")
                 .param("prompt_max", 0, 0, most, "most tokens of a prompt; lengths between are equally likely")
                 .param("answer", 64, 1, most, "most tokens of an answer")
                 .param("answer_max", 0, 0, most, "likewise: lengths from `answer` to this one")
                 .param("samples", 32, 1, 1000000, "prompts")
                 .param("file", std::string(), "lines of ARRIVAL,PROMPT,ANSWER in place of the lengths above"))
