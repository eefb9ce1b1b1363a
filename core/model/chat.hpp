// Chat templates. Files carry them as Jinja programs; we recognise the known ones by what they contain and write the
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
  std::optional<std::string> default_system;  // what the template itself says when there is no system message
  std::string hash;                           // of the program's text, 16 hex digits; empty = the model has no template
};

const char* name_of(ChatTemplate::Kind kind);

// Empty text: none. A text that is no known template: none, with its hash.
ChatTemplate recognise_chat_template(std::string_view jinja);

// One user message, with a system message before it or the template's default; ends where the answer begins; no BOS.
std::string render_chat(const ChatTemplate& chat, std::string_view user, std::optional<std::string_view> system);

// What stands between an answer and the user's next message; the answer's end is its first token.
std::string chat_turn(const ChatTemplate& chat);

}  // namespace kvlab
