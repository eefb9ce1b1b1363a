#include <fmt/format.h>

#include <algorithm>
#include <kvlab/error.hpp>
#include <unordered_map>

#include "model/bpe.hpp"
#include "model/byte_alphabet.hpp"
#include "model/spm.hpp"
#include "model/tokenizer_files.hpp"

namespace kvlab {
namespace {

enum TokenType { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

[[noreturn]] void refuse(const GgufFile& file, const char* key, const std::string& got, const std::string& wanted) {
  throw Error(Errc::tokenizer, "got " + got + ", wanted " + wanted, file.where() + ": " + key);
}

// The parts that both kinds of vocabulary share.
struct Common {
  std::vector<std::string_view> tokens;
  std::vector<std::int64_t> types;  // TokenType, one per token
  std::vector<AddedToken> added;
  int bos_id = -1;
  std::vector<int> eos_ids;
  ChatTemplate chat;
};

int token_id(const GgufFile& file, const char* key, std::size_t count) {
  const auto id = file.integer(key);
  if (!id) return -1;
  if (*id < 0 || *id >= static_cast<std::int64_t>(count))
    refuse(file, key, std::to_string(*id), fmt::format("an id below {}", count));
  return static_cast<int>(*id);
}

Common read_common(const GgufFile& file) {
  Common c;
  c.tokens = file.texts("tokenizer.ggml.tokens");
  if (c.tokens.empty() || c.tokens.size() > (1u << 24))
    refuse(file, "tokenizer.ggml.tokens", fmt::format("{} tokens", c.tokens.size()), "1 to 16777216");
  c.types = file.integers("tokenizer.ggml.token_type");
  if (c.types.empty()) c.types.assign(c.tokens.size(), normal);
  if (c.types.size() != c.tokens.size())
    refuse(file, "tokenizer.ggml.token_type", fmt::format("{} types", c.types.size()),
           fmt::format("one for each of {} tokens", c.tokens.size()));
  for (std::size_t i = 0; i < c.tokens.size(); ++i) {
    const bool special = c.types[i] == control || c.types[i] == unknown;
    if (special || c.types[i] == user_defined)
      c.added.push_back({static_cast<int>(i), std::string(c.tokens[i]), special});
  }
  c.bos_id = token_id(file, "tokenizer.ggml.bos_token_id", c.tokens.size());
  for (const char* key :
       {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    const int id = token_id(file, key, c.tokens.size());
    if (id >= 0 && std::find(c.eos_ids.begin(), c.eos_ids.end(), id) == c.eos_ids.end()) c.eos_ids.push_back(id);
  }
  // Files often name one end only: a chat model's end of turn, or a base model's end of text.
  for (const AddedToken& token : c.added)
    for (const std::string_view end :
         {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"})
      if (token.text == end && std::find(c.eos_ids.begin(), c.eos_ids.end(), token.id) == c.eos_ids.end())
        c.eos_ids.push_back(token.id);
  c.chat = recognise_chat_template(file.text("tokenizer.chat_template").value_or(""));
  return c;
}

std::unique_ptr<Tokenizer> byte_bpe(const GgufFile& file) {
  Common common = read_common(file);
  const std::string pre(file.text("tokenizer.ggml.pre").value_or("gpt-2"));
  BpeParts parts;
  parts.kind = "bpe-" + pre;
  try {
    parts.splitter = PreTokenizer::named(pre);
  } catch (const Error& e) {
    throw Error(e.code(), e.message(), file.where() + ": tokenizer.ggml.pre");
  }
  parts.byte_ids.fill(-1);
  std::unordered_map<std::string_view, int> ids;
  ids.reserve(common.tokens.size());
  for (std::size_t i = 0; i < common.tokens.size(); ++i) {
    const auto spelled = common.types[i] == normal ? spelled_bytes(common.tokens[i]) : std::nullopt;
    parts.tokens.push_back(spelled ? *spelled : std::string(common.tokens[i]));
    if (!spelled) continue;
    ids.emplace(common.tokens[i], static_cast<int>(i));
    if (spelled->size() == 1) parts.byte_ids[static_cast<unsigned char>((*spelled)[0])] = static_cast<int>(i);
  }
  for (const std::string_view merge : file.texts("tokenizer.ggml.merges")) {
    const auto space = merge.find(' ', 1);
    const auto refuse_merge = [&] {
      refuse(file, "tokenizer.ggml.merges", fmt::format("'{}'", merge),
             "two tokens of the vocabulary whose union is one");
    };
    if (space == std::string_view::npos) refuse_merge();
    const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
    const auto a = ids.find(left), b = ids.find(right), both = ids.find(std::string(left) + std::string(right));
    if (a == ids.end() || b == ids.end() || both == ids.end()) refuse_merge();
    parts.merges.push_back({a->second, b->second, both->second});
  }
  const bool llama3 = pre == "llama-bpe" || pre == "llama3" || pre == "llama-v3";
  parts.whole_pieces_first = llama3;
  parts.add_bos = file.boolean("tokenizer.ggml.add_bos_token").value_or(llama3);
  parts.added = std::move(common.added);
  parts.bos_id = common.bos_id;
  parts.eos_ids = std::move(common.eos_ids);
  parts.chat = std::move(common.chat);
  return std::make_unique<BpeTokenizer>(std::move(parts));
}

std::unique_ptr<Tokenizer> sentencepiece(const GgufFile& file) {
  Common common = read_common(file);
  SpmParts parts;
  parts.byte_ids.fill(-1);
  for (std::size_t i = 0; i < common.tokens.size(); ++i) {
    std::string text(common.tokens[i]);
    const int value = common.types[i] == byte ? byte_token_value(text) : -1;
    if (value >= 0) {
      parts.byte_ids[static_cast<std::size_t>(value)] = static_cast<int>(i);
      text.assign(1, static_cast<char>(value));
    } else if (common.types[i] == normal || common.types[i] == user_defined) {
      text = spaces_for_marks(text);
    }
    parts.tokens.push_back(std::move(text));
    parts.mergeable.push_back(common.types[i] == normal || common.types[i] == user_defined);
  }
  for (AddedToken& token : common.added) token.text = parts.tokens[static_cast<std::size_t>(token.id)];
  parts.scores = file.floats("tokenizer.ggml.scores");
  parts.unknown = token_id(file, "tokenizer.ggml.unknown_token_id", common.tokens.size());
  parts.space_prefix = file.boolean("tokenizer.ggml.add_space_prefix").value_or(true);
  parts.add_bos = file.boolean("tokenizer.ggml.add_bos_token").value_or(true);
  parts.added = std::move(common.added);
  parts.bos_id = common.bos_id;
  parts.eos_ids = std::move(common.eos_ids);
  parts.chat = std::move(common.chat);
  return std::make_unique<SpmTokenizer>(std::move(parts));
}

}  // namespace

std::unique_ptr<Tokenizer> tokenizer_from_gguf(const GgufFile& file) {
  const auto model = file.text("tokenizer.ggml.model");
  if (!model || *model == "none" || *model == "no_vocab") return nullptr;
  try {
    if (*model == "gpt2") return byte_bpe(file);
    if (*model == "llama") return sentencepiece(file);
  } catch (const Error& e) {
    if (!e.where().empty()) throw;
    throw Error(e.code(), e.message(), file.where());
  }
  refuse(file, "tokenizer.ggml.model", fmt::format("'{}'", *model), "gpt2 (byte-level BPE) or llama (SentencePiece)");
}

}  // namespace kvlab
