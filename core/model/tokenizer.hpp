// Text to token ids and back. Any bytes are accepted; those that are not UTF-8 are encoded one by one.
#pragma once
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/chat.hpp"

namespace kvlab {

// A token that is matched literally in the text, before the vocabulary's model encodes the text between such tokens.
struct AddedToken {
  int id = -1;
  std::string text;
  bool special = true;                           // a control token; others match even where parse_special is off
  bool strip_left = false, strip_right = false;  // takes the white space before / after it along
};

// The parts of every kind of tokenizer.
struct Vocabulary {
  std::vector<std::string> tokens;  // the bytes each id stands for (a space is a space, not U+2581)
  std::array<int, 256> byte_ids{};  // the <0xNN> tokens; -1 = none
  int unknown = -1;                 // id for text without a token; -1 drops such text
  std::vector<AddedToken> added;
  int bos_id = -1;
  std::vector<int> eos_ids;
  bool add_bos = false;
  ChatTemplate chat;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // add_bos_if_model_wants: puts bos_id() first if the model was trained with it (adds_bos()).
  // parse_special: control tokens written in the text ("<|im_end|>") become their ids; off, they are plain text.
  std::vector<int> encode(std::string_view text, bool add_bos_if_model_wants = false, bool parse_special = true) const;

  // The text of the ids; control tokens are written out unless skip_special. Errc::tokenizer for an id outside the
  // vocabulary.
  std::string decode(std::span<const int> ids, bool skip_special = false) const;

  // The bytes one token stands for (a part of a UTF-8 character, perhaps); control tokens as they are written.
  virtual std::string token_bytes(int id) const = 0;

  int vocab_size() const { return vocab_size_; }
  int bos_id() const { return bos_id_; }  // -1 = none
  const std::vector<int>& eos_ids() const { return eos_ids_; }
  bool is_eos(int id) const;
  bool is_special(int id) const { return special_.count(id) != 0; }
  bool adds_bos() const { return add_bos_ && bos_id_ >= 0; }

  // The prompt that makes the model answer `user`, up to the opening of its answer, without BOS: encode it with
  // add_bos_if_model_wants and parse_special. Without `system` the template's own default applies. A base model's
  // template is `none`: system, a blank line, user.
  std::string chat_prompt(std::string_view user, std::optional<std::string_view> system = {}) const;
  const ChatTemplate& chat_template() const { return chat_; }

  // Kind and hash of the vocabulary: equal ids mean equal token ids for every text.
  const std::string& id() const { return id_; }

 protected:
  Tokenizer() = default;

  // Appends the ids of text between added tokens. `start`: it is the beginning of the whole text.
  virtual void encode_plain(std::string_view text, bool start, std::vector<int>& out) const = 0;
  // Whether decode strips SentencePiece's added space from the front of the text.
  virtual bool strips_leading_space() const { return false; }

  // Sets everything but the tokens and the added tokens. Errc::tokenizer for an id outside the vocabulary.
  void set_vocabulary(const Vocabulary& vocabulary);
  void check_id(int id, int low, const char* what) const;  // Errc::tokenizer unless low <= id < vocab_size_
  void set_added(std::vector<AddedToken> added);           // Errc::tokenizer for an id outside the vocabulary
  void set_id(std::string_view kind, std::uint64_t hash);

  int vocab_size_ = 0;
  int bos_id_ = -1;
  std::vector<int> eos_ids_;
  bool add_bos_ = false;
  ChatTemplate chat_;

 private:
  const AddedToken* match_added(std::string_view text, std::size_t at, bool parse_special) const;

  std::vector<AddedToken> added_;
  std::vector<std::vector<int>> added_by_byte_;  // first byte -> indices into added_, longest text first
  std::unordered_map<int, int> special_;         // id -> index into added_
  std::string id_;
};

}  // namespace kvlab
