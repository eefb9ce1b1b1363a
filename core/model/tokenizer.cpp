#include "model/tokenizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <kvlab/error.hpp>

#include "base/fingerprint.hpp"

namespace kvlab {
namespace {

constexpr std::string_view white = " \t\r\n";

}  // namespace

std::vector<int> Tokenizer::encode(std::string_view text, bool add_bos_if_model_wants, bool parse_special) const {
  std::vector<int> out;
  if (add_bos_if_model_wants && adds_bos()) out.push_back(bos_id_);
  std::size_t plain = 0;  // begin of the text not yet encoded
  for (std::size_t at = 0; at < text.size();) {
    const AddedToken* token = match_added(text, at, parse_special);
    if (token == nullptr) {
      ++at;
      continue;
    }
    std::string_view before = text.substr(plain, at - plain);
    if (token->strip_left) before = before.substr(0, before.find_last_not_of(white) + 1);
    if (!before.empty()) encode_plain(before, plain == 0, out);
    out.push_back(token->id);
    at += token->text.size();
    if (token->strip_right) at = std::min(text.find_first_not_of(white, at), text.size());
    plain = at;
  }
  if (plain < text.size()) encode_plain(text.substr(plain), plain == 0, out);
  return out;
}

std::string Tokenizer::decode(std::span<const int> ids, bool skip_special) const {
  std::string out;
  bool first = true;
  for (const int id : ids) {
    if (skip_special && is_special(id)) continue;
    std::string bytes = token_bytes(id);
    if (first && strips_leading_space() && !is_special(id) && bytes.starts_with(' ')) bytes.erase(0, 1);
    first = false;
    out += bytes;
  }
  return out;
}

bool Tokenizer::is_eos(int id) const { return std::find(eos_ids_.begin(), eos_ids_.end(), id) != eos_ids_.end(); }

std::string Tokenizer::chat_prompt(std::string_view user, std::optional<std::string_view> system) const {
  return render_chat(chat_, user, system);
}

void Tokenizer::check_id(int id, int low, const char* what) const {
  if (id < low || id >= vocab_size_)
    throw Error(Errc::tokenizer, fmt::format("got {} id {}, wanted {} to {}", what, id, low, vocab_size_ - 1));
}

void Tokenizer::set_vocabulary(const Vocabulary& v) {
  vocab_size_ = static_cast<int>(v.tokens.size());
  bos_id_ = v.bos_id;
  eos_ids_ = v.eos_ids;
  add_bos_ = v.add_bos;
  chat_ = v.chat;
  check_id(bos_id_, -1, "BOS");
  check_id(v.unknown, -1, "unknown-token");
  for (const int id : eos_ids_) check_id(id, 0, "EOS");
  for (const int id : v.byte_ids) check_id(id, -1, "byte-token");
}

void Tokenizer::set_added(std::vector<AddedToken> added) {
  added_ = std::move(added);
  added_by_byte_.assign(256, {});
  special_.clear();
  for (std::size_t i = 0; i < added_.size(); ++i) {
    const AddedToken& token = added_[i];
    if (token.id < 0 || token.id >= vocab_size_)
      throw Error(Errc::tokenizer, fmt::format("got added token '{}' with id {}, wanted 0 to {}", token.text, token.id,
                                               vocab_size_ - 1));
    if (token.special) special_.emplace(token.id, static_cast<int>(i));
    if (!token.text.empty()) added_by_byte_[static_cast<unsigned char>(token.text[0])].push_back(static_cast<int>(i));
  }
  for (std::vector<int>& list : added_by_byte_)
    std::stable_sort(list.begin(), list.end(), [&](int a, int b) {
      return added_[static_cast<std::size_t>(a)].text.size() > added_[static_cast<std::size_t>(b)].text.size();
    });
}

void Tokenizer::set_id(std::string_view kind, std::uint64_t hash) {
  id_ = fmt::format("{}-{:016x}", kind, Fingerprint().add(hash).add(static_cast<std::uint64_t>(bos_id_)).value());
}

const AddedToken* Tokenizer::match_added(std::string_view text, std::size_t at, bool parse_special) const {
  if (added_by_byte_.empty()) return nullptr;
  for (const int i : added_by_byte_[static_cast<unsigned char>(text[at])]) {
    const AddedToken& token = added_[static_cast<std::size_t>(i)];
    if ((parse_special || !token.special) && text.compare(at, token.text.size(), token.text) == 0) return &token;
  }
  return nullptr;
}

}  // namespace kvlab
