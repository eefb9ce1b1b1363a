// The longest common subsequence of two texts of numbered words, 64 words at a time (Hyyro 2004).
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace rouge {

using Numbers = std::vector<int>;

// Takes the words of the other text one by one. Bit j of `open` is 0 where the subsequence of what it has taken and of
// a[0..j] is longer than that of a[0..j-1].
class Subsequence {
 public:
  explicit Subsequence(const Numbers& a) : open_((a.size() + 63) / 64, ~std::uint64_t{0}), match_(open_.size()) {
    for (std::size_t j = 0; j < a.size(); ++j) places_[a[j]].push_back(j);
  }
  void add(int word) {
    const auto places = places_.find(word);
    if (places == places_.end()) return;
    for (const std::size_t j : places->second) match_[j / 64] |= std::uint64_t{1} << (j % 64);
    std::uint64_t carry = 0;
    for (std::size_t k = 0; k < open_.size(); ++k) {
      const std::uint64_t hit = open_[k] & match_[k], sum = open_[k] + hit, more = sum + carry;
      carry = (sum < hit) | (more < carry);
      open_[k] = more | (open_[k] & ~hit);
      match_[k] = 0;
    }
  }
  const std::vector<std::uint64_t>& open() const { return open_; }
  std::size_t length() const {
    int zeros = 0;  // bits beyond the last word stay 1
    for (const std::uint64_t bits : open_) zeros += std::popcount(~bits);
    return static_cast<std::size_t>(zeros);
  }

 private:
  std::map<int, std::vector<std::size_t>> places_;  // of each word in a
  std::vector<std::uint64_t> open_, match_;
};

}  // namespace rouge
