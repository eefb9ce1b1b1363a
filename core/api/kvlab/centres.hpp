// Choices of tokens by how far scores or keys lie apart. ops.hpp says what holds for every op.
#pragma once
#include "kvlab/kv.hpp"
#include "kvlab/stream.hpp"

namespace kvlab::ops {

// list = for each KV head, as ascending places, the tokens whose score is above least + (greatest - least) *
// (1 - share). Least and greatest are those of the head's tokens; NaN is neither, and is above nothing. So share 0
// gives none, and share 1 all but the least ones. The threshold is f64. 0 <= share <= 1. list has room for all tokens.
// Bytes: the scores, twice. The retained tokens of MiniCache.
void tokens_beyond(const PagedKv& kv, View<const float, 3> scores, double share, TokenList list, Stream s);

// Greedy k-center (Gonzalez 1985) over a head's keys or values, as the cache decodes them. nearest: [row, kv_head,
// token], in and out. A token with -inf there is left out: it is no centre. The first centre is the token with the
// greatest number there. Each next one is the token that lies farthest from its nearest centre. out[row, kv_head,
// token] = count - i for centre i of the `count` centres, and 0 for all other tokens. A head with fewer tokens ends
// early. On return `nearest` has squared distances to the nearest centre, and -inf for centres. They are summed in f64
// in the order of elements, and kept as f32. Keys must be stored as rotated: RopeRegime::cache_relative is
// Errc::unsupported. Bytes: that side of the layer's cache, once for each centre.
void farthest_first(const KvRows& rows, int count, Scores nearest, Scores out, Stream s);

}  // namespace kvlab::ops
