#include "run/metrics.hpp"

#include <kvlab/answers.hpp>
#include <kvlab/error.hpp>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <map>

#include "base/text.hpp"

namespace kvlab {
namespace {

using namespace answers;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

std::vector<std::string> words(const std::string& text, bool normalize) {
  std::string clean;
  for (unsigned char c : text)
    if (!normalize || !std::ispunct(c)) clean.push_back(static_cast<char>(std::tolower(c)));
  std::vector<std::string> out;
  std::string word;
  clean.push_back(' ');
  for (unsigned char c : clean) {
    if (!std::isspace(c)) {
      word.push_back(static_cast<char>(c));
      continue;
    }
    if (!word.empty() && !(normalize && (word == "a" || word == "an" || word == "the"))) out.push_back(word);
    word.clear();
  }
  return out;
}

double f1(const std::string& answer, const std::string& reference) {
  const auto a = words(answer, true), r = words(reference, true);
  std::map<std::string, int> counts;
  for (const auto& w : r) ++counts[w];
  int common = 0;
  for (const auto& w : a)
    if (counts[w]-- > 0) ++common;
  return f_score(common, a.size(), r.size());
}

double rouge_l(const std::string& answer, const std::string& reference) {
  const auto a = words(answer, false), r = words(reference, false);
  std::vector<int> row(r.size() + 1, 0);
  for (const auto& word : a) {
    int diagonal = 0;
    for (std::size_t j = 0; j < r.size(); ++j) {
      const int above = row[j + 1];
      row[j + 1] = word == r[j] ? diagonal + 1 : std::max(above, row[j]);
      diagonal = above;
    }
  }
  return f_score(row.back(), a.size(), r.size());
}

// A capital letter goes before a small one, which may be the article.
double choice(const std::string& answer, const std::string& reference) {
  const auto is_part = [&](std::size_t i) {
    return i < answer.size() && std::isalnum(static_cast<unsigned char>(answer[i]));
  };
  for (const char first : {'A', 'a'})
    for (std::size_t i = 0; i < answer.size(); ++i)
      if (answer[i] >= first && answer[i] <= first + 3 && !is_part(i + 1) && (i == 0 || !is_part(i - 1)))
        return fold(reference) == std::string(1, static_cast<char>(std::tolower(answer[i])));
  return 0;
}

bool has_word(const std::string& answer, const std::string& reference) {
  const auto all = split(answer, "\n:\"'.,?!{} \t\r");
  return std::find(all.begin(), all.end(), reference) != all.end();
}

double contains_all(const std::string& answer, const std::vector<std::string>& references) {
  double found = 0;
  for (const auto& r : references) found += contains(answer, r);
  return found / static_cast<double>(references.size());
}

std::string first_line(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t\r\n");
  return begin == std::string::npos ? "" : text.substr(begin, text.find('\n', begin) - begin);
}

using Pairwise = std::function<double(const std::string&, const std::string&)>;
const std::map<std::string, Pairwise>& pairwise() {
  static const std::map<std::string, Pairwise> all = {
      {"contains", contains},
      {"exact", [](const auto& a, const auto& r) { return double(fold(first_line(a)) == fold(r)); }},
      {"prefix", [](const auto& a, const auto& r) { return double(fold(a).rfind(fold(r), 0) == 0); }},
      {"f1", f1},
      {"rouge_l", rouge_l},
      {"choice", choice},
      {"first_integer", [](const auto& a, const auto& r) { return double(first_integer(a) == r); }},
      {"word", has_word},
  };
  return all;
}

// Scores all references together.
using Listwise = std::function<double(const std::string&, const std::vector<std::string>&)>;
const std::map<std::string, Listwise>& listwise() {
  static const std::map<std::string, Listwise> all = {{"contains_all", contains_all}};
  return all;
}

}  // namespace

std::vector<std::string> metric_names() {
  std::vector<std::string> out;
  for (const auto& [name, f] : listwise()) out.push_back(name);
  for (const auto& [name, f] : pairwise()) out.push_back(name);
  return out;
}

double score(const std::string& metric, const std::string& answer, const std::vector<std::string>& references) {
  if (references.empty()) return nan;
  if (const auto all = listwise().find(metric); all != listwise().end()) return all->second(answer, references);
  const auto it = pairwise().find(metric);
  if (it == pairwise().end())
    throw Error(Errc::config, "got metric '" + metric + "', wanted one of: " + join(metric_names()));
  double best = 0;
  for (const auto& r : references) best = std::max(best, it->second(answer, r));
  return best;
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  int count = 0;
  for (double v : values)
    if (!std::isnan(v)) {
      sum += v;
      ++count;
    }
  return count ? sum / count : nan;
}

double percentile(std::vector<double> values, double share) {
  std::erase_if(values, [](double v) { return std::isnan(v); });
  if (values.empty()) return nan;
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(share * static_cast<double>(values.size()));
  return values[static_cast<std::size_t>(std::clamp(rank - 1, 0., static_cast<double>(values.size() - 1)))];
}

}  // namespace kvlab
