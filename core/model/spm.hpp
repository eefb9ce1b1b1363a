// SentencePiece's BPE as GGUF files carry it: pieces with scores; the neighbours whose union scores best are joined.
#pragma once
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/tokenizer.hpp"

namespace kvlab {

struct SpmParts : Vocabulary {
  SpmParts() {
    unknown = 0;
    add_bos = true;
  }
  std::vector<float> scores;    // one per token
  bool space_prefix = true;     // a space is put before the text and after each added token
  std::vector<char> mergeable;  // one per token: normal and user-defined pieces
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
