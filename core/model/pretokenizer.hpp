// Cuts text into the pieces that BPE merges within: a list of regular expressions, applied one after the other.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

// A compiled PCRE2 pattern in Unicode mode; \s means Unicode's White_Space, as it does for Oniguruma and Rust.
class Regex {
 public:
  explicit Regex(std::string_view pattern);  // Errc::tokenizer
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;

  struct Match {
    std::size_t begin, end;
  };
  // Appends all matches from left to right, empty ones left out. text must be valid UTF-8. Errc::tokenizer past the
  // match limit.
  void find_all(std::string_view text, std::vector<Match>& out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class PreTokenizer {
 public:
  enum class Keep {
    all,      // matches and the text between them are pieces ("Isolated")
    between,  // only the text between matches ("Removed")
    matches,  // only matches ("Removed", inverted)
  };

  // The pattern of a vocabulary by the name GGUF gives it (tokenizer.ggml.pre): gpt-2, smollm, llama-bpe, qwen2,
  // deepseek-r1-qwen and their aliases. Errc::tokenizer for another.
  static PreTokenizer named(std::string_view name);

  void add(std::string_view pattern, Keep keep = Keep::all);
  bool empty() const { return steps_.empty(); }

  // Appends the pieces, in order; text is valid UTF-8. Without steps: the whole text.
  void split(std::string_view text, std::vector<std::string_view>& out) const;

 private:
  struct Step {
    Regex regex;
    Keep keep;
  };
  std::vector<Step> steps_;
};

extern const std::string_view gpt2_pattern;  // of the ByteLevel pre-tokenizer of tokenizer.json

}  // namespace kvlab
