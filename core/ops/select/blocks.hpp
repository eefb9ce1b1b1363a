// References of kvlab/blocks.hpp.
#pragma once
#include <kvlab/blocks.hpp>

namespace kvlab::ops {

inline constexpr int most_block = 65536;  // tokens

void add_block_mass_reference(const PagedKv& kv, View<const float, 3> mass, int newest, const KeyBlocks& blocks);
void make_blocks_reference(const PagedKv& kv, const BlockRule& rule, const KeyBlocks& blocks);
void turn_queries_reference(const PagedKv& kv, View<const float, 3> queries, int position, View<float, 3> out);
void mean_query_reference(const PagedKv& kv, View<const float, 4> queries, int position, View<float, 3> out);
void block_pages_reference(const PagedKv& kv, View<const float, 3> queries, const BlockRule& rule,
                           const std::int32_t* most, const KeyBlocks& blocks, PageList list);

}  // namespace kvlab::ops
