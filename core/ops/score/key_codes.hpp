// References of the codes of kvlab/key_copies.hpp, and how a key becomes codes.
#pragma once
#include <kvlab/key_copies.hpp>

#include "ops/page/codes.hpp"

namespace kvlab::ops {

constexpr CodecSide key_code_side{4};

// The scale of a key that reaches from `least` to `greatest`; 0 if there are no numbers or only equal ones.
constexpr float key_code_scale(float least, float greatest) {
  return least < greatest ? (greatest - least) / static_cast<float>(most_code(key_code_side.bits)) : 0.f;
}
constexpr std::uint32_t key_code(float x, float least, float scale) {
  return scale > 0 ? nearest_code(key_code_side, (x - least) / scale) : 0u;
}

void code_keys_reference(const PagedKv& kv, int newest, const KeyCodes& codes);

// coded_row_dot of listed entries, each of which stands for `unit` neighbouring places: a page, or a token.
void coded_entry_dot(const PagedKv& kv, View<const float, 3> vectors, const IndexList& list, int unit,
                     const KeyCodes& codes, Scores out, Stream s);
void coded_entry_dot_reference(const PagedKv& kv, View<const float, 3> vectors, const IndexList& list, int unit,
                               const KeyCodes& codes, Scores out);

}  // namespace kvlab::ops
