// Rows as a factorisation of low rank would give them back, for Edits::rewrite. ops.hpp says what holds for every op.
// Rows are those of kvlab/rewrite.hpp: [row, kv_head, token, head_dim] in f32, contiguous along head_dim.
#pragma once
#include "kvlab/kv.hpp"
#include "kvlab/stream.hpp"

namespace kvlab::ops {

// The rows of all KV heads at one place, side by side, are a row of X [token, kv_heads * head_dim]. A head that has no
// token there has zeros. The op replaces X by X V V^T. V holds the eigenvectors of X^T X with the `rank` greatest
// eigenvalues. No matrix of that rank is nearer to X (Eckart and Young 1936). A singular value decomposition of X gives
// the same. X^T X and its eigenvectors are f64: Householder's tridiagonal form, then implicit QL steps. The squared
// distance from X is at most 1e-6 of X's squared length above the least one. Where two eigenvalues at the rank are
// nearly equal, the devices may choose other vectors. rank = kv_heads * head_dim leaves all as it is. Rows that hold a
// NaN or an infinity become NaN, all of that batch row. 1 <= rank <= kv_heads * head_dim, else Errc::internal.
// With w = kv_heads * head_dim it multiplies about n w^2 + 6 w^3 times. One block of a GPU makes the tridiagonal form.
// A GPU takes w up to 4096: Errc::unsupported. Bytes: the rows, three times.
void low_rank(const PagedKv& kv, int rank, View<float, 4> rows, Stream s);

}  // namespace kvlab::ops
