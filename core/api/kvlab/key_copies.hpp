// Copies of keys as indices of a policy's own. Codes of 4 bits estimate logits. Of keys by channel a query reads a few
// channels. All of it stays on the stream's device. ops.hpp says what holds for every op.
//
// A copy goes by place. So it suits policies that move and evict nothing. The policy has every prompt chunk's and every
// step's newest keys copied. Keys must be stored as rotated: RopeRegime::cache_relative is Errc::unsupported.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvlab/dtype.hpp"
#include "kvlab/kv.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// A layer's keys in 4 bits, in state memory. Element e of a key is about least + scale * code, where scale is
// (greatest - least) / 15 over the key's elements. Its code lies at bit 4 * e of the row, little end first. All of it
// is f32, which decides ties. So the copy gives what ops::listed_row_dot gives with 4 bits. NaN becomes code 0.
struct KeyCodes {
  View<std::uint8_t, 4> code;  // [slot, kv_head, place, head_dim / 2]
  View<float, 4> range;        // [slot, kv_head, place, 2] least, scale
};

// Takes codes in attach, of these layers alone. Core saves, restores and clears them with the sequence. A token takes
// head_dim / 2 + 8 bytes of each KV head.
class KeptKeyCodes {
 public:
  KeptKeyCodes() = default;
  KeptKeyCodes(const char* tag, const Shape& s, const std::vector<int>& of_layers, Workspace& w)
      : layers_(static_cast<std::size_t>(s.layers)) {
    // Codes of a head begin at a multiple of 16 bytes.
    const std::int64_t heads = s.kv_heads, tokens = s.max_tokens, row = s.head_dim / 2,
                       codes = (tokens * row + 15) / 16 * 16, head = (codes + 8 * tokens + 15) / 16 * 16,
                       slot = heads * head * static_cast<std::int64_t>(of_layers.size());
    auto* data = static_cast<std::uint8_t*>(w.state(tag, static_cast<std::size_t>(slot), s.max_slots));
    for (const int l : of_layers) {
      KeyCodes& x = layers_[static_cast<std::size_t>(l)];
      x.code = {data, {s.max_slots, heads, tokens, row}, {slot, head, row, 1}};
      x.range = {reinterpret_cast<float*>(data + codes), {s.max_slots, heads, tokens, 2}, {slot / 4, head / 4, 2, 1}};
      data += heads * head;
    }
  }
  const KeyCodes& of(const LayerKv& kv) const { return layers_[static_cast<std::size_t>(kv.layer)]; }

 private:
  std::vector<KeyCodes> layers_;
};

// A layer's keys by channel, in the run's dtype, in state memory: [slot, kv_head, block, channel, place in its block].
// So a few channels of many keys are a few runs of memory. Strides are bytes.
struct KeyChannels {
  static constexpr std::int64_t block = 256;  // places

  std::byte* data = nullptr;
  DType dtype = DType::bf16;
  std::int64_t slots = 0, kv_heads = 0, blocks = 0, head_dim = 0;
  std::int64_t slot_stride = 0, head_stride = 0;

  constexpr std::int64_t channel_stride() const { return block * static_cast<std::int64_t>(size_of(dtype)); }
  // Where a channel of block b begins.
  constexpr std::byte* at(std::int64_t slot, std::int64_t head, std::int64_t b, std::int64_t channel) const {
    return data + slot * slot_stride + head * head_stride + (b * head_dim + channel) * channel_stride();
  }
};

// Takes keys by channel in attach, of these layers alone. Core saves, restores and clears them with the sequence. They
// take what the layers' keys take, in whole blocks.
class KeptKeyChannels {
 public:
  KeptKeyChannels() = default;
  KeptKeyChannels(const char* tag, const Shape& s, const std::vector<int>& of_layers, Workspace& w)
      : layers_(static_cast<std::size_t>(s.layers)) {
    KeyChannels x;
    x.dtype = s.dtype, x.slots = s.max_slots, x.kv_heads = s.kv_heads, x.head_dim = s.head_dim;
    x.blocks = (s.max_tokens + KeyChannels::block - 1) / KeyChannels::block;
    x.head_stride = x.blocks * x.head_dim * x.channel_stride();
    x.slot_stride = x.kv_heads * x.head_stride * static_cast<std::int64_t>(of_layers.size());
    x.data = static_cast<std::byte*>(w.state(tag, static_cast<std::size_t>(x.slot_stride), s.max_slots));
    for (const int l : of_layers) {
      layers_[static_cast<std::size_t>(l)] = x;
      x.data += x.kv_heads * x.head_stride;
    }
  }
  const KeyChannels& of(const LayerKv& kv) const { return layers_[static_cast<std::size_t>(kv.layer)]; }

