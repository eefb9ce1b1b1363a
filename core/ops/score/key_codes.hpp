// What both devices share of the codes of kvlab/key_copies.hpp, and the references.
#pragma once
#include <kvlab/key_copies.hpp>

#include "ops/score/range_codes.hpp"

namespace kvlab::ops {

constexpr int key_code_bits = 4;

void code_keys_reference(const PagedKv& kv, int newest, const KeyCodes& codes);

// coded_row_dot of listed entries, each of which stands for `unit` neighbouring places: a page, or a token.
void coded_entry_dot(const PagedKv& kv, View<const float, 3> vectors, const IndexList& list, int unit,
                     const KeyCodes& codes, Scores out, Stream s);
void coded_entry_dot_reference(const PagedKv& kv, View<const float, 3> vectors, const IndexList& list, int unit,
                               const KeyCodes& codes, Scores out);

}  // namespace kvlab::ops
