// A long text: its first tokens are the prompt. The next ones are fed one by one, and their loss is measured.
#include <kvlab/plugin.hpp>

namespace {

class Text final : public kvlab::Task {
 public:
  explicit Text(const kvlab::Params& p)
      : file_(p.get<std::string>("file")),
        prefix_(p.get<int>("prefix")),
        forced_(p.get<int>("forced")),
        samples_(p.get<int>("samples")),
        bos_(p.get<bool>("bos")) {}

  std::string metric() const override { return "perplexity"; }
  int samples(const kvlab::TaskEnv& env) const override {
    opening(env);
    return samples_;
  }

  // Sample i of n begins after i / (n - 1) of the free tokens, so the first one at the text's beginning.
  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    if (env.questions() != 1)
      throw kvlab::Error(kvlab::Errc::config, "got questions: " + std::to_string(env.questions()) +
                                                  ", wanted 1: a text goes on in one way only");
    kvlab::TaskSample out;
    out.context = opening(env);
    const auto open = static_cast<std::int64_t>(out.context.size());
    const auto& text = tokens(env);
    const std::int64_t own = prefix_ - open, spare = static_cast<std::int64_t>(text.size()) - own - forced_;
    if (own < 0)
      throw kvlab::Error(kvlab::Errc::config,
                         "got prefix: " + std::to_string(prefix_) + ", wanted at least " + std::to_string(open));
    if (spare < samples_ - 1)
      throw kvlab::Error(kvlab::Errc::data,
                         "got a text of " + std::to_string(text.size()) + " tokens, wanted at least " +
                             std::to_string(own + forced_ + samples_ - 1) + " (prefix, forced, samples)",
                         file_);
    const auto first = text.begin() + (samples_ > 1 ? spare * index / (samples_ - 1) : 0);
    out.context.insert(out.context.end(), first, first + own);
    kvlab::TaskQuestion q;
    q.forced.assign(first + own, first + own + forced_);
    q.max_new_tokens = forced_;
    out.questions.push_back(std::move(q));
    return out;
  }

 private:
  // Tokens in front of the text.
  std::vector<int> opening(const kvlab::TaskEnv& env) const {
    if (!bos_) return env.text_open();
    auto bos = env.bos();
    if (bos.empty())
      throw kvlab::Error(kvlab::Errc::config, "got bos: true for a tokenizer that has no BOS token, wanted bos: false");
    return bos;
  }

  const std::vector<int>& tokens(const kvlab::TaskEnv& env) const {
    if (tokens_.empty()) tokens_ = env.encode(env.read_text(file_));
    return tokens_;
  }

  std::string file_;
  int prefix_, forced_, samples_;
  bool bos_;
  mutable std::vector<int> tokens_;  // read once
};

}  // namespace

KVLAB_PLUGIN(kvlab::task<Text>("text", "perplexity and fidelity on a long text, no answers")
                 .param("file", std::string("bundled/niah/haystack.txt"), "text file")
                 .param("prefix", 1024, 1, kvlab::any, "tokens that are prefilled, BOS among them")
                 .param("forced", 256, 1, kvlab::any, "tokens after them that are fed and scored one by one")
                 .param("samples", 1, 1, 100000, "places of the text to begin at, evenly spaced")
                 .param("bos", false, "BOS in front of every sample, also where the tokenizer adds none by itself"))
