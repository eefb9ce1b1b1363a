#include "model/token_kinds.hpp"

#include <kvlab/unicode.hpp>

#include <algorithm>
#include <string>

namespace kvlab {
namespace {

bool is_white(char c) {
  return unicode::is_space(static_cast<unsigned char>(c)) && static_cast<unsigned char>(c) < 128;
}
bool is_mark(char c) { return unicode::is_punctuation(static_cast<unsigned char>(c)); }

// The bytes of a token tell, so "<0x2E>", "." and " ." are alike in every kind of tokenizer.
bool is_punctuation(const std::string& bytes) {
  return std::any_of(bytes.begin(), bytes.end(), is_mark) &&
         std::all_of(bytes.begin(), bytes.end(), [](char c) { return is_mark(c) || is_white(c); });
}

}  // namespace

std::vector<std::uint8_t> token_kinds(const ModelConfig& config, const Tokenizer* tokenizer) {
  std::vector<std::uint8_t> kinds(static_cast<std::size_t>(config.vocab));
  const auto mark = [&](int id, TokenKind kind) {
    if (id >= 0 && id < config.vocab) kinds[static_cast<std::size_t>(id)] = static_cast<std::uint8_t>(kind);
  };
  for (int id = 0; tokenizer && id < std::min(config.vocab, tokenizer->vocab_size()); ++id) {
    if (tokenizer->is_special(id))
      mark(id, TokenKind::special);
    else if (is_punctuation(tokenizer->token_bytes(id)))
      mark(id, TokenKind::punctuation);
  }
  mark(tokenizer ? tokenizer->bos_id() : config.bos_id, TokenKind::special);
  for (const int id : tokenizer ? tokenizer->eos_ids() : config.eos_ids) mark(id, TokenKind::special);
  return kinds;
}

}  // namespace kvlab
