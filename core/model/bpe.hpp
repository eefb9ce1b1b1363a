// Byte-pair encoding with the merges in rank order. It starts from bytes (GPT-2, Llama 3, Qwen), or from characters
// with bytes as a fallback (SentencePiece models in the form of tokenizer.json).
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/pretokenizer.hpp"
#include "model/tokenizer.hpp"

namespace kvlab {

struct BpeParts : Vocabulary {
  std::string kind;  // beginning of Tokenizer::id()
  struct Merge {
    int left, right, result;  // ids
  };
  std::vector<Merge> merges;  // lower index = earlier
  PreTokenizer splitter;
  bool whole_pieces_first = false;  // a piece that is a token is not merged ("ignore_merges")
  bool characters = false;          // starts from characters and falls back to <0xNN> tokens
  // Where a space is put: before the text (first) or before each part between added tokens (each). Only `each` puts one
  // before a space.
  enum class Space { none, first, each, each_unless_there } space = Space::none;
  bool fuse_unknown = false;  // neighbouring unknowns become one
};

class BpeTokenizer final : public Tokenizer {
 public:
  explicit BpeTokenizer(BpeParts parts);  // Errc::tokenizer for ids outside the vocabulary

  std::string token_bytes(int id) const override;

 protected:
  void encode_plain(std::string_view text, bool start, std::vector<int>& out) const override;
  bool strips_leading_space() const override { return parts_.space != BpeParts::Space::none; }

 private:
  struct Rank {
    std::uint32_t rank;
    int result;
  };
  const Rank* find_merge(int left, int right) const;
  void encode_valid(std::string_view text, std::vector<int>& out) const;  // well-formed UTF-8
  void encode_piece(std::string_view piece, std::vector<int>& out) const;
  void first_symbols(std::string_view piece, std::vector<int>& symbols) const;
  void merge(std::vector<int>& symbols) const;

  BpeParts parts_;
  std::unordered_map<std::string_view, int> ids_;  // keys view parts_.tokens
  std::unordered_map<std::uint64_t, Rank> ranks_;  // left << 32 | right
};

}  // namespace kvlab
