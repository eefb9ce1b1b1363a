// Random tokens that repeat: RazorAttention's probe for echo and induction heads. Tang et al., ICLR 2025.
#include <kvlab/plugin.hpp>
#include <kvlab/random.hpp>

namespace {

class RepeatedTokens final : public kvlab::Task {
 public:
  explicit RepeatedTokens(const kvlab::Params& p)
      : tokens_(p.get<int>("tokens")),
        repeats_(p.get<int>("repeats")),
        low_(p.get<int>("first_id")),
        ids_(p.get<std::size_t>("ids")),
        samples_(p.get<int>("samples")) {}

  std::string metric() const override { return "none"; }
  int samples(const kvlab::TaskEnv&) const override { return samples_; }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    kvlab::Random random(env.seed(), static_cast<std::uint64_t>(index));
    std::vector<int> once;
    for (int i = 0; i < tokens_; ++i) once.push_back(low_ + static_cast<int>(random.below(ids_)));
    kvlab::TaskSample out;
    out.context = env.bos();
    for (int i = 0; i < repeats_; ++i) out.context.insert(out.context.end(), once.begin(), once.end());
    out.questions.resize(1);
    out.questions[0].max_new_tokens = 1;
    return out;
  }

 private:
  int tokens_, repeats_, low_;
  std::size_t ids_;
  int samples_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::task<RepeatedTokens>("repeated_tokens", "random tokens, several times over; no score")
                 .param("tokens", 2500, 1, 1 << 20, "random tokens of a copy")
                 .param("repeats", 4, 1, 1024, "copies, behind the tokenizer's BOS if it has one")
                 .param("first_id", 10000, 0, 1 << 30, "lowest token id that is drawn")
                 .param("ids", 2500, 1, 1 << 30, "ids from it on that are drawn, all equally likely")
                 .param("samples", 1, 1, 1000000, "prompts"))
