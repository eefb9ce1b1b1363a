#include "model/bpe.hpp"

#include <kvlab/error.hpp>
#include <queue>

#include "base/fingerprint.hpp"
#include "model/byte_alphabet.hpp"

namespace kvlab {
namespace {

std::uint64_t pair_key(int left, int right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
}

struct Candidate {
  std::uint32_t rank;
  int at;           // index of the left symbol
  int left, right;  // ids when it was found; it is stale if they changed
  int result;
  bool operator>(const Candidate& o) const { return rank != o.rank ? rank > o.rank : at > o.at; }
};

}  // namespace

BpeTokenizer::BpeTokenizer(BpeParts parts) : parts_(std::move(parts)) {
  set_vocabulary(parts_);

  Fingerprint hash;
  std::vector<char> added(parts_.tokens.size());
  for (const AddedToken& token : parts_.added)
    if (token.id >= 0 && token.id < vocab_size_) added[static_cast<std::size_t>(token.id)] = 1;
  ids_.reserve(parts_.tokens.size());
  for (int id = 0; id < vocab_size_; ++id) {
    const std::string& token = parts_.tokens[static_cast<std::size_t>(id)];
    hash.add(token);
    if (!token.empty() && !added[static_cast<std::size_t>(id)]) ids_.emplace(token, id);
  }
  ranks_.reserve(parts_.merges.size());
  for (std::size_t rank = 0; rank < parts_.merges.size(); ++rank) {
    const BpeParts::Merge& m = parts_.merges[rank];
    for (const int id : {m.left, m.right, m.result}) check_id(id, 0, "merge");
    ranks_.emplace(pair_key(m.left, m.right), Rank{static_cast<std::uint32_t>(rank), m.result});
  }
  hash.add(parts_.merges.size());
  parts_.merges = {};
  set_added(parts_.added);
  set_id(parts_.kind, hash.value());
}

std::string BpeTokenizer::token_bytes(int id) const {
  check_id(id, 0, "token");
  return parts_.tokens[static_cast<std::size_t>(id)];
}

const BpeTokenizer::Rank* BpeTokenizer::find_merge(int left, int right) const {
  const auto it = ranks_.find(pair_key(left, right));
  return it == ranks_.end() ? nullptr : &it->second;
}

void BpeTokenizer::encode_plain(std::string_view text, bool start, std::vector<int>& out) const {
  std::string spaced;
  if (parts_.characters) {
    spaced = spaces_for_marks(text);
    using Space = BpeParts::Space;
    const bool there = spaced.starts_with(' ');
    if (parts_.space == Space::each || (parts_.space == Space::each_unless_there && !there) ||
        (parts_.space == Space::first && start && !there))
      spaced.insert(0, 1, ' ');
    text = spaced;
  }
  std::size_t valid = 0;  // begin of the well-formed text not yet encoded
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text, at);
    if (length > 0) {
      at += length;
      continue;
    }
    encode_valid(text.substr(valid, at - valid), out);
    const int id = parts_.byte_ids[static_cast<unsigned char>(text[at])];
    if (id >= 0)
      out.push_back(id);
    else if (parts_.unknown >= 0)
      out.push_back(parts_.unknown);
    valid = ++at;
  }
  encode_valid(text.substr(valid), out);
}

void BpeTokenizer::encode_valid(std::string_view text, std::vector<int>& out) const {
  if (text.empty()) return;
  std::vector<std::string_view> pieces;
  parts_.splitter.split(text, pieces);
  for (const std::string_view piece : pieces) encode_piece(piece, out);
}

void BpeTokenizer::encode_piece(std::string_view piece, std::vector<int>& out) const {
  if (parts_.whole_pieces_first)
    if (const auto it = ids_.find(piece); it != ids_.end()) {
      out.push_back(it->second);
      return;
    }
  std::vector<int> symbols;
  first_symbols(piece, symbols);
  merge(symbols);
  out.insert(out.end(), symbols.begin(), symbols.end());
}

void BpeTokenizer::first_symbols(std::string_view piece, std::vector<int>& symbols) const {
  const auto put_byte = [&](char byte) {
    const int id = parts_.byte_ids[static_cast<unsigned char>(byte)];
    if (id >= 0) symbols.push_back(id);
    return id >= 0;
  };
  if (!parts_.characters) {
    for (const char byte : piece)
      if (!put_byte(byte) && parts_.unknown >= 0) symbols.push_back(parts_.unknown);
    return;
  }
  bool after_unknown = false;
  for (std::size_t at = 0; at < piece.size();) {
    const std::string_view character = piece.substr(at, utf8_length(piece, at));
    at += character.size();
    bool known = true;
    if (const auto it = ids_.find(character); it != ids_.end()) {
      symbols.push_back(it->second);
    } else {
      for (const char byte : character) known = known && parts_.byte_ids[static_cast<unsigned char>(byte)] >= 0;
      if (known)
        for (const char byte : character) put_byte(byte);
      else if (parts_.unknown >= 0 && !(after_unknown && parts_.fuse_unknown))
        symbols.push_back(parts_.unknown);
    }
    after_unknown = !known;
  }
}

// Joins the pair of the lowest rank, the leftmost of equals, until none is left. A heap of candidates keeps long pieces
// (Chinese without spaces, say) from taking quadratic time.
void BpeTokenizer::merge(std::vector<int>& symbols) const {
  const auto count = static_cast<int>(symbols.size());
  std::vector<int> next(symbols.size()), previous(symbols.size());
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap;
  const auto offer = [&](int left) {
    const int right = next[static_cast<std::size_t>(left)];
    if (right >= count) return;
    const int a = symbols[static_cast<std::size_t>(left)], b = symbols[static_cast<std::size_t>(right)];
    if (const Rank* rank = find_merge(a, b)) heap.push({rank->rank, left, a, b, rank->result});
  };
  for (int i = 0; i < count; ++i) {
    next[static_cast<std::size_t>(i)] = i + 1;
    previous[static_cast<std::size_t>(i)] = i - 1;
  }
  for (int i = 0; i < count; ++i) offer(i);
  while (!heap.empty()) {
    const Candidate c = heap.top();
    heap.pop();
    const auto left = static_cast<std::size_t>(c.at);
    if (symbols[left] != c.left || next[left] >= count) continue;
    const auto right = static_cast<std::size_t>(next[left]);
    if (symbols[right] != c.right) continue;
    symbols[left] = c.result;
    symbols[right] = -1;
    next[left] = next[right];
    if (next[left] < count) previous[static_cast<std::size_t>(next[left])] = c.at;
    if (previous[left] >= 0) offer(previous[left]);
    offer(c.at);
  }
  std::erase(symbols, -1);
}

}  // namespace kvlab
