// References of the keys by channel of kvlab/key_copies.hpp.
#pragma once
#include <kvlab/key_copies.hpp>

namespace kvlab::ops {

void copy_channels_reference(const PagedKv& kv, int newest, const KeyChannels& channels);
void large_channels_reference(const PagedKv& kv, View<const float, 3> queries, int rank, bool norm_scale,
                              const IndexList& channels, View<float, 3> vectors);
void channel_dot_reference(const PagedKv& kv, View<const float, 3> vectors, const IndexList& channels,
                           const KeyChannels& copy, int newest, Scores out, Scores each = {});

}  // namespace kvlab::ops
