#include "model/pretokenizer.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <kvlab/error.hpp>

namespace kvlab {
namespace {

constexpr std::size_t max_pattern = 1 << 16;
constexpr std::string_view white_space =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

// PCRE2 counts U+180E as white space; the tokenizers' regex engines do not. So \s is spelled out.
std::string spell_white_space(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char next = pattern[++i];
      if (next == 's' && in_class)
        out.append(white_space);
      else if ((next == 's' || next == 'S') && !in_class)
        out.append(next == 's' ? "[" : "[^").append(white_space).append("]");
      else
        out.append({c, next});
      continue;
    }
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    out.push_back(c);
  }
  return out;
}

std::string message_of(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

struct MatchDataFree {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};

}  // namespace

struct Regex::Impl {
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;
  ~Impl() {
    pcre2_code_free(code);
    pcre2_match_context_free(context);
  }
};

Regex::Regex(std::string_view pattern) : impl_(std::make_unique<Impl>()) {
  if (pattern.size() > max_pattern)
    throw Error(Errc::tokenizer,
                fmt::format("got a pattern of {} bytes, wanted at most {}", pattern.size(), max_pattern));
  const std::string spelled = spell_white_space(pattern);
  int code = 0;
  PCRE2_SIZE at = 0;
  impl_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(spelled.data()), spelled.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &at, nullptr);
  if (impl_->code == nullptr)
    throw Error(Errc::tokenizer,
                fmt::format("got the pattern '{}' ({}), wanted a regular expression", pattern, message_of(code)));
  pcre2_jit_compile(impl_->code, PCRE2_JIT_COMPLETE);  // if it fails, the interpreter matches
  impl_->context = pcre2_match_context_create(nullptr);
  if (impl_->context == nullptr) throw std::bad_alloc();
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;

void Regex::find_all(std::string_view text, std::vector<Match>& out) const {
  const std::unique_ptr<pcre2_match_data, MatchDataFree> data(pcre2_match_data_create(1, nullptr));
  if (data == nullptr) throw std::bad_alloc();
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  for (std::size_t at = 0; at < text.size();) {
    int rc = pcre2_match(impl_->code, subject, text.size(), at, PCRE2_NO_UTF_CHECK, data.get(), impl_->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
      rc = pcre2_match(impl_->code, subject, text.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data.get(),
                       impl_->context);
    if (rc == PCRE2_ERROR_NOMATCH) return;
    if (rc < 0)
      throw Error(Errc::tokenizer, fmt::format("got '{}' when splitting a text, wanted matches", message_of(rc)));
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(data.get());
    // A look-behind or \K may end a match before it begins; like an empty match it is no piece.
    if (ends[1] > ends[0] && ends[0] >= at) {
      out.push_back({ends[0], ends[1]});
      at = ends[1];
    } else {
      ++at;
      while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) ++at;
    }
  }
}

const std::string_view gpt2_pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

PreTokenizer PreTokenizer::named(std::string_view name) {
  // Llama 3 and Qwen differ in the length of a run of digits only.
  constexpr std::string_view cl100k =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  PreTokenizer out;
  if (name == "gpt-2" || name == "gpt2") {
    out.add(gpt2_pattern);
  } else if (name == "smollm") {
    out.add(R"(\p{N})");
    out.add(gpt2_pattern);
  } else if (name == "llama-bpe" || name == "llama3" || name == "llama-v3") {
    out.add(fmt::format(cl100k, R"(\p{N}{1,3})"));
  } else if (name == "qwen2" || name == "deepseek-r1-qwen") {
    out.add(fmt::format(cl100k, R"(\p{N})"));
  } else {
    throw Error(
        Errc::tokenizer,
        fmt::format("got pre-tokenizer '{}', wanted gpt-2, smollm, llama-bpe, qwen2 or deepseek-r1-qwen", name));
  }
  return out;
}

void PreTokenizer::add(std::string_view pattern, Keep keep) { steps_.push_back({Regex(pattern), keep}); }

void PreTokenizer::split(std::string_view text, std::vector<std::string_view>& out) const {
  std::vector<std::string_view> pieces{text}, next;
  std::vector<Regex::Match> matches;
  for (const Step& step : steps_) {
    next.clear();
    for (const std::string_view piece : pieces) {
      matches.clear();
      step.regex.find_all(piece, matches);
      std::size_t at = 0;
      for (const Regex::Match m : matches) {
        if (m.begin > at && step.keep != Keep::matches) next.push_back(piece.substr(at, m.begin - at));
        if (step.keep != Keep::between) next.push_back(piece.substr(m.begin, m.end - m.begin));
        at = m.end;
      }
      if (at < piece.size() && step.keep != Keep::matches) next.push_back(piece.substr(at));
    }
    pieces.swap(next);
  }
  out.insert(out.end(), pieces.begin(), pieces.end());
}

}  // namespace kvlab
