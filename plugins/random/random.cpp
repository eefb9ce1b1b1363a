// Random eviction: the control of every scorer. Each KV head keeps tokens that a hash draws, whatever they hold.
//
// "Seeded per sequence": parameter `seed`, number of the sample, layer, KV head and text position decide a token's
// draw. A repeat keeps the same tokens, and neither slot nor batch matters. A draw lasts, so at any time all tokens
// that a head has seen are equally likely to be there. With `redraw` each eviction draws anew: all tokens that are
// there are equally likely to leave, so old ones are rarer.
#include <kvlab/plugin.hpp>
#include <kvlab/random.hpp>

#include <limits>

namespace {

class RandomEviction final : public kvlab::Scorer {
 public:
  explicit RandomEviction(const kvlab::Params& p)
      : seed_(p.get<std::uint64_t>("seed")),
        keep_prompt_(p.get<bool>("keep_prompt")),
        redraw_(p.get<bool>("redraw")),
        pins_{.first = p.get<int>("sinks"), .last = p.get<int>("recent")},
        every_(p.get<int>("every")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.capturable(true); }
  kvlab::Pins pins(int tokens) const override {
    const int last = std::min(pins_.last, std::max(0, tokens - pins_.first));
    return {.first = pins_.first, .last = last};
  }
  // An eviction at the prompt's end finds no token that may leave, where the prompt stays.
  int every() const override { return keep_prompt_ ? std::max(1, every_) : every_; }

  void attach(const kvlab::Shape&, const kvlab::BudgetAmount& amount, kvlab::Workspace&) override {
    if (keep_prompt_ && amount.kind == kvlab::BudgetAmount::ratio && amount.value < 1)
      throw kvlab::Error(kvlab::Errc::config,
                         "got keep_prompt with a budget that is a share of the tokens, wanted tokens or bytes that "
                         "hold the prompt");
  }

  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    keys_.clear();
    for (int row = 0; row < kv.rows(); ++row) {
      const std::uint64_t time = redraw_ ? static_cast<std::uint64_t>(kv.position[row]) : 0;
      const std::uint64_t sequence = kvlab::Random(seed_, kv.sequence[row]).next();
      keys_.push_back(kvlab::Random(sequence, time << 32 | static_cast<std::uint32_t>(kv.layer)).next());
    }
    kvlab::ops::random_scores(kv.pages, kv.upload("keys of draws", keys_.data()), out, s);
    for (int row = 0; keep_prompt_ && row < kv.rows(); ++row) keep_prompt(kv, row, out, s);
  }

 private:
  // The prompt is what came before the first decode step.
  static void keep_prompt(const kvlab::LayerKv& kv, int row, kvlab::Scores out, kvlab::Stream s) {
    const int prompt = kv.chunk_queries ? kv.position[row] : kv.position[row] - kv.step[row] - 1;
    if (kv.budget_tokens(row) < prompt)
      throw kvlab::Error(kvlab::Errc::config, "got a budget of " + std::to_string(kv.budget_tokens(row)) +
                                                  " tokens, wanted at least the " + std::to_string(prompt) +
                                                  " of the prompt: keep_prompt keeps them all");
    kvlab::PagedKv one = kv.pages;
    one.slots += row;
    one.rows = 1;
    out.data += row * out.stride[0];
    out.extent[0] = 1;
    kvlab::ops::set_pinned(one, {.first = prompt}, std::numeric_limits<float>::infinity(), out, s);
  }

  std::uint64_t seed_;
  bool keep_prompt_, redraw_;
  kvlab::Pins pins_;
  int every_;
  std::vector<std::uint64_t> keys_;  // [row]
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<RandomEviction>("random", "keeps random tokens of each KV head: the control of every scorer")
                 .param("seed", 0, 0, kvlab::any, "of the draws, beside the sample's number")
                 .param("keep_prompt", false, "the prompt stays, and generated tokens alone are drawn")
                 .param("redraw", false, "each eviction draws anew, so old tokens are rarer; off = a draw lasts")
                 .param("sinks", 0, 0, 1024, "first tokens that are always kept, part of the budget")
                 .param("recent", 0, 0, kvlab::any,
                        "newest tokens that stay, as many as the budget holds beside the sinks")
                 .param("every", 0, 0, kvlab::any,
                        "decode steps between evictions, 0 = the prompt only; with keep_prompt every step"))
