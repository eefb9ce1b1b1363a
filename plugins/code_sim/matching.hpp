// How alike two lines are: the two definitions of fuzzywuzzy's ratio.
#pragma once
#include <kvlab/unicode.hpp>

#include <array>
#include <map>
#include <vector>

namespace code_sim {

using kvlab::unicode::Text;

// Python's difflib: the longest run of equal characters, and then what is left of it and right of it (Ratcliff and
// Obershelp 1988). Of equally long runs the first in `a`, then the first in `b` counts. Where `b` has at least 200
// characters, those that make up more than one percent of it start no run.
class Difflib {
 public:
  Difflib(const Text& a, const Text& b) : a_(a), b_(b) {
    for (std::size_t j = 0; j < b.size(); ++j) places_[b[j]].push_back(j);
    if (b.size() >= 200) std::erase_if(places_, [&](const auto& p) { return p.second.size() > b.size() / 100 + 1; });
  }

  // The characters that match.
  std::size_t matches() const {
    std::size_t all = 0;
    std::vector<std::array<std::size_t, 4>> left{{0, a_.size(), 0, b_.size()}};
    while (!left.empty()) {
      const auto [a0, a1, b0, b1] = left.back();
      left.pop_back();
      const auto [i, j, size] = longest(a0, a1, b0, b1);
      if (size == 0) continue;
      all += size;
      left.push_back({a0, i, b0, j});
      left.push_back({i + size, a1, j + size, b1});
    }
    return all;
  }

 private:
  // The longest run within [a0, a1) and [b0, b1): its places and its size.
  std::array<std::size_t, 3> longest(std::size_t a0, std::size_t a1, std::size_t b0, std::size_t b1) const {
    std::size_t best_i = a0, best_j = b0, best = 0;
    std::map<std::size_t, std::size_t> runs;  // that end at the last character of a, by their end in b
    for (std::size_t i = a0; i < a1; ++i) {
      std::map<std::size_t, std::size_t> next;
      if (const auto at = places_.find(a_[i]); at != places_.end())
        for (const std::size_t j : at->second) {
          if (j < b0 || j >= b1) continue;
          const auto before = j == 0 ? runs.end() : runs.find(j - 1);
          const std::size_t size = next[j] = 1 + (before == runs.end() ? 0 : before->second);
          if (size > best) best_i = i + 1 - size, best_j = j + 1 - size, best = size;
        }
      runs = std::move(next);
    }
    while (best_i > a0 && best_j > b0 && a_[best_i - 1] == b_[best_j - 1]) --best_i, --best_j, ++best;
    while (best_i + best < a1 && best_j + best < b1 && a_[best_i + best] == b_[best_j + best]) ++best;
    return {best_i, best_j, best};
  }

  const Text &a_, &b_;
  std::map<char32_t, std::vector<std::size_t>> places_;  // of each character in b
};

inline double difflib_ratio(const Text& a, const Text& b) {
  return 2.0 * static_cast<double>(Difflib(a, b).matches()) / static_cast<double>(a.size() + b.size());
}

// python-Levenshtein: the distance counts insertions and deletions, so the longest common subsequence gives it.
inline double levenshtein_ratio(const Text& a, const Text& b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (const char32_t c : a) {
    std::size_t diagonal = 0;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t above = row[j + 1];
      row[j + 1] = c == b[j] ? diagonal + 1 : std::max(above, row[j]);
      diagonal = above;
    }
  }
  const std::size_t both = a.size() + b.size(), distance = both - 2 * row.back();
  return 1.0 - static_cast<double>(distance) / static_cast<double>(both);
}

}  // namespace code_sim
