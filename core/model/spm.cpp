#include "model/spm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <kvlab/error.hpp>
#include <queue>

#include "base/fingerprint.hpp"
#include "base/utf8.hpp"
#include "model/byte_alphabet.hpp"

namespace kvlab {
namespace {

struct Symbol {
  std::size_t begin, size;  // bytes of the text; size 0 = joined to its left neighbour
  int previous, next;
};

struct Candidate {
  float score;
  int left, right;   // symbols
  std::size_t size;  // of their union when it was found; it is stale if either grew since
  bool operator<(const Candidate& o) const { return score != o.score ? score < o.score : left > o.left; }
};

}  // namespace

SpmTokenizer::SpmTokenizer(SpmParts parts) : parts_(std::move(parts)) {
  set_vocabulary(parts_);
  if (parts_.scores.size() != parts_.tokens.size() || parts_.mergeable.size() != parts_.tokens.size())
    throw Error(Errc::tokenizer, fmt::format("got {} scores and {} types, wanted one for each of {} tokens",
                                             parts_.scores.size(), parts_.mergeable.size(), vocab_size_));
  Fingerprint hash;
  for (std::size_t i = 0; i < parts_.tokens.size(); ++i) {
    if (std::isnan(parts_.scores[i]))
      throw Error(Errc::tokenizer, fmt::format("got score NaN of token {}, wanted a number", i));
    hash.add(parts_.tokens[i]).add(std::bit_cast<std::uint32_t>(parts_.scores[i]));
    if (parts_.mergeable[i] && !parts_.tokens[i].empty()) ids_.emplace(parts_.tokens[i], static_cast<int>(i));
  }
  set_added(parts_.added);
  set_id("spm", hash.value());
}

std::string SpmTokenizer::token_bytes(int id) const {
  check_id(id, 0, "token");
  return parts_.tokens[static_cast<std::size_t>(id)];
}

void SpmTokenizer::encode_plain(std::string_view text, bool, std::vector<int>& out) const {
  const std::string spaced = (parts_.space_prefix ? " " : "") + spaces_for_marks(text);
  text = spaced;
  std::vector<Symbol> symbols;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = std::max<std::size_t>(1, utf8_length(text, at));
    const auto i = static_cast<int>(symbols.size());
    symbols.push_back({at, length, i - 1, i + 1});
    at += length;
  }
  const auto count = static_cast<int>(symbols.size());
  const auto symbol = [&](int i) -> Symbol& { return symbols[static_cast<std::size_t>(i)]; };
  std::priority_queue<Candidate> heap;
  const auto offer = [&](int left, int right) {
    if (left < 0 || right >= count) return;
    const std::size_t size = symbol(left).size + symbol(right).size;
    const auto it = ids_.find(text.substr(symbol(left).begin, size));
    if (it != ids_.end()) heap.push({parts_.scores[static_cast<std::size_t>(it->second)], left, right, size});
  };
  for (int i = 0; i + 1 < count; ++i) offer(i, i + 1);
  while (!heap.empty()) {
    const Candidate c = heap.top();
    heap.pop();
    Symbol& left = symbol(c.left);
    Symbol& right = symbol(c.right);
    if (left.size == 0 || right.size == 0 || left.size + right.size != c.size) continue;
    left.size += right.size;
    right.size = 0;
    left.next = right.next;
    if (right.next < count) symbol(right.next).previous = c.left;
    offer(left.previous, c.left);
    offer(c.left, left.next);
  }
  for (int i = 0; i < count; i = symbol(i).next) {
    const std::string_view piece = text.substr(symbol(i).begin, symbol(i).size);
    if (const auto it = ids_.find(piece); it != ids_.end()) {
      out.push_back(it->second);
      continue;
    }
    for (const char byte : piece) {
      const int id = parts_.byte_ids[static_cast<unsigned char>(byte)];
      if (id >= 0)
        out.push_back(id);
      else if (parts_.unknown >= 0)
        out.push_back(parts_.unknown);
    }
  }
}

}  // namespace kvlab
