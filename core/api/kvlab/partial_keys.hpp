// Partial copies of keys as an index of a policy's own: a few channels of each key in 16 bits, and ops that score
// tokens by them alone. All of it stays on the stream's device. ops.hpp says what holds for every op.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kvlab/error.hpp"
#include "kvlab/kv.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// What the channels of a KV head are: [kv_head, channel, head_dim], contiguous along head_dim. Channel c of a vector is
// its product with direction c. Directions of length 1 at right angles keep the product of two vectors. Empty: channel
// c is element c.
using Directions = View<const float, 3>;

// The partial keys of a layer, in state memory. A row has the channels of one key as f16, in the order of the list.
struct PartialKeys {
  View<std::uint16_t, 4> rows;           // [slot, kv_head, place, i], contiguous along i
  View<const std::int32_t, 3> channels;  // [slot, kv_head, i]
  Directions directions;
};

// Takes rows in attach, for the layers from `first` on. Core saves, restores and clears them with the sequence.
class KeptPartialKeys {
 public:
  KeptPartialKeys() = default;
  // count: channels of a row. directions: [layer, kv_head, channel, head_dim], or empty.
  KeptPartialKeys(const char* tag, const Shape& s, int count, int first, const std::vector<float>& directions,
                  Workspace& w)
      : channels_((std::string(tag) + ": channels").c_str(), s, s.head_dim, w), count_(count) {
    static_assert(sizeof(float) == 4);
    const std::int64_t heads = s.kv_heads, dim = s.head_dim, of_layer = heads * dim * dim;
    if (count < 1 || count > s.head_dim)
      throw Error(Errc::config, "got partial keys of " + std::to_string(count) + " channels, wanted 1 to " +
                                    std::to_string(s.head_dim) + ", the elements of a key");
    if (!directions.empty() && static_cast<std::int64_t>(directions.size()) != s.layers * of_layer)
      throw Error(Errc::config, "got " + std::to_string(directions.size()) + " numbers of directions, wanted " +
                                    std::to_string(s.layers * of_layer) + ", a matrix for each KV head");
    // A token's row begins at a multiple of 16 bytes.
    const std::int64_t row = (count + 7) / 8 * 8, head = s.max_tokens * row, layer = heads * head,
                       slot = layer * (s.layers > first ? s.layers - first : 0);
    std::uint16_t* data = nullptr;
    if (slot > 0) data = static_cast<std::uint16_t*>(w.state(tag, static_cast<std::size_t>(2 * slot), s.max_slots));
    const auto* turned =
        directions.empty()
            ? nullptr
            : static_cast<const float*>(w.constant((std::string(tag) + ": directions").c_str(), directions.data(),
                                                   directions.size() * sizeof(float)));
    layers_.resize(static_cast<std::size_t>(s.layers));
    for (std::int64_t l = 0; l < s.layers; ++l) {
      PartialKeys& x = layers_[static_cast<std::size_t>(l)];
      if (turned) x.directions = Directions::dense(turned + l * of_layer, {heads, dim, dim});
      if (l >= first)
        x.rows = {data + (l - first) * layer, {s.max_slots, heads, s.max_tokens, count}, {slot, head, row, 1}};
    }
  }
  // The list of channels, with room for all of them. The policy fills it before it copies keys.
  TokenList channels(const LayerKv& kv) const { return channels_.of(kv); }
  PartialKeys of(const LayerKv& kv) const {
    PartialKeys x = layers_[static_cast<std::size_t>(kv.layer)];
    x.channels = channels_.of(kv).index;
    x.channels.extent[2] = count_;
    return x;
  }

 private:
  KeptTokens channels_;
  int count_ = 0;
  std::vector<PartialKeys> layers_;
};

namespace ops {

// ops::add_magnitudes (kvlab/speculation.hpp) of channels that have directions: sums(slot, kv_head, c) += the sum of
// |channel c of q| over the queries of the group. A channel is added up in f32, and the sum in f64. queries: [row,
// query head, i, head_dim], f32, contiguous along head_dim. sums: [slot, kv_head, channel]. It reads no page. Scratch:
// head_dim f64 for each KV head and 256 queries. Bytes: queries, and sums twice; head_dim^2 multiplications for each.
void add_channel_magnitudes(const PagedKv& kv, const Tensor<4>& queries, Directions directions, View<float, 3> sums,
                            Workspace& w, Stream s);

// Writes the partial keys of the `newest` last places of every row's heads, or of all if there are fewer. A channel is
// added up in f64, in the order of elements, and rounded to f32 and then to f16: both devices find the same bits. What
// is beyond 65504 becomes that; NaN stays NaN. A channel outside 0 to head_dim - 1 is Errc::internal on the CPU. Keys
// must be stored as rotated: RopeRegime::cache_relative is Errc::unsupported. Bytes: these keys once, and the rows.
void copy_partial_keys(const PagedKv& kv, int newest, const PartialKeys& keys, Stream s);

// out[row, kv_head, token] = factor times the greatest product of a partial key with the same channels of a query of
// the group, factor > 0. The `newest` last places get +inf whatever their rows hold, and every other token must have
// its partial key. NaN counts as -inf. queries: [row, query head, head_dim], contiguous along head_dim. A query's
// channels are added up in f64 and rounded to f32, products in f32. It reads no page, so kv may be a layer's that holds
// the same tokens at the same places. Scratch: the channels of each query head. Bytes: the partial keys, and out.
void partial_scores(const PagedKv& kv, View<const float, 3> queries, const PartialKeys& keys, float factor, int newest,
                    Scores out, Workspace& w, Stream s);

// out = the pages that hold a listed token, ascending. The `newest` last places count for nothing: another layer may
// not hold them yet. It reads no page. Bytes: the list, and out.
void token_pages(const PagedKv& kv, const TokenList& tokens, int newest, PageList out, Stream s);

}  // namespace ops
}  // namespace kvlab
