// What a model's layers compute, in plain loops and double precision. Tests compare with it.
#pragma once
#include <cmath>
#include <vector>

#include "model/model.hpp"

namespace kvlab::test {

using Vector = std::vector<double>;

// Rows [from, to) of w times x.
inline Vector product(const ops::Linear& w, const Vector& x, std::int64_t from, std::int64_t to) {
  Vector y;
  std::vector<float> row(static_cast<std::size_t>(w.k()));
  for (std::int64_t n = from; n < to; ++n) {
    w.row(n, row.data());
    double sum = 0;
    for (std::size_t i = 0; i < row.size(); ++i) sum += double{row[i]} * x[i];
    y.push_back(sum);
  }
  return y;
}

inline Vector normed(const Vector& x, const std::vector<float>& weight, double eps) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  Vector out;
  for (std::size_t i = 0; i < x.size(); ++i)
    out.push_back(x[i] / std::sqrt(squares / static_cast<double>(x.size()) + eps) * double{weight[i]});
  return out;
}

// The queries of a layer for such an input of attention, one head after the other.
inline Vector queries_of(const Model& m, int layer, const Vector& input, int position) {
  const ModelLayer& l = m.layers[static_cast<std::size_t>(layer)];
  const auto dim = static_cast<std::size_t>(m.config.head_dim), half = dim / 2;
  Vector all = product(l.qkv, input, 0, std::int64_t{m.config.heads} * m.config.head_dim), out;
  for (std::size_t i = 0; !l.qkv_bias.empty() && i < all.size(); ++i) all[i] += double{l.qkv_bias[i]};
  for (std::size_t at = 0; at < all.size(); at += dim) {
    Vector q(all.begin() + static_cast<std::ptrdiff_t>(at), all.begin() + static_cast<std::ptrdiff_t>(at + dim));
    if (!l.query_norm.empty()) q = normed(q, l.query_norm, double{m.config.rms_eps});
    Vector turned(dim);
    for (std::size_t i = 0; i < half; ++i) {
      const double angle = position * double{m.inv_freq[i]}, c = std::cos(angle), s = std::sin(angle);
      turned[i] = q[i] * c - q[i + half] * s;
      turned[i + half] = q[i + half] * c + q[i] * s;
    }
    out.insert(out.end(), turned.begin(), turned.end());
  }
  return out;
}

inline void add(Vector& x, const Vector& y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

inline Vector embedded(const Model& m, int token) {
  std::vector<float> x(static_cast<std::size_t>(m.config.hidden));
  m.embed(token, x.data());
  return {x.begin(), x.end()};
}

// The queries that the next layer would have for this layer's input x, as LayerStep::next_queries says.
inline Vector queries_ahead(const Model& m, int layer, const Vector& x, int position) {
  const Vector input = normed(x, m.layers[static_cast<std::size_t>(layer)].input_norm, double{m.config.rms_eps});
  return queries_of(m, layer + 1, input, position);
}

// What follows attention: x becomes the next layer's input.
inline void finish_layer(const Model& m, int layer, const Vector& attended, Vector& x) {
  const ModelLayer& l = m.layers[static_cast<std::size_t>(layer)];
  add(x, product(l.output, attended, 0, l.output.n()));
  for (std::size_t i = 0; i < l.output_bias.size(); ++i) x[i] += double{l.output_bias[i]};
  const Vector gates = product(l.gate_up, normed(x, l.post_norm, double{m.config.rms_eps}), 0, l.gate_up.n());
  Vector wide;
  const std::size_t ffn = gates.size() / 2;
  for (std::size_t i = 0; i < ffn; ++i) wide.push_back(gates[i] / (1 + std::exp(-gates[i])) * gates[ffn + i]);
  add(x, product(l.down, wide, 0, l.down.n()));
}

}  // namespace kvlab::test
