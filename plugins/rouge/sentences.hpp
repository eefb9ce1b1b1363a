// ROUGE-L as the package `rouge` counts it (summary level, exclusive), which LongBench uses (Bai et al. 2024). On long
// sentences that package runs out of stack, and LongBench gives 0; here they are scored.
#pragma once
#include <kvlab/unicode.hpp>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "subsequence.hpp"

namespace rouge {

using kvlab::unicode::Text;

// Sentences end at every full stop. One of white space alone has the empty word.
inline std::vector<Numbers> sentences(const std::string& text, std::map<Text, int>& known) {
  std::vector<Numbers> out;
  for (const Text& sentence : kvlab::unicode::split(kvlab::unicode::from_utf8(text), U'.')) {
    if (sentence.empty()) continue;
    kvlab::unicode::Words words = kvlab::unicode::words(sentence);
    if (words.empty()) words.emplace_back();
    out.emplace_back();
    for (const Text& word : words)
      out.back().push_back(known.emplace(word, static_cast<int>(known.size())).first->second);
  }
  return out;
}

// Calls take with the place in `r` and in `a` of each word of a longest common subsequence. From the ends backwards,
// equal words are taken. Else a word of `r` is skipped if the subsequence without it is longer than that without the
// word of `a`, or the word of `a`.
template <class Take>
void each_common(const Numbers& r, const Numbers& a, Take take) {
  Subsequence common(a);
  std::vector<std::vector<std::uint64_t>> open;  // after each word of r
  for (const int word : r) {
    common.add(word);
    open.push_back(common.open());
  }
  for (std::size_t i = r.size(), j = a.size(); i > 0 && j > 0;) {
    if (r[i - 1] == a[j - 1]) {
      take(--i, --j);
    } else if ((open[i - 1][(j - 1) / 64] >> ((j - 1) % 64) & 1) == 0) {
      --i;
    } else {
      --j;
    }
  }
}

inline std::size_t distinct(const std::vector<Numbers>& sentences) {
  std::set<int> all;
  for (const Numbers& s : sentences) all.insert(s.begin(), s.end());
  return all.size();
}

// F1 of the distinct words that the common subsequences of all pairs of sentences have, over the distinct words of
// both.
inline double summary_level(const std::string& answer, const std::string& reference) {
  std::map<Text, int> known;  // word -> number
  const auto a = sentences(answer, known), r = sentences(reference, known);
  if (a.empty() || r.empty()) return 0;
  std::set<int> common;
  for (const Numbers& sentence : r)
    for (const Numbers& other : a)
      each_common(sentence, other, [&](std::size_t i, std::size_t) { common.insert(sentence[i]); });
  const double recall = static_cast<double>(common.size()) / static_cast<double>(distinct(r));
  const double precision = static_cast<double>(common.size()) / static_cast<double>(distinct(a));
  return 2.0 * ((precision * recall) / (precision + recall + 1e-8));
}

}  // namespace rouge
