// The three most frequent words of a coded text: RULER's freq_words_extraction (Hsieh et al. 2024). Frequencies follow
// a zeta distribution, and dots take the first rank. Score: the share of the three words in the answer.
#include <kvlab/prompt.hpp>

namespace {

enum class Alpha { one_and_a_half, two, three_and_a_half };

}  // namespace

template <>
struct kvlab::Choices<Alpha> {
  static constexpr std::pair<Alpha, const char*> all[] = {
      {Alpha::one_and_a_half, "1.5"}, {Alpha::two, "2.0"}, {Alpha::three_and_a_half, "3.5"}};
};

namespace {

// floor(words / (zeta(alpha) rank^alpha)). Integers give the same value on every machine.
std::uint64_t frequency(std::uint64_t words, std::uint64_t rank, Alpha alpha) {
  std::uint64_t root = 0;  // square root of rank, in 1/1024
  while ((root + 1) * (root + 1) <= rank << 20) ++root;
  if (alpha == Alpha::two) return words * 1024000000 / 1644934 / (rank * rank * 1024);
  if (alpha == Alpha::one_and_a_half) return words * 1024000000 / 2612375 / (rank * root);
  return words * 1024000000 / 1126734 / (rank * rank * rank * root);
}

class FrequentWords final : public kvlab::PromptTask {
 public:
  explicit FrequentWords(const kvlab::Params& p) : PromptTask(p), alpha_(p.get<Alpha>("alpha")) {}

  std::string metric() const override { return "contains_all"; }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    one_question(env, "the text has one answer");
    kvlab::Random random = this->random(index, env);
    auto words = kvlab::distinct(std::max(8, context() / 50), [&] { return random.letters(6, 'a'); });
    kvlab::Prompt prompt = open(env,
                                "Read the following coded text and track the frequency of each coded word. Find the "
                                "three most frequently appeared coded words.");
    prompt.ask(
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
        "frequently appeared words in the above coded text?",
        "Answer: According to the coded text above, the three most frequently appeared words are:",
        {words[1], words[2], words[3]}, max_new());
    words[0] = "...";
    int fit = 0, over = std::max(1, context());
    while (over - fit > 1) {
      const int middle = fit + (over - fit) / 2;
      (kvlab::length(env.encode_next(text(words, middle, random))) <= prompt.left() ? fit : over) = middle;
    }
    const auto count = [&](std::uint64_t rank) { return frequency(static_cast<std::uint64_t>(fit), rank, alpha_); };
    if (count(2) == count(3) || count(3) == count(4) || count(4) == count(5))
      throw kvlab::Error(kvlab::Errc::config, "got context: " + std::to_string(context()) + ", wanted more: with " +
                                                  std::to_string(fit) +
                                                  " words the three most frequent ones are not apart");
    return prompt.finish(env.encode_next(text(words, fit, random)));
  }

 private:
  std::string text(const std::vector<std::string>& words, int count, kvlab::Random random) const {
    std::vector<std::string> all;
    for (std::size_t k = 0; k < words.size(); ++k)
      all.insert(all.end(), frequency(static_cast<std::uint64_t>(count), k + 1, alpha_), words[k]);
    random.shuffle(all);
    return " " + kvlab::joined(all, " ");
  }

  Alpha alpha_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<FrequentWords>("frequent_words", "the three most frequent words of a coded text", 4096,
                                               50)
                 .param("alpha", Alpha::two, "exponent of the zeta distribution: smaller = less far apart"))
