// Blocks of neighbouring tokens as an index of a policy's own. Ops sum the attention of near queries, make vectors of
// blocks by it, and choose blocks. All of it stays on the stream's device. ops.hpp says what holds for every op.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvlab/kv.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// How a text is cut, in tokens. Block b has the places from first + b * block on. `first` and `block` are whole pages.
// All KV heads of a row hold the same tokens, in text order, and none leaves.
struct BlockRule {
  int first = 0;            // tokens in front of the first block
  int block = 128;          // tokens of a block, at most 65536
  int window = 4096;        // newest tokens, which are in no block
  int representatives = 4;  // tokens whose keys make the vector of a block, 1 to `block`
  bool unturned = false;    // vectors are of keys as RoPE found them: at text position 0

  // Blocks of a text of so many tokens.
  constexpr int blocks(int tokens) const {
    return static_cast<int>(std::max<std::int64_t>(0, std::int64_t{tokens} - first - window) / block);
  }
};

// The blocks of a layer, in state memory.
struct KeyBlocks {
  View<float, 4> key;          // [slot, query head, block, head_dim]
  View<float, 3> mass;         // [slot, query head, place]
  View<std::int32_t, 1> made;  // [slot] blocks that have vectors
};

// Takes no blocks and no mass in attach. Core saves, restores and clears them with the sequence.
class KeptBlocks {
 public:
  KeptBlocks() = default;
  KeptBlocks(const char* tag, const Shape& s, const BlockRule& rule, Workspace& w) {
    static_assert(sizeof(float) == sizeof(std::int32_t));
    const std::int64_t dim = s.head_dim, blocks = rule.blocks(s.max_tokens), keys = blocks * dim,
                       head = keys + s.max_tokens, layer = head * s.query_heads + 1, slot = layer * s.layers;
    auto* data = static_cast<float*>(w.state(tag, static_cast<std::size_t>(slot) * sizeof(float), s.max_slots));
    for (int l = 0; l < s.layers; ++l, data += layer) {
      KeyBlocks x;
      x.key = {data, {s.max_slots, s.query_heads, blocks, dim}, {slot, head, dim, 1}};
      x.mass = {data + keys, {s.max_slots, s.query_heads, s.max_tokens}, {slot, head, 1}};
      x.made = {reinterpret_cast<std::int32_t*>(data + head * s.query_heads), {s.max_slots}, {slot}};
      layers_.push_back(x);
    }
  }
  const KeyBlocks& of(const LayerKv& kv) const { return layers_[static_cast<std::size_t>(kv.layer)]; }

 private:
  std::vector<KeyBlocks> layers_;
};

namespace ops {

// blocks.mass(slot, query head, place) += mass(row, query head, place) for the `newest` newest places of the row; 0 =
// all. It reads no page. Bytes: mass, and what it is added to twice.
void add_block_mass(const PagedKv& kv, View<const float, 3> mass, int newest, const KeyBlocks& blocks, Stream s);

// Called for a prompt's chunk, after its attention. It adds to blocks.mass(slot, query head, place) the shares that the
// chunk's queries give the place. A query counts if the place is among the `newest` newest that it sees. A share is
// that of a softmax over all that it sees. All KV heads hold the row's whole text, in its order. With kv.lse each query
// meets these places alone, by tensor cores where rows have 16 bits and no codes and head_dim is 64 or 128. The softmax
// is then that of the logarithms, whatever they were made of. Without kv.lse it reads all keys twice for each 64
// queries. Bytes: the queries, and for each 8192 of them the keys that they see so.
void add_prompt_mass(const LayerPrefill& kv, int newest, const KeyBlocks& blocks, Stream s);

// Makes the vectors of all blocks that a row has by now and that have none. The `representatives` places of a block
// with the most mass represent it. The vector of a query head is the mean of their keys, summed in f64 in the order of
// places. Keys must be stored as rotated: RopeRegime::cache_relative is Errc::unsupported. With `unturned` it takes
// RopeRegime::original alone. It reads no page of another block. Bytes: mass and keys of these blocks, and their
// vectors.
void make_blocks(const PagedKv& kv, const BlockRule& rule, const KeyBlocks& blocks, Stream s);

// out[row, query head, d] = the query as it would be at text position `position`. queries: [row, query head, head_dim],
// contiguous along head_dim, of the row's newest token, whose text position is its place. Angles are f64. A regime but
// RopeRegime::original is Errc::unsupported. It reads no page. Bytes: queries and out.
void turn_queries(const PagedKv& kv, View<const float, 3> queries, int position, View<float, 3> out, Stream s);

// out[row, query head, d] = the mean of a chunk's queries, each as it would be at text position `position`, or with a
// negative one where it is. queries: [row, query head, i, head_dim], at least one, contiguous along head_dim, oldest
// first. The last one is that of the row's newest token, whose text position is its place. Angles and sums are f64. A
// regime but RopeRegime::original is Errc::unsupported. It reads no page. Bytes: queries and out.
void mean_query(const PagedKv& kv, View<const float, 4> queries, int position, View<float, 3> out, Stream s);

// list = for every KV head the same pages. They are those before the first block, those of the row's most[row] best
// blocks, and those behind the last block that has a vector. The score of a block is the sum of query . vector over all
// query heads, in f64, as f32. queries: [row, query head, head_dim], contiguous along head_dim. most: [row] memory of
// the stream's device. scores: [row, 1, block] scratch with room for all blocks. list has room for all pages. It reads
// no page. Bytes: the vectors.
void block_pages(const PagedKv& kv, View<const float, 3> queries, const BlockRule& rule, const std::int32_t* most,
                 const KeyBlocks& blocks, Scores scores, PageList list, Stream s);

}  // namespace ops
}  // namespace kvlab
