// What both devices share of the op low_rank: QL steps, and the order of eigenvalues.
#pragma once
#include <kvlab/low_rank.hpp>

#include <cmath>
#include <vector>

#include "base/on_both.hpp"

namespace kvlab::ops {

// A Householder reflection I - beta v v^T that makes x all zeros but the first, which becomes `first`. `tail` is the
// sum of squares of x but x0. v is x but for v0.
struct Reflection {
  double first, v0, beta;

  KVLAB_ON_BOTH static Reflection of(double x0, double tail) {
    if (!(tail > 0)) return {x0, 0, 0};
    const double length = sqrt(x0 * x0 + tail), first = x0 > 0 ? -length : length, v0 = x0 - first;
    return {first, v0, 2 / (v0 * v0 + tail)};
  }
};

// Eigenvalues of a symmetric tridiagonal matrix by QL steps with Wilkinson's shift. Of EISPACK's tql2, by Bowdler,
// Martin, Reinsch and Wilkinson (1968). diagonal: [n], becomes the eigenvalues. beside: [n], of which the last is free.
struct QlSteps {
  static constexpr int most = 60;  // for one eigenvalue; seldom more than 3 are needed

  double *diagonal, *beside;
  double *cosine, *sine;  // [n] of a step's rotations
  int n;
  int low = 0, done = 0;
  int first = 0, last = -1;  // the step rotates columns i and i + 1 of the eigenvectors, i from last down to first

  // The next step, if there is one. (x_i, x_i+1) becomes (c x_i - s x_i+1, s x_i + c x_i+1).
  KVLAB_ON_BOTH bool next() {
    for (; low < n; ++low, done = 0) {
      int high = low;
      while (high < n - 1 && !small(high)) ++high;
      if (high == low || done == most) continue;
      ++done;
      step(high);
      return true;
    }
    return false;
  }

 private:
  KVLAB_ON_BOTH bool small(int i) const {
    return fabs(beside[i]) <= 2.220446049250313e-16 * (fabs(diagonal[i]) + fabs(diagonal[i + 1]));
  }
  KVLAB_ON_BOTH void step(int high) {
    const double half = (diagonal[low + 1] - diagonal[low]) / (2 * beside[low]), root = sqrt(half * half + 1);
    double g = diagonal[high] - diagonal[low] + beside[low] / (half + (half < 0 ? -root : root));
    double s = 1, c = 1, p = 0;
    last = high - 1;
    for (int i = last; i >= low; --i) {
      const double f = s * beside[i], b = c * beside[i], r = sqrt(f * f + g * g);
      beside[i + 1] = r;
      if (r == 0) {
        diagonal[i + 1] -= p;
        beside[high] = 0;
        first = i + 1;
        return;
      }
      s = f / r, c = g / r;
      g = diagonal[i + 1] - p;
      const double t = (diagonal[i] - g) * s + 2 * c * b;
      p = s * t;
      diagonal[i + 1] = g + p;
      g = c * t - b;
      cosine[i] = c, sine[i] = s;
    }
    first = low;
    diagonal[low] -= p;
    beside[low] = g;
    beside[high] = 0;
  }
};

// Whether eigenvalue a of index i comes before b of index j.
KVLAB_ON_BOTH inline bool is_greater(double a, int i, double b, int j) { return a > b || (a == b && i < j); }

// The projection sums the fewer vectors: those of the rank, or what is left out.
struct RankSide {
  bool takes_away;
  int first, count;  // of the eigenvectors by falling eigenvalue

  static RankSide of(int rank, int width) {
    return 2 * rank > width ? RankSide{true, rank, width - rank} : RankSide{false, 0, rank};
  }
};

void low_rank_reference(const PagedKv& kv, int rank, View<float, 4> rows);
// Eigenvalues of a symmetric matrix [n, n], falling, and their vectors [n][n], by Jacobi's rotations.
void eigen_reference(std::vector<double> matrix, int n, std::vector<double>& values, std::vector<double>& vectors);

}  // namespace kvlab::ops
