#include "compose/row_coded.hpp"

#include <kvlab/error.hpp>
#include <kvlab/rewrite.hpp>
#include <kvlab/row_codec.hpp>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/half.hpp"
#include "base/stream_memory.hpp"
#include "compose/keeping.hpp"
#include "compose/repeat.hpp"

namespace kvlab {

std::uint16_t to_half(float x) { return float_to_half(x); }
float from_half(std::uint16_t bits) { return half_to_float(bits); }

namespace {

const RowCodec& rows_of(const Codec& codec) { return dynamic_cast<const RowCodec&>(codec); }

class RowCoded final : public KeepingPolicy {
 public:
  RowCoded(std::shared_ptr<Policy> of, Instance<Codec> codec, bool tiers)
      : KeepingPolicy(std::move(of), tiers), codec_(std::move(codec)), tiers_(tiers) {}

  // The host waits for each layer, so no graph holds a step.
  Needs needs() const override {
    return inner().needs().functional(true).capturable(false).observe_beside(false).chunked_prompts(false);
  }

  void attach(const Shape& shape, const BudgetAmount& amount, Workspace& w) override {
    dynamic_cast<RowCodec&>(*codec_).attach(shape);
    for (const KvSide side : {KvSide::key, KvSide::value})
      codes_[side == KvSide::value] = rows_of(*codec_).coded(side, shape.max_tokens) > 0;
    ForwardingPolicy::attach(shape, amount, w);
  }

  // What is exact stays on the device, beside what the method places there.
  Demand demand(int prompt, int max_new) const override {
    return tiers_ ? Demand{} : KeepingPolicy::demand(prompt, max_new);
  }

  void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
    Edits of_inner(kv.layer);
    KeepingPolicy::prefill(kv, of_inner, s);
    before_.assign(1, kv.position[0] - static_cast<int>(kv.chunk_queries.extent[2]));
    code(kv, edits, s);
    repeat_all(of_inner, edits, exact(kv, 0));
  }

  void select(const LayerStep& step, Edits& edits, Stream s) override {
    if (!tiers_) return KeepingPolicy::select(step, edits, s);
    Edits of_inner(step.layer);
    LayerStep with = step;
    with.final_list = nullptr;  // its pins are those of the selector, and a place edit has more
    KeepingPolicy::select(with, of_inner, s);
    repeat_all(of_inner, edits, exact(step, 1));
  }

  void observe(const LayerStep& step, Edits& edits, Stream s) override {
    Edits of_inner(step.layer);
    KeepingPolicy::observe(step, of_inner, s);
    before_.clear();
    for (int row = 0; row < step.rows(); ++row) before_.push_back(step.position[row] - 1);
    code(step, edits, s);
    repeat_all(of_inner, edits, exact(step, 0));
  }

 private:
  // The most newest tokens of a row that are no codes yet. The latest `unseen` ones have not passed through code().
  int exact(const LayerKv& kv, int unseen) const {
    int out = 0;
    for (int row = 0; row < kv.rows(); ++row)
      for (const KvSide side : {KvSide::key, KvSide::value})
        if (codes_[side == KvSide::value])
          out = std::max(out, kv.position[row] - rows_of(*codec_).coded(side, kv.position[row] - unseen));
    return out;
  }

  // The edits of the method, behind the rewrite of the callback: pages that leave have rows of codes.
  static void repeat_all(const Edits& from, Edits& to, int newest) {
    for (const Edit& e : from.all())
      if (e.verb == Edit::attend && e.resident)
        to.attend_resident(PageList{e.list}, e.pins);
      else if (e.verb == Edit::attend)
        to.attend(PageList{e.list}, e.pins);
      else if (e.verb == Edit::attend_tokens)
        to.attend(TokenList{e.list}, e.pins);
      else
        repeat(e, to, newest);
    for (const HeadLogits& logits : from.logits()) to.keep_logits(logits);
    for (const MadeUpTokens& tokens : from.made_up()) to.read_made_up(tokens);
    for (const auto& bias : from.biases()) to.bias_logits(bias);
    for (const int most : from.distances()) to.clamp_distance(most);
    for (const LeftOut& left_out : from.left_out()) to.fill_left_out(left_out);
  }

