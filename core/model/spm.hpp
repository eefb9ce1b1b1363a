// SentencePiece's BPE as GGUF files carry it: pieces with scores; the neighbours whose union scores best are joined.
#pragma once
#include <array>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/tokenizer.hpp"

namespace kvlab {

struct SpmParts {
  std::vector<std::string> tokens;  // the bytes each id stands for (a space is a space, not U+2581)
  std::vector<float> scores;        // one per token
  std::array<int, 256> byte_ids{};  // the <0xNN> tokens; -1 = none
  int unknown = 0;
  bool space_prefix = true;     // a space is put before the text and after each added token
  std::vector<char> mergeable;  // one per token: normal and user-defined pieces
  std::vector<AddedToken> added;
  int bos_id = -1;
  std::vector<int> eos_ids;
  bool add_bos = true;
  ChatTemplate chat;
};

class SpmTokenizer final : public Tokenizer {
 public:
  explicit SpmTokenizer(SpmParts parts);  // Errc::tokenizer for ids outside the vocabulary

  std::string token_bytes(int id) const override;

 protected:
  void encode_plain(std::string_view text, bool start, std::vector<int>& out) const override;
  bool strips_leading_space() const override { return parts_.space_prefix; }

 private:
  SpmParts parts_;
  std::unordered_map<std::string_view, int> ids_;  // keys view parts_.tokens
};

}  // namespace kvlab
