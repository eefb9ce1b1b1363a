#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>

#include "model/gguf.hpp"
#include "model/tokenizer_files.hpp"
#include "test/model/vocab_cases.hpp"
#include "test/support/places.hpp"

namespace fs = std::filesystem;
using namespace kvlab;

namespace {

void check_vocabulary(const Tokenizer& tokenizer, const std::string& stem) {
  const auto cases = test::vocab_cases(stem);
  REQUIRE(cases.size() > 40);
  for (const test::VocabCase& c : cases) {
    INFO(stem << ": '" << c.text << "'");
    CHECK(tokenizer.encode(c.text) == c.ids);
    CHECK(tokenizer.decode(tokenizer.encode(c.text)) == c.text);
  }
}

// Vocabularies without a GGUF file are read from these rank files, as the models' makers publish them.
struct RankFile {
  const char *vocabulary, *folder_and_name, *pre;
};
constexpr RankFile rank_files[] = {{"llama-bpe", "tokenizer-llama3/tokenizer.model", "llama-bpe"},
                                   {"qwen2", "tokenizer-qwen/qwen.tiktoken", "qwen2"},
                                   {"deepseek-r1-qwen", "tokenizer-qwen/qwen.tiktoken", "deepseek-r1-qwen"}};

int check_folder(const fs::path& folder) {
  int checked = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".out") continue;
    const std::string stem = fs::path(entry.path()).replace_extension().string();
    std::unique_ptr<Tokenizer> tokenizer;
    if (fs::exists(stem)) {
      tokenizer = tokenizer_from_gguf(GgufFile(stem));
    } else {
      for (const RankFile& file : rank_files)
        if (stem.ends_with("ggml-vocab-" + std::string(file.vocabulary) + ".gguf"))
          tokenizer = tokenizer_from_tiktoken(folder.parent_path() / file.folder_and_name, file.pre, {}, {});
    }
    REQUIRE(tokenizer != nullptr);
    check_vocabulary(*tokenizer, stem);
    ++checked;
  }
  return checked;
}

}  // namespace

TEST_CASE("vocabularies give the ids their models' own tokenizers give") {
  CHECK(check_folder(test::source_root() / "core/test/data/vocab") == 2);
  // A folder such as llama.cpp's models/: ggml-vocab-*.gguf with .inp and .out; rank files in its sister folders.
  if (const char* extra = std::getenv("KVLAB_EXTRA_VOCAB")) CHECK(check_folder(extra) > 0);
}
