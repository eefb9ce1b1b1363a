#include "model/chat.hpp"

#include "base/fingerprint.hpp"

namespace kvlab {
namespace {

bool holds(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

// The system message that a ChatML program writes when the conversation has none: a literal between the opening and the
// end of a system turn. A turn that is put together from pieces has a quote or a brace in it, so it does not count.
std::optional<std::string> chatml_default(std::string_view jinja) {
  for (const std::string_view open : {"<|im_start|>system\n", "<|im_start|>system\\n"})
    for (auto at = jinja.find(open); at != std::string_view::npos; at = jinja.find(open, at + 1)) {
      const std::string_view rest = jinja.substr(at + open.size());
      const std::string_view literal = rest.substr(0, rest.find("<|im_end|>"));
      if (literal.size() < rest.size() && literal.find_first_of("'\"{}") == std::string_view::npos)
        return std::string(literal);
    }
  return {};
}

}  // namespace

const char* name_of(ChatTemplate::Kind kind) {
  switch (kind) {
    case ChatTemplate::Kind::none: return "none";
    case ChatTemplate::Kind::chatml: return "chatml";
    case ChatTemplate::Kind::llama2: return "llama2";
    case ChatTemplate::Kind::llama3: return "llama3";
    case ChatTemplate::Kind::llama31: return "llama3.1";
    case ChatTemplate::Kind::mistral: return "mistral";
    case ChatTemplate::Kind::mistral_v3: return "mistral-v3";
  }
  return "?";
}

ChatTemplate recognise_chat_template(std::string_view jinja) {
  ChatTemplate chat;
  if (jinja.empty()) return chat;
  chat.hash = Fingerprint().add(jinja).hex();
  if (holds(jinja, "<|im_start|>")) {
    chat.kind = ChatTemplate::Kind::chatml;
    chat.default_system = chatml_default(jinja);
  } else if (holds(jinja, "<|start_header_id|>")) {
    chat.kind = ChatTemplate::Kind::llama3;
    if (holds(jinja, "Cutting Knowledge Date")) {
      chat.kind = ChatTemplate::Kind::llama31;
      chat.default_system = "";
    }
  } else if (holds(jinja, "[INST]") && holds(jinja, "<<SYS>>")) {
    chat.kind = ChatTemplate::Kind::llama2;
  } else if (holds(jinja, "[INST]") && !holds(jinja, "[SYSTEM_PROMPT]")) {
    chat.kind = holds(jinja, " [/INST]") ? ChatTemplate::Kind::mistral : ChatTemplate::Kind::mistral_v3;
  }
  return chat;
}

std::string render_chat(const ChatTemplate& chat, std::string_view user, std::optional<std::string_view> system) {
  if (!system && chat.default_system) system = *chat.default_system;
  std::string out;
  switch (chat.kind) {
    case ChatTemplate::Kind::none:
      if (system && !system->empty()) out.append(*system).append("\n\n");
      return out.append(user);
    case ChatTemplate::Kind::chatml:
      if (system) out.append("<|im_start|>system\n").append(*system).append("<|im_end|>\n");
      return out.append("<|im_start|>user\n").append(user).append("<|im_end|>\n<|im_start|>assistant\n");
    case ChatTemplate::Kind::llama2:
      if (system) out.append("<<SYS>>\n").append(*system).append("\n<</SYS>>\n\n");
      out.append(user);
      return "[INST] " + std::string(trimmed(out)) + " [/INST]";
    case ChatTemplate::Kind::llama3:
    case ChatTemplate::Kind::llama31: {
      const auto turn = [&](std::string_view role) {
        out.append("<|start_header_id|>").append(role).append("<|end_header_id|>\n\n");
      };
      if (system) {
        turn("system");
        if (chat.kind == ChatTemplate::Kind::llama31)
          out.append("Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n");
        out.append(trimmed(*system)).append("<|eot_id|>");
      }
      turn("user");
      out.append(trimmed(user)).append("<|eot_id|>");
      turn("assistant");
      return out;
    }
    case ChatTemplate::Kind::mistral:
    case ChatTemplate::Kind::mistral_v3:
      out.append("[INST] ");
      if (system) out.append(*system).append("\n\n");
      out.append(user);
      return out.append(chat.kind == ChatTemplate::Kind::mistral ? " [/INST]" : "[/INST]");
  }
  return out;
}

std::string chat_turn(const ChatTemplate& chat) {
  switch (chat.kind) {
    case ChatTemplate::Kind::none: return "";
    case ChatTemplate::Kind::chatml: return "<|im_end|>\n<|im_start|>user\n";
    case ChatTemplate::Kind::llama2: return "</s><s>[INST] ";
    case ChatTemplate::Kind::llama3:
    case ChatTemplate::Kind::llama31: return "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n";
    case ChatTemplate::Kind::mistral:
    case ChatTemplate::Kind::mistral_v3: return "</s>[INST] ";
  }
  return "";
}

}  // namespace kvlab
