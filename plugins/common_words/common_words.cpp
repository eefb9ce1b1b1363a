// The words that appear most often in a numbered list, after worked examples: RULER's common_words_extraction (Hsieh et
// al. 2024). The words come from the bundled haystack. Score: the share of the common words in the answer.
#include <kvlab/prompt.hpp>

#include <set>

namespace {

using Words = std::vector<std::string>;

class CommonWords final : public kvlab::PromptTask {
 public:
  explicit CommonWords(const kvlab::Params& p)
      : PromptTask(p),
        words_from_(p.get<std::string>("words")),
        common_(p.get<int>("common")),
        times_(p.get<int>("times")),
        other_times_(p.get<int>("other_times")),
        examples_(p.get<int>("examples")) {}

  std::string metric() const override { return "contains_all"; }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    one_question(env, "the list has one answer");
    kvlab::Random random = this->random(index, env);
    Words words = vocabulary(env);
    if (static_cast<int>(words.size()) <= common_)
      throw kvlab::Error(kvlab::Errc::data,
                         "got " + std::to_string(words.size()) +
                             " different words, wanted more than common: " + std::to_string(common_),
                         words_from_);
    const auto common = static_cast<std::size_t>(common_);
    const std::string count = std::to_string(common_),
                      intro =
                          "Below is a numbered list of words. In these words, some appear more often than others. "
                          "Memorize the ones that appear most often.",
                      question = "\nQuestion: What are the " + count + " most common words in the above list?",
                      opening = "Answer: The top " + count + " words that appear most often in the list are:";
    // RULER's frequencies and sizes of examples; below 4096 tokens its smaller ones.
    const bool small = context() < 4096;
    const std::size_t example_words = small ? 20 : 40;
    std::string text;
    for (int i = 0; i < examples_; ++i) {
      random.shuffle(words);
      text += intro +
              numbered(words, common, small ? 3 : 10, example_words > common ? example_words - common : 0,
                       small ? 1 : 3, random) +
              question + " " + opening;
      for (std::size_t k = 0; k < common; ++k) text += " " + std::to_string(k + 1) + ". " + words[k];
      text += "\n";
    }
    random.shuffle(words);
    kvlab::Prompt prompt = open(env, text + intro);
    prompt.ask(question, opening, Words(words.begin(), words.begin() + common_), max_new());
    // The list takes as many other words as fit.
    const int times = times_ > 0 ? times_
                      : small    ? 6
                                 : 30,
              other_times = other_times_ > 0 ? other_times_
                            : small          ? 1
                                             : 3;
    if (common_ * times > context())
      throw kvlab::Error(kvlab::Errc::config, "got context: " + std::to_string(context()) + ", wanted at least " +
                                                  std::to_string(common_ * times) +
                                                  ": so many words take a token each and more");
    const auto list = [&](std::size_t others) {
      return env.encode_next(numbered(words, common, times, others, other_times, random));
    };
    std::size_t fit = 0, over = words.size() - common + 1;
    prompt.room(kvlab::length(list(1)), "the list", 0);
    while (over - fit > 1) {
      const std::size_t middle = fit + (over - fit) / 2;
      (kvlab::length(list(middle)) <= prompt.left() ? fit : over) = middle;
    }
    return prompt.finish(list(std::max<std::size_t>(1, fit)));
  }

 private:
  // A numbered line with the first `common` words `times` times each, and the next `others` words (if there are so
  // many) `other_times` times each.
  static std::string numbered(const Words& words, std::size_t common, int times, std::size_t others, int other_times,
                              kvlab::Random random) {
    Words all;
    for (std::size_t i = 0; i < std::min(words.size(), common + others); ++i)
      all.insert(all.end(), static_cast<std::size_t>(i < common ? times : other_times), words[i]);
    random.shuffle(all);
    std::string text = "\n";
    for (std::size_t i = 0; i < all.size(); ++i) text += (i > 0 ? " " : "") + std::to_string(i + 1) + ". " + all[i];
    return text;
  }

  // Words of 4 to 10 lowercase letters, in alphabetical order.
  const Words& vocabulary(const kvlab::TaskEnv& env) const {
    if (!vocabulary_.empty()) return vocabulary_;
    std::set<std::string> all;
    std::string word;
    for (const char c : env.read_text(words_from_) + " ") {
      const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '\'' || c == '-' || (c & 0x80) != 0;
      if (letter) {
        word += c;
        continue;
      }
      if (word.size() >= 4 && word.size() <= 10 &&
          word.find_first_not_of("abcdefghijklmnopqrstuvwxyz") == std::string::npos)
        all.insert(word);
      word.clear();
    }
    return vocabulary_ = Words(all.begin(), all.end());
  }

  std::string words_from_;
  int common_, times_, other_times_, examples_;
  mutable Words vocabulary_;  // read once
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<CommonWords>("common_words", "the words that appear most often in a long list", 4096,
                                             120)
                 .param("common", 10, 1, 1000, "words that appear often")
                 .param("times", 0, 0, 10000, "how often each does; 0 = 30, below a context of 4096 tokens 6")
                 .param("other_times", 0, 0, 10000, "how often the others do; 0 = 3, below a context of 4096 tokens 1")
                 .param("examples", 1, 0, 10, "worked examples before the list")
                 .param("words", std::string("bundled/niah/haystack.txt"), "text whose words are used"))