 private:
  std::vector<KeyChannels> layers_;
};

// The layers from `first` on.
inline std::vector<int> layers_from(int first, const Shape& s) {
  std::vector<int> layers;
  for (int l = first; l < s.layers; ++l) layers.push_back(l);
  return layers;
}

namespace ops {

// Codes the keys at the `newest` last places of every row's heads, or all of a shorter head. Bytes: these keys, and
// their codes.
void code_keys(const PagedKv& kv, int newest, const KeyCodes& codes, Stream s);

// out[row, query head, i] = vectors[row, query head, :] . x, where x is what the codes give of the key of candidate i.
// Candidates are the tokens of the listed pages: candidate i has offset i % page_size in entry i / page_size of the
// list. -inf where the last page has no such token. Entries past the candidates stay as they are. `out` has room for
// all candidates, else Errc::internal on the CPU; a GPU leaves the rest out. Heads may be KV heads. Vectors are
// contiguous along head_dim. A GPU may take each element of a vector with an error of up to 2^-18 of it. It reads no
// page. Bytes: the candidates' codes, and out.
void coded_row_dot(const PagedKv& kv, View<const float, 3> vectors, const PageList& pages, const KeyCodes& codes,
                   Scores out, Stream s);
// The same for listed tokens: candidate i is entry i of the list.
void coded_row_dot(const PagedKv& kv, View<const float, 3> vectors, const TokenList& tokens, const KeyCodes& codes,
                   Scores out, Stream s);

// list = for each KV head, as ascending places, the candidates that one of its heads of `logits` takes, and the head's
// `newest` last places. Candidates and logits are those of coded_row_dot. A head's weights are exp(logit / temperature)
// over its candidates. It takes the fewest candidates, best first, whose weights add up to `p` of their sum; see
// top_p_tokens. NaN counts as -inf. 0 < p <= 1, temperature > 0. list has room for all tokens that it gets. Sums are in
// f64. Bytes: the logits.
void top_p_candidates(const PagedKv& kv, View<const float, 3> logits, const PageList& pages, float temperature, float p,
                      int newest, TokenList list, Stream s);
void top_p_candidates(const PagedKv& kv, View<const float, 3> logits, const TokenList& tokens, float temperature,
                      float p, int newest, TokenList list, Stream s);

// Copies the keys at the `newest` last places of every row's heads, or all of a shorter head. Keys that are stored as
// codes are decoded, and rounded to the copy's dtype. Bytes: these keys, twice.
void copy_channels(const PagedKv& kv, int newest, const KeyChannels& channels, Stream s);

// For each KV head the `rank` channels in which its query heads are largest: by the sum of their magnitudes. Ties go to
// the lower channel. vectors[row, kv_head, d] = sum over the group of the query's element d, in these channels, and 0
// in all others. norm_scale divides each query head by sqrt(head_dim * share) first. The share is what these channels
// have of the sum of its magnitudes (Ribar et al. 2024). A query of zeros stays so. Vectors of query heads get each its
// own elements, not the sum. channels: the list, with room for `rank`. queries: [row, query head, head_dim], contiguous
// along head_dim. Sums are in f64. Bytes: queries and vectors.
void large_channels(const PagedKv& kv, View<const float, 3> queries, int rank, bool norm_scale,
                    const IndexList& channels, View<float, 3> vectors, Stream s);

// out[row, kv_head, token] = the sum over the listed channels d of vectors[row, kv_head, d] * element d of the key, as
// copied. The `newest` last places get +inf. It reads no page. Bytes: the listed channels of all tokens, and out.
// With `each`, vectors are of query heads. each[row, query head, token] is a query head's product, the newest places
// included, and out the sum over the group. Bytes: each, too.
void channel_dot(const PagedKv& kv, View<const float, 3> vectors, const IndexList& channels, const KeyChannels& copy,
                 int newest, Scores out, Stream s, Scores each = {});

}  // namespace ops
}  // namespace kvlab
