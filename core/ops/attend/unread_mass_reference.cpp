#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/attend/unread_mass.hpp"
#include "ops/page/reference.hpp"

namespace kvlab::ops {

void unread_mass_reference(const UnreadMass& a) {
  const std::int64_t heads = a.kv.kv_heads, group = a.mass.extent[1] / heads;
  for (int row = 0; row < a.kv.rows; ++row)
    for (int h = 0; h < heads; ++h) {
      const int n = a.kv.tokens(row, h), total = a.last[row] + 1;
      std::vector<std::int32_t> position(static_cast<std::size_t>(n));
      token_positions_reference(a.kv, row, h, n, position.data());
      a.nonfinite(row, h) = 0;
      for (std::int64_t p = 0; p < a.read.extent[2]; ++p) {
        double sums[2] = {0, 0};
        std::int32_t any = 0;
        for (std::int64_t at = p * a.page; at < std::min<std::int64_t>(total, (p + 1) * a.page); ++at) {
          bool read = false;
          for (int t = 0; t < n; ++t) {
            if (position[static_cast<std::size_t>(t)] != at) continue;
            bool listed = !a.pages && !a.tokens;
            for (int i = 0; a.pages && i < a.pages->count(a.pages->at(row), h); ++i)
              listed |= a.pages->index(a.pages->at(row), h, i) == t / a.kv.page_size;
            for (int i = 0; a.tokens && i < a.tokens->count(a.tokens->at(row), h); ++i)
              listed |= a.tokens->index(a.tokens->at(row), h, i) == t;
            read |= listed && (a.window == 0 || total - at <= a.window);
          }
          any |= read;
          for (std::int64_t g = 0; g < group; ++g) {
            const double x = a.mass(row, h * group + g, at);
            a.nonfinite(row, h) += !std::isfinite(x);
            sums[0] += x;
            if (!read) sums[1] += x;
          }
        }
        a.sums(row, h, p, 0) = sums[0], a.sums(row, h, p, 1) = sums[1], a.read(row, h, p) = any;
      }
    }
}

}  // namespace kvlab::ops
