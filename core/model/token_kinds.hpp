// Which tokens of a vocabulary are special, and which are punctuation.
#pragma once
#include <kvlab/kv.hpp>

#include <cstdint>
#include <vector>

#include "model/config.hpp"
#include "model/tokenizer.hpp"

namespace kvlab {

// [vocab] TokenKind of each id. Special tokens are the tokenizer's control tokens and those that begin or end a text.
// Without a tokenizer (null) these two are all that is known.
std::vector<std::uint8_t> token_kinds(const ModelConfig& config, const Tokenizer* tokenizer);

}  // namespace kvlab
