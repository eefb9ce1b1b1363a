// Rings of vectors that last: of each sequence the newest, at places that are numbered modulo the ring's length.
// ops.hpp says what holds for every op.
#pragma once
#include <cstdint>

#include "kvlab/kv.hpp"
#include "kvlab/stream.hpp"

namespace kvlab::ops {

// ring(slots[row], head, place[row], :) = rows(row, head, :), for kv's rows and all heads of `rows`. ring: [slot, head,
// place, i] in state memory. place: [row], memory of the stream's device. Vectors are contiguous.
void put_in_rings(const PagedKv& kv, View<const float, 3> rows, const std::int32_t* place, View<float, 4> ring,
                  Stream s);

}  // namespace kvlab::ops
