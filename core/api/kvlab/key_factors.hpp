// Factors of keys: what a policy keeps on the device in place of keys that lie on the host. They give the keys back in
// a low rank. All of it is memory of the stream's device. ops.hpp says what holds for every op.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvlab/error.hpp"
#include "kvlab/kv.hpp"
#include "kvlab/low_rank.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// The factors of a layer, in state memory. The key of a KV head at a place is RoPE, at the token's text position, of
// sum over q of tokens[q] * basis[q, kv_head, :]. The factors are those of all KV heads together. Numbers have the
// cache's dtype.
struct KeyFactors {
  DType dtype = DType::bf16;
  int rank = 0;
  std::int64_t row = 0;           // elements from one place's numbers to the next one's: whole 16 bytes
  std::byte* tokens = nullptr;    // [slot, place, row], of which the first `rank` of a row count
  std::byte* basis = nullptr;     // [slot, rank, kv_head * head_dim]
  std::int32_t* count = nullptr;  // [slot] places that have numbers; 0 = there are no factors
  std::uint8_t* whole = nullptr;  // [slot, kv_head, page] 1 = a token of the page keeps another key
  std::int64_t slot_bytes = 0;    // from one slot's to the next one's, of each of these
  int kv_heads = 0, pages = 0, places = 0;

  explicit operator bool() const { return tokens != nullptr; }
  constexpr std::int32_t& count_of(int slot) const { return count[slot * (slot_bytes / 4)]; }
  constexpr std::uint8_t* whole_of(int slot, int head) const {
    return whole + slot * slot_bytes + std::int64_t{head} * pages;
  }
  // Whether the factors give the keys of all tokens of a full page.
  constexpr bool cover(int slot, int head, int page, int page_size) const {
    return (page + 1) * page_size <= count_of(slot) && !whole_of(slot, head)[page];
  }
};

// Takes factors in attach, for prompts of up to max_tokens. Core saves, restores and clears them with the sequence.
class KeptKeyFactors {
 public:
  KeptKeyFactors() = default;
  KeptKeyFactors(const char* tag, const Shape& s, int rank, Workspace& w) {
    const int width = s.kv_heads * s.head_dim;
    if (rank < 1 || rank > width)
      throw Error(Errc::config, "got rank " + std::to_string(rank) + ", wanted 1 to " + std::to_string(width) +
                                    ", the elements of all KV heads' keys");
    const auto whole16 = [](std::int64_t bytes) { return (bytes + 15) / 16 * 16; };
    const auto element = static_cast<std::int64_t>(size_of(s.dtype));
    const std::int64_t row = whole16(rank * element), tokens = row * s.max_tokens,
                       basis = whole16(element * rank * width), flags = whole16(s.kv_heads * s.max_pages()),
                       layer = tokens + basis + flags + 16, slot = layer * s.layers;
    auto* data = static_cast<std::byte*>(w.state(tag, static_cast<std::size_t>(slot), s.max_slots));
    for (int l = 0; l < s.layers; ++l) {
      KeyFactors f;
      f.dtype = s.dtype;
      f.rank = rank;
      f.row = row / element;
      f.tokens = data + l * layer;
      f.basis = f.tokens + tokens;
      f.whole = reinterpret_cast<std::uint8_t*>(f.basis + basis);
      f.count = reinterpret_cast<std::int32_t*>(f.basis + basis + flags);
      f.slot_bytes = slot;
      f.kv_heads = s.kv_heads, f.pages = s.max_pages(), f.places = s.max_tokens;
      layers_.push_back(f);
    }
  }
  const KeyFactors& of(const LayerKv& kv) const { return layers_[static_cast<std::size_t>(kv.layer)]; }

 private:
  std::vector<KeyFactors> layers_;
};

namespace ops {

// Makes the factors of a prompt anew, those of its best rank (kvlab/low_rank.hpp). kv has one row. rows: its keys
// before RoPE. A place's numbers are its products with the layer's vectors, in f64, of the rank's greatest eigenvalues.
// The basis holds these vectors. Both are rounded to the factors' dtype. Keys that are not finite make the numbers NaN.
// exact: the tokens that keep other keys; their pages are marked. Bytes: the rows, and the factors.
void factor_rows(const PagedKv& kv, const RankDirections& directions, int layer, View<const float, 4> rows,
                 const TokenList& exact, const KeyFactors& factors, Stream s);

// rows[row, kv_head, token, :] = the keys that the factors give, in f32, of the places that have them. A sum goes over
// q in rising order, in f32. A place edit that names the factors stores the same bits, in the cache's dtype. Regimes
// but RopeRegime::original are Errc::unsupported. Every page must be on the device. Bytes: the factors, and the rows.
void rebuild_rows(const PagedKv& kv, const KeyFactors& factors, View<float, 4> rows, Stream s);

}  // namespace ops
}  // namespace kvlab
