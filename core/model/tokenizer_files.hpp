// Tokenizers out of files. Errc::tokenizer (Errc::model for a broken GGUF) with the file and the key.
#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/gguf.hpp"
#include "model/tokenizer.hpp"

namespace kvlab {

// tokenizer.ggml.*: models gpt2 (byte-level BPE) and llama (SentencePiece); null if the file holds no vocabulary.
std::unique_ptr<Tokenizer> tokenizer_from_gguf(const GgufFile& file);

// Settings for a tokenizer.json or tokenizer.model from the config.json and tokenizer_config.json beside it.
struct TokenizerHints {
  int bos_id = -1;
  std::vector<int> eos_ids;
  std::string chat_template;
};

// A tokenizer.json with a BPE model. Every setting that we do not implement is refused by name.
std::unique_ptr<Tokenizer> tokenizer_from_json(const std::filesystem::path& path, const TokenizerHints& hints);

// A SentencePiece model, run by the SentencePiece library.
std::unique_ptr<Tokenizer> tokenizer_from_sentencepiece(const std::filesystem::path& path, const TokenizerHints& hints);

// Lines of "base64 rank". pre: the name of the pre-tokenizer (PreTokenizer::named); specials follow the ranked tokens
// in order of id.
std::unique_ptr<Tokenizer> tokenizer_from_tiktoken(const std::filesystem::path& path, std::string_view pre,
                                                   const std::vector<std::string>& specials,
                                                   const TokenizerHints& hints);

}  // namespace kvlab
