#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <kvlab/error.hpp>
#include <unordered_map>

#include "model/bpe.hpp"
#include "model/mapped_file.hpp"
#include "model/tokenizer_files.hpp"

namespace kvlab {
namespace {

bool decode_base64(std::string_view text, std::string& out) {
  out.clear();
  std::uint32_t bits = 0;
  int held = 0;
  while (!text.empty() && text.back() == '=') text.remove_suffix(1);
  for (const char c : text) {
    int value = 0;
    if (c >= 'A' && c <= 'Z')
      value = c - 'A';
    else if (c >= 'a' && c <= 'z')
      value = c - 'a' + 26;
    else if (c >= '0' && c <= '9')
      value = c - '0' + 52;
    else if (c == '+')
      value = 62;
    else if (c == '/')
      value = 63;
    else
      return false;
    bits = (bits << 6 | static_cast<std::uint32_t>(value)) & 0xffffff;
    held += 6;
    if (held >= 8) {
      held -= 8;
      out.push_back(static_cast<char>(bits >> held & 0xff));
    }
  }
  return !out.empty();
}

// Two tokens may be joined if their union is a token, and the union's rank is the merge's. So every cut of a token into
// two tokens is a merge.
std::vector<BpeParts::Merge> all_merges(const std::vector<std::string>& tokens) {
  std::unordered_map<std::string_view, int> ids;
  ids.reserve(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) ids.emplace(tokens[i], static_cast<int>(i));
  std::vector<BpeParts::Merge> merges;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::string_view token = tokens[i];
    for (std::size_t cut = 1; cut < token.size(); ++cut) {
      const auto left = ids.find(token.substr(0, cut)), right = ids.find(token.substr(cut));
      if (left != ids.end() && right != ids.end()) merges.push_back({left->second, right->second, static_cast<int>(i)});
    }
  }
  return merges;
}

}  // namespace

std::unique_ptr<Tokenizer> tokenizer_from_tiktoken(const std::filesystem::path& path, std::string_view pre,
                                                   const std::vector<std::string>& specials,
                                                   const TokenizerHints& hints) {
  const MappedFile file(path);
  BpeParts parts;
  parts.kind = "tiktoken-" + std::string(pre);
  parts.splitter = PreTokenizer::named(pre);
  parts.byte_ids.fill(-1);
  std::string_view text = file.text();
  for (std::size_t line_number = 1; !text.empty(); ++line_number) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (line.empty()) continue;
    const auto space = line.find(' ');
    std::string bytes;
    std::size_t rank = 0;
    const bool read = space != std::string_view::npos && decode_base64(line.substr(0, space), bytes) &&
                      std::from_chars(line.data() + space + 1, line.data() + line.size(), rank).ec == std::errc() &&
                      rank == parts.tokens.size();
    if (!read || bytes.size() > 1024)
      throw Error(Errc::tokenizer,
                  fmt::format("got line '{}', wanted a token of 1 to 1024 bytes in base64 and rank {}",
                              line.substr(0, 80), parts.tokens.size()),
                  fmt::format("{}:{}", path.string(), line_number));
    if (bytes.size() == 1) parts.byte_ids[static_cast<unsigned char>(bytes[0])] = static_cast<int>(rank);
    parts.tokens.push_back(std::move(bytes));
  }
  parts.merges = all_merges(parts.tokens);
  parts.whole_pieces_first = true;
  for (const std::string& special : specials) {
    parts.added.push_back({static_cast<int>(parts.tokens.size()), special});
    parts.tokens.push_back(special);
  }
  parts.bos_id = hints.bos_id;
  parts.add_bos = pre == "llama-bpe" && hints.bos_id >= 0;
  parts.eos_ids = hints.eos_ids;
  parts.chat = recognise_chat_template(hints.chat_template);
  return std::make_unique<BpeTokenizer>(std::move(parts));
}

}  // namespace kvlab
