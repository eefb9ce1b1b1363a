// A pass key of five digits in lines of noise: InfiniteBench's Retrieve.PassKey (Zhang et al. 2024, after Mohtashami
// and Jaggi 2023). The wording is the one for base models; its last line opens the answer. Score: 1 if the answer's
// first integer is the key.
#include <kvlab/prompt.hpp>

namespace {

class Passkey final : public kvlab::PromptTask {
 public:
  explicit Passkey(const kvlab::Params& p)
      : PromptTask(p), depths_(p.get<int>("depth")), digits_(p.get<int>("digits")) {}

  int samples(const kvlab::TaskEnv&) const override { return depths_ * per_depth(); }
  std::string metric() const override { return "first_integer"; }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    one_question(env, "there is one pass key");
    kvlab::Random random = this->random(index, env);
    const std::string key = random.digits(digits_);
    kvlab::Prompt prompt =
        open(env,
             "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
             "them. I will quiz you about the important information there.\n");
    prompt.ask("\n\nWhat is the pass key?\n\n", "The pass key is", {key}, max_new());
    const kvlab::Tokens fact =
        env.encode_next("\nThe pass key is " + key + ". Remember it. " + key + " is the pass key.");
    const kvlab::Haystack noise(kvlab::noise_line, kvlab::Haystack::Cut::lines);
    const auto hay = noise.take(0, prompt.room(kvlab::length(fact), "the pass key"), env);
    return prompt.finish(kvlab::hidden(hay, {fact}, {depth(index, depths_)}));
  }

 private:
  int depths_, digits_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<Passkey>("passkey", "a pass key hidden in lines of noise", 4096, 16)
                 .param("depth", 5, 1, 1000, "number of depths, evenly from 0 to 100 %; 1 = the middle")
                 .param("digits", 5, 1, 100, "of the pass key"))
