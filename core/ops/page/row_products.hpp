// Products of queries with the rows of a head, for plain versions of ops. A sum of doubles is in the order of the
// components, as in a loop over one row. All rows go on together, which takes a fraction of the time.
#pragma once
#include <vector>

namespace kvlab::ops {

class RowProducts {
 public:
  // rows: [row, component]
  RowProducts(const std::vector<float>& rows, int components)
      : rows_(rows.size() / static_cast<std::size_t>(components)),
        components_(static_cast<std::size_t>(components)),
        by_component_(rows.size()) {
    for (std::size_t row = 0; row < rows_; ++row)
      for (std::size_t d = 0; d < components_; ++d) by_component_[d * rows_ + row] = rows[row * components_ + d];
  }

  // query(d): component d of a query. Returns its product with each row.
  template <class Query>
  std::vector<double> with(const Query& query) const {
    std::vector<double> sums(rows_);
    std::size_t d = 0;
    for (; d + 4 <= components_; d += 4) {
      const double q[] = {query(d), query(d + 1), query(d + 2), query(d + 3)};
      const double* const y = by_component_.data() + d * rows_;
      for (std::size_t row = 0; row < rows_; ++row)
        sums[row] =
            sums[row] + q[0] * y[row] + q[1] * y[row + rows_] + q[2] * y[row + 2 * rows_] + q[3] * y[row + 3 * rows_];
    }
    for (; d < components_; ++d) {
      const double q = query(d);
      for (std::size_t row = 0; row < rows_; ++row) sums[row] += q * by_component_[d * rows_ + row];
    }
    return sums;
  }

 private:
  std::size_t rows_, components_;
  std::vector<double> by_component_;  // [component, row]
};

}  // namespace kvlab::ops
