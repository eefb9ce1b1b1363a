// Chunks of neighbouring keys as an index of a policy's own: each has a landmark, the mean of its keys. All of it stays
// on the stream's device. ops.hpp says what holds for every op.
#pragma once
#include <vector>

#include "kvlab/kv.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// The chunks of a layer's keys, in state memory. Chunk c of a head has the places [c * size, (c + 1) * size). Places
// behind the last chunk belong to none.
struct KeyChunks {
  View<float, 4> landmark;        // [slot, kv_head, chunk, head_dim]
  View<float, 3> cosine;          // [slot, kv_head, chunk] the least one of a key with the landmark
  View<std::int32_t, 3> outlier;  // [slot, kv_head, chunk] 0 or 1
  View<std::int32_t, 2> count;    // [slot, kv_head] chunks
  int size = 1;                   // tokens of a chunk
};

// Takes empty chunks in attach. Core saves, restores and clears them with the sequence.
class KeptChunks {
 public:
  KeptChunks() = default;
  KeptChunks(const char* tag, const Shape& s, int size, Workspace& w) {
    static_assert(sizeof(float) == sizeof(std::int32_t));
    const std::int64_t room = s.max_tokens / size, dim = s.head_dim, head = room * (dim + 2) + 1,
                       layer = head * s.kv_heads, slot = layer * s.layers;
    auto* data = static_cast<float*>(w.state(tag, static_cast<std::size_t>(slot) * sizeof(float), s.max_slots));
    for (int l = 0; l < s.layers; ++l) {
      float* at = data + l * layer;
      auto* numbers = reinterpret_cast<std::int32_t*>(at + room * (dim + 1));
      KeyChunks c;
      c.landmark = {at, {s.max_slots, s.kv_heads, room, dim}, {slot, head, dim, 1}};
      c.cosine = {at + room * dim, {s.max_slots, s.kv_heads, room}, {slot, head, 1}};
      c.outlier = {numbers, {s.max_slots, s.kv_heads, room}, {slot, head, 1}};
      c.count = {numbers + room, {s.max_slots, s.kv_heads}, {slot, head}};
      c.size = size;
      layers_.push_back(c);
    }
  }
  const KeyChunks& of(const LayerKv& kv) const { return layers_[static_cast<std::size_t>(kv.layer)]; }

 private:
  std::vector<KeyChunks> layers_;
};

namespace ops {

// Makes the chunks of every row's heads anew. A head of n tokens gets n / size - local chunks, rounded down and at
// least 0. A landmark is the mean of the chunk's keys as stored, added up in f64 in the order of places, and f32. The
// cosine with a vector of zeros is 0. The `outliers` chunks with the least cosines become outliers, or all if there are
// fewer. Both devices find the same bits. The cache must be in text order, as at a prompt's end. Keys must be stored as
// rotated: RopeRegime::cache_relative is Errc::unsupported. Bytes: the keys, twice.
void chunk_keys(const PagedKv& kv, int local, int outliers, const KeyChunks& chunks, Stream s);

// Each query head takes the softmax of scale * query . landmark, over the chunks that are no outliers. out[row,
// kv_head, chunk] = the greatest share of the group's query heads (GroupRule::max), or the mean. Other rules are
// Errc::unsupported. All is in f64. Outliers get 0. A NaN among the logits of a query head makes all other scores of
// its KV head NaN. Entries behind a head's chunks are left alone. queries: [row, query head, head_dim], contiguous
// along head_dim. Scratch: an f64 for each query head and chunk. Bytes: the landmarks, and the scratch three times.
void chunk_scores(const PagedKv& kv, View<const float, 3> queries, float scale, GroupRule rule, const KeyChunks& chunks,
                  Scores out, Workspace& w, Stream s);

// list = the tokens of outliers, those of the most(row, kv_head) best chunks that are no outliers, and all behind the
// chunks. scores: [row, kv_head, chunk]. An empty `scores` takes no chunks but outliers. list has room for every token
// of the head. Bytes: scores, and the list.
void chunk_tokens(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> most,
                  const KeyChunks& chunks, TokenList list, Stream s);

}  // namespace ops
}  // namespace kvlab