  struct Range {
    int first = 0, end = 0;  // tokens of a row that become codes
    std::int64_t count() const { return end - first; }
  };

  void code(const LayerKv& kv, Edits& edits, Stream s) {
    for (const KvSide side : {KvSide::key, KvSide::value}) {
      ranges_.clear();
      bool any = false;
      for (int row = 0; row < kv.rows(); ++row) {
        const auto& r = ranges_.emplace_back(Range{rows_of(*codec_).coded(side, before_[static_cast<std::size_t>(row)]),
                                                   rows_of(*codec_).coded(side, kv.position[row])});
        if (r.count() < 0)
          throw Error(Errc::plugin, "coded: got " + std::to_string(r.first) + " codes, then " + std::to_string(r.end) +
                                        " of more tokens, wanted no fewer");
        any = any || r.count() > 0;
      }
      if (!any) continue;
      const bool key = side == KvSide::key;
      std::int64_t most = 0;
      for (const Range& r : ranges_) most = std::max(most, r.count());
      const auto rows = kv.scratch<float>(key ? "rows of keys" : "rows of values",
                                          {kv.rows(), kv.kv_heads(), most, kv.pages.head_dim});
      const TokenRange range{numbers(kv, key ? "first keys" : "first values", [](const Range& r) { return r.first; }),
                             numbers(kv, key ? "keys" : "values", [](const Range& r) { return r.end - r.first; })};
      ops::read_range(key ? kv.keys : kv.values, range, rows, s);
      pass(side, rows, s);
      edits.rewrite(side, rows, range);
    }
  }

  // of(range) for each head of each row, where ops read it.
  template <class Of>
  View<const std::int32_t, 2> numbers(const LayerKv& kv, const char* tag, const Of& of) {
    of_heads_.clear();
    for (const Range& r : ranges_) of_heads_.insert(of_heads_.end(), static_cast<std::size_t>(kv.kv_heads()), of(r));
    return kv.upload_heads(tag, of_heads_.data());
  }

  // Brings the rows to the host, and what their codes give back to their places.
  void pass(KvSide side, View<float, 4> rows, Stream s) {
    const std::int64_t heads = rows.extent[1], dim = rows.extent[3];
    std::int64_t all = 0;
    for (const Range& r : ranges_) all += r.count() * heads * dim;
    numbers_.resize(static_cast<std::size_t>(all));
    const auto each = [&](const auto& with) {
      float* at = numbers_.data();
      for (std::size_t row = 0; row < ranges_.size(); ++row)
        for (std::int64_t head = 0; head < heads && ranges_[row].count() > 0; ++head) {
          with(at, &rows(static_cast<std::int64_t>(row), head, 0, 0), ranges_[row].count());
          at += ranges_[row].count() * dim;
        }
    };
    const auto bytes = [&](std::int64_t count) { return static_cast<std::size_t>(count * dim) * sizeof(float); };
    each([&](float* here, const float* there, std::int64_t count) { copy_memory(here, there, bytes(count), s); });
    synchronize(s);
    each([&](float* here, const float*, std::int64_t count) {
      const auto x = View<float, 2>::dense(here, {count, dim});
      rows_of(*codec_).decode(side, rows_of(*codec_).encode(side, x), x);
    });
    each([&](const float* here, float* there, std::int64_t count) { copy_memory(there, here, bytes(count), s); });
  }

  Instance<Codec> codec_;
  bool tiers_;          // pages of the method may lie on the host
  bool codes_[2] = {};  // whether a sequence may have codes of keys, of values
  // Buffers of one callback; they outlive it so that a decode step allocates little.
  std::vector<int> before_;             // [row] tokens that a sequence held before this prompt or step
  std::vector<Range> ranges_;           // [row]
  std::vector<float> numbers_;          // [row, head, token, head_dim] of the ranges
  std::vector<std::int32_t> of_heads_;  // [row, head]
};

}  // namespace

bool codes_rows(const Codec& codec) { return dynamic_cast<const RowCodec*>(&codec) != nullptr; }

std::shared_ptr<Policy> row_coded(std::shared_ptr<Policy> policy, Instance<Codec> codec) {
  const bool tiers = policy->needs().host_pages() || offloads(*policy);
  return std::make_shared<RowCoded>(std::move(policy), std::move(codec), tiers);
}

}  // namespace kvlab
