// Chat templates. Files carry them as Jinja programs; we recognise known ones by marks in their text and write the
// prompt ourselves. The hash of the program's text is recorded, so that an unexpected template can be noticed.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace kvlab {

struct ChatTemplate {
  enum class Kind {
    none,
    chatml,      // Qwen, SmolLM2
    llama2,      // [INST] <<SYS>>
    llama3,      // headers
    llama31,     // headers; every system message opens with two fixed dates
    mistral,     // [INST] user [/INST]; the system message is put before the user's
    mistral_v3,  // the same without the space before [/INST]
  };
  Kind kind = Kind::none;
  std::optional<std::string> default_system;  // the template's own, for prompts without a system message
  std::string hash;                           // of the program's text, 16 hex digits; empty = the model has no template
};

const char* name_of(ChatTemplate::Kind kind);

// Kind::none for an empty text, and with its hash for a text that is no known template.
ChatTemplate recognise_chat_template(std::string_view jinja);

// The prompt of one user message after `system` or else the template's default, up to the answer, without BOS.
std::string render_chat(const ChatTemplate& chat, std::string_view user, std::optional<std::string_view> system);

// The text between an answer and the user's next message. It begins with the answer's end.
std::string chat_turn(const ChatTemplate& chat);

}  // namespace kvlab
