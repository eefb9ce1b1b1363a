// MiniCache: two neighbouring layers share the direction of a token's key, and of its value. Liu et al., NeurIPS 2024.
#include <kvlab/centres.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/rewrite.hpp>

#include <algorithm>
#include <cmath>

namespace {

enum class Retained : std::uint8_t { threshold, count };

}  // namespace

template <>
struct kvlab::Choices<Retained> {
  static constexpr std::pair<Retained, const char*> all[] = {{Retained::threshold, "threshold"},
                                                             {Retained::count, "count"}};
};

namespace {

using kvlab::KvSide;

class MiniCache final : public kvlab::Policy {
 public:
  explicit MiniCache(const kvlab::Params& p)
      : start_(p.get<double>("start")),
        t_(p.get<double>("t")),
        exact_(p.get<double>("exact")),
        counts_(p.get<Retained>("retained") == Retained::count) {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.finish_prompt(true).own_amount(true).functional(true).capturable(true);
  }

  void attach(const kvlab::Shape& s, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    layers_ = s.layers;
    if (layers_ < 2)
      throw kvlab::Error(kvlab::Errc::config, "got a model of one layer, wanted two or more: layers share in pairs");
    first_ = std::min(static_cast<int>(s.layers * start_), layers_ - 2);
    const std::int64_t side = std::int64_t{s.kv_heads} * s.max_tokens * s.head_dim;
    auto* data = static_cast<float*>(w.room("rows of a layer", static_cast<std::size_t>(2 * side) * sizeof(float)));
    for (const int i : {0, 1})
      former_[i] = kvlab::View<float, 4>::dense(data + i * side, {1, s.kv_heads, s.max_tokens, s.head_dim});
  }

  // A prompt has one row, and its callbacks of all layers come one after the other.
  void finish_prompt(const kvlab::LayerKv& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    const int of_pair = kv.layer - first_;
    if (of_pair < 0 || (of_pair % 2 == 0 && kv.layer + 1 == layers_)) return;
    const bool second = of_pair % 2 == 1;
    kvlab::View<const std::int32_t, 2> stay;  // tokens of each head
    if (second && counts_) {
      const std::vector<std::int32_t> keep(static_cast<std::size_t>(kv.kv_heads()),
                                           static_cast<std::int32_t>(std::ceil(exact_ * kv.position[0])));
      stay = kv.upload_heads("how many stay", keep.data());
    }
    for (const int i : {0, 1}) {
      const kvlab::KvRows& rows = i ? kv.values : kv.keys;
      if (second)
        merge(kv, rows, former_[i], stay, edits, s);
      else
        kvlab::ops::read_rows(rows, former_[i], s);
    }
  }

 private:
  void merge(const kvlab::LayerKv& kv, const kvlab::KvRows& rows, kvlab::View<float, 4> former,
             kvlab::View<const std::int32_t, 2> stay, kvlab::Edits& edits, kvlab::Stream s) const {
    const bool key = rows.side == KvSide::key;
    const auto own =
        kv.scratch<float>(key ? "keys" : "values", {kv.rows(), kv.kv_heads(), kv.max_length, kv.pages.head_dim});
    kvlab::ops::read_rows(rows, own, s);
    const kvlab::Scores distance = kv.kv_head_scores("distances");
    kvlab::ops::row_distance(kv.pages, former, own, distance, s);
    const auto exact = kv.list<kvlab::TokenList>("exact tokens", kv.max_length);
    if (counts_)
      kvlab::ops::top_tokens(kv.pages, distance, stay, nullptr, exact, s);
    else
      kvlab::ops::tokens_beyond(kv.pages, distance, exact_, exact, s);
    kvlab::ops::merge_rows(kv.pages, static_cast<float>(t_), exact, former, own, s);
    edits.for_layer(kv.layer - 1);
    edits.rewrite(rows.side, former);
    edits.for_layer(kv.layer);
    edits.rewrite(rows.side, own);
  }

  double start_, t_, exact_;
  bool counts_;
  int layers_ = 0, first_ = 0;
  kvlab::View<float, 4> former_[2];  // keys and values of a pair's first layer
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<MiniCache>("minicache",
                                      "two layers share the directions of a prompt's keys and values (Liu et al. "
                                      "2024). Functional: it saves no bytes")
                 .param("start", 0.5, 0, 1,
                        "share of the layers before the first pair, which is at the latest the last two")
                 .param("t", 0.6, 0, 1, "how near a pair's direction is to that of the deeper layer")
                 .param("exact", 0.05, 0, 1,
                        "the most distant tokens of each head stay as they are: this share of the range of distances, "
                        "or of the tokens")
                 .param("retained", Retained::threshold,
                        "threshold: what lies in that share of the range between a head's least and greatest distance; "
                        "count: that share of its tokens"))
