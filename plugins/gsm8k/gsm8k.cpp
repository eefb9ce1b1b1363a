// Final numbers of GSM8K. gsm8k: the number after #### (Cobbe et al. 2021; dataset.py of openai/grade-school-math).
// last_number: flexible-extract of lm-evaluation-harness.
#include <kvlab/plugin.hpp>

#include <algorithm>

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The number after the first "#### " that has one, without commas; empty where there is none.
std::string marked_number(const std::string& text) {
  const std::string mark = "#### ";
  for (std::size_t at = text.find(mark); at != text.npos; at = text.find(mark, at + 1)) {
    const std::size_t begin = at + mark.size(), first = begin + (text.compare(begin, 1, "-") == 0);
    const std::size_t end = std::min(text.find_first_not_of("0123456789.,", first), text.size());
    if (end == first) continue;
    std::string number = text.substr(begin, end - begin);
    std::erase(number, ',');
    return number;
  }
  return "";
}

double gsm8k(const std::string& answer, const std::string& reference) {
  const std::string number = marked_number(answer);
  std::string right = marked_number(reference);
  if (right.empty()) right = reference;
  std::erase(right, ',');
  return !number.empty() && number == right;
}

// The last run of at least two of $, digits, full stops and commas, or of one digit, with a minus before it.
std::string last_number(const std::string& text) {
  const auto part = [&](std::size_t i) {
    return i < text.size() && (is_digit(text[i]) || text[i] == '$' || text[i] == '.' || text[i] == ',');
  };
  std::string last = "[invalid]";
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t first = i + (text[i] == '-');
    std::size_t end = first;
    while (part(end)) ++end;
    if (end < first + 2 && !(end == first + 1 && is_digit(text[first]))) {
      ++i;
      continue;
    }
    last = text.substr(i, end - i);
    i = end;
  }
  return last;
}

// Without commas, dollars, all up to the last mark, and a full stop at the end.
std::string bare(std::string text) {
  std::erase_if(text, [](char c) { return c == ',' || c == '$'; });
  if (const std::size_t mark = text.rfind("#### "); mark != text.npos) text.erase(0, mark + 5);
  if (!text.empty() && text.back() == '.') text.pop_back();
  return text;
}

double flexible(const std::string& answer, const std::string& reference) {
  return bare(last_number(answer)) == bare(reference);
}

}  // namespace

KVLAB_PLUGIN(kvlab::metric<kvlab::FunctionMetric<gsm8k>>("gsm8k", "GSM8K: the number after #### is the reference's"),
             kvlab::metric<kvlab::FunctionMetric<flexible>>("last_number", "GSM8K, flexible: the answer's last number"))
