#include "model/token_kinds.hpp"

#include <catch2/catch.hpp>

#include "model/gguf.hpp"
#include "model/tokenizer_files.hpp"
#include "test/support/places.hpp"

using namespace kvlab;

namespace {

struct Kinds {
  std::unique_ptr<Tokenizer> tokenizer;
  std::vector<std::uint8_t> of_ids;

  explicit Kinds(const std::string& vocabulary)
      : tokenizer(tokenizer_from_gguf(
            GgufFile(test::source_root() / "core/test/data/vocab" / ("ggml-vocab-" + vocabulary + ".gguf")))) {
    ModelConfig config;
    config.vocab = tokenizer->vocab_size() + 1;  // as a model whose rows are padded
    of_ids = token_kinds(config, tokenizer.get());
  }
  // Of the tokens whose bytes are these.
  std::vector<TokenKind> of(const std::string& bytes) const {
    std::vector<TokenKind> found;
    for (int id = 0; id < tokenizer->vocab_size(); ++id)
      if (tokenizer->token_bytes(id) == bytes)
        found.push_back(static_cast<TokenKind>(of_ids[static_cast<std::size_t>(id)]));
    return found;
  }
};

using Found = std::vector<TokenKind>;

}  // namespace

TEST_CASE("kinds of tokens: punctuation with and without spaces, and as byte tokens") {
  const Kinds spm("llama-spm"), bpe("gpt-2");
  // SentencePiece has a token "." and the byte token <0x2E>.
  CHECK(spm.of(".") == Found{TokenKind::punctuation, TokenKind::punctuation});
  for (const Kinds* kinds : {&spm, &bpe}) {
    for (const char* text : {" .", "!", "...", " ("}) {
      CAPTURE(text);
      REQUIRE_FALSE(kinds->of(text).empty());
      for (const TokenKind kind : kinds->of(text)) CHECK(kind == TokenKind::punctuation);
    }
    for (const char* text : {"a", " the", "7", "\n", " "}) {
      CAPTURE(text);
      REQUIRE_FALSE(kinds->of(text).empty());
      for (const TokenKind kind : kinds->of(text)) CHECK(kind == TokenKind::plain);
    }
    CHECK(kinds->of_ids.back() == static_cast<std::uint8_t>(TokenKind::plain));
  }
  CHECK(bpe.of("'s") == Found{TokenKind::plain});
}

TEST_CASE("kinds of tokens: control tokens are special, with and without a tokenizer") {
  const Kinds spm("llama-spm"), bpe("gpt-2");
  // <unk>, <s> and </s>.
  for (int id = 0; id < 4; ++id)
    CHECK(spm.of_ids[static_cast<std::size_t>(id)] ==
          static_cast<std::uint8_t>(id < 3 ? TokenKind::special : TokenKind::plain));
  CHECK(bpe.of("<|endoftext|>") == Found{TokenKind::special});
  ModelConfig config;
  config.vocab = 6, config.bos_id = 1, config.eos_ids = {4, 9};
  CHECK(token_kinds(config, nullptr) == std::vector<std::uint8_t>{0, 1, 0, 0, 1, 0});
}
