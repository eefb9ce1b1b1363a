// Rows as a factorisation of low rank would give them back, for Edits::rewrite. ops.hpp says what holds for every op.
// Rows are those of kvlab/rewrite.hpp: [row, kv_head, token, head_dim] in f32, contiguous along head_dim.
#pragma once
#include "kvlab/kv.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// Memory for the directions of several layers' rows, for a policy that takes them at a prompt's end. With w = kv_heads
// * head_dim, a layer has two matrices [w, w] and six vectors [w], all f64.
struct RankDirections {
  View<double, 3> products;  // [layer, w, w] X^T X, then the op's own
  View<double, 3> vectors;   // [layer, vector, w] eigenvectors
  View<double, 3> numbers;   // [6, layer, w] the op's own

  static constexpr std::size_t bytes(std::int64_t layers, std::int64_t w) {
    return static_cast<std::size_t>(layers * w * (2 * w + 6)) * sizeof(double);
  }
  // Of memory of so many bytes.
  static RankDirections in(void* memory, std::int64_t layers, std::int64_t w) {
    auto* data = static_cast<double*>(memory);
    const std::int64_t all = layers * w * w;
    return {View<double, 3>::dense(data, {layers, w, w}), View<double, 3>::dense(data + all, {layers, w, w}),
            View<double, 3>::dense(data + 2 * all, {6, layers, w})};
  }
};

}  // namespace kvlab

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

// The parts of low_rank that a prompt takes: kv has one row. A chain of steps makes a layer's eigenvectors. So all
// layers' directions are made together, at the prompt's end. A CPU thread or a GPU block takes a layer.

// directions.products[layer] = X^T X. Bytes: the rows.
void row_products(const PagedKv& kv, View<const float, 4> rows, const RankDirections& directions, int layer, Stream s);
// Makes all eigenvectors of all layers of `directions`. It changes their products. ops::factor_rows
// (kvlab/key_factors.hpp) reads them.
void rank_directions(const RankDirections& directions, Stream s);

}  // namespace kvlab::ops
