#include <fmt/format.h>
#include <sentencepiece_processor.h>

#include <algorithm>
#include <array>
#include <kvlab/error.hpp>

#include "base/fingerprint.hpp"
#include "model/byte_alphabet.hpp"
#include "model/mapped_file.hpp"
#include "model/tokenizer_files.hpp"

namespace kvlab {
namespace {

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(std::string_view model, const TokenizerHints& hints) {
    const auto status = processor_.LoadFromSerializedProto(model);
    if (!status.ok())
      throw Error(Errc::tokenizer,
                  fmt::format("got a file SentencePiece refuses ({}), wanted its model", status.ToString()));
    vocab_size_ = processor_.GetPieceSize();
    if (vocab_size_ < 1) throw Error(Errc::tokenizer, "got no pieces, wanted a vocabulary");
    bos_id_ = hints.bos_id >= 0 ? hints.bos_id : processor_.bos_id();
    add_bos_ = true;
    eos_ids_ = hints.eos_ids;
    if (eos_ids_.empty() && processor_.eos_id() >= 0) eos_ids_.push_back(processor_.eos_id());
    for (const int id : eos_ids_)
      if (id >= vocab_size_)
        throw Error(Errc::tokenizer, fmt::format("got EOS id {}, wanted 0 to {}", id, vocab_size_ - 1));
    if (bos_id_ >= vocab_size_)
      throw Error(Errc::tokenizer, fmt::format("got BOS id {}, wanted 0 to {}", bos_id_, vocab_size_ - 1));
    chat_ = recognise_chat_template(hints.chat_template);
    Fingerprint hash;
    hash.add(model);
    byte_ids_.fill(-1);
    std::vector<AddedToken> added;
    for (int id = 0; id < vocab_size_; ++id) {
      const std::string& piece = processor_.IdToPiece(id);
      if (processor_.IsControl(id) || processor_.IsUnknown(id)) added.push_back({id, piece, true});
      const int byte = processor_.IsByte(id) ? byte_token_value(piece) : -1;
      if (byte >= 0) byte_ids_[static_cast<std::size_t>(byte)] = id;
    }
    set_added(std::move(added));
    set_id("sentencepiece", hash.value());
  }

  std::string token_bytes(int id) const override {
    if (id < 0 || id >= vocab_size_)
      throw Error(Errc::tokenizer, fmt::format("got token id {}, wanted 0 to {}", id, vocab_size_ - 1));
    const std::string& piece = processor_.IdToPiece(id);
    if (const int byte = processor_.IsByte(id) ? byte_token_value(piece) : -1; byte >= 0)
      return std::string(1, static_cast<char>(byte));
    return is_special(id) ? piece : spaces_for_marks(piece);
  }

 protected:
  // The library would put U+FFFD for bytes that are no UTF-8; their byte tokens keep them.
  void encode_plain(std::string_view text, bool, std::vector<int>& out) const override {
    std::size_t valid = 0;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t length = utf8_length(text, at);
      if (length > 0) {
        at += length;
        continue;
      }
      encode_valid(text.substr(valid, at - valid), out);
      const int id = byte_ids_[static_cast<unsigned char>(text[at])];
      if (const int instead = id >= 0 ? id : processor_.unk_id(); instead >= 0) out.push_back(instead);
      valid = ++at;
    }
    encode_valid(text.substr(valid), out);
  }
  bool strips_leading_space() const override { return true; }

 private:
  void encode_valid(std::string_view text, std::vector<int>& out) const {
    if (text.empty()) return;
    std::vector<int> ids;
    const auto status = processor_.Encode(text, &ids);
    if (!status.ok())
      throw Error(Errc::tokenizer, fmt::format("got '{}' when encoding a text, wanted ids", status.ToString()));
    out.insert(out.end(), ids.begin(), ids.end());
  }

  sentencepiece::SentencePieceProcessor processor_;
  std::array<int, 256> byte_ids_{};
};

}  // namespace

std::unique_ptr<Tokenizer> tokenizer_from_sentencepiece(const std::filesystem::path& path,
                                                        const TokenizerHints& hints) {
  const MappedFile file(path);
  try {
    return std::make_unique<SentencePieceTokenizer>(file.text(), hints);
  } catch (const Error& e) {
    throw Error(e.code(), e.message(), path.string());
  }
}

}  // namespace kvlab
