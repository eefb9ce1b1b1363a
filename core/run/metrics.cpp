#include "run/metrics.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>

#include "base/text.hpp"

namespace kvlab {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

std::string fold(const std::string& text) {
  std::string out;
  for (unsigned char c : text) {
    if (std::isspace(c)) {
      if (!out.empty() && out.back() != ' ') out.push_back(' ');
    } else {
      out.push_back(static_cast<char>(std::tolower(c)));
    }
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

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

double f_score(double common, std::size_t answer, std::size_t reference) {
  if (answer == 0 || reference == 0) return answer == reference ? 1 : 0;
  if (common == 0) return 0;
  const double p = common / static_cast<double>(answer), r = common / static_cast<double>(reference);
  return 2 * p * r / (p + r);
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

bool contains(const std::string& answer, const std::string& reference) {
  return fold(answer).find(fold(reference)) != std::string::npos;
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
  };
  return all;
}

}  // namespace

std::vector<std::string> metric_names() {
  std::vector<std::string> out{"contains_all"};
  for (const auto& [name, f] : pairwise()) out.push_back(name);
  return out;
}

double score(const std::string& metric, const std::string& answer, const std::vector<std::string>& references) {
  if (references.empty()) return nan;
  if (metric == "contains_all") {
    double found = 0;
    for (const auto& r : references) found += contains(answer, r);
    return found / static_cast<double>(references.size());
  }
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
    if (std::isfinite(v)) {
      sum += v;
      ++count;
    }
  return count ? sum / count : nan;
}

double percentile(std::vector<double> values, double share) {
  if (values.empty()) return nan;
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(share * static_cast<double>(values.size()));
  return values[static_cast<std::size_t>(std::clamp(rank - 1, 0., static_cast<double>(values.size() - 1)))];
}

Interval mean_interval(const std::vector<double>& all) {
  std::vector<double> values;
  for (double v : all)
    if (std::isfinite(v)) values.push_back(v);
  if (values.size() < 2) return {nan, nan};
  std::mt19937_64 random(20240607);
  std::vector<double> means;
  for (int i = 0; i < 2000; ++i) {
    double sum = 0;
    for (std::size_t k = 0; k < values.size(); ++k) sum += values[random() % values.size()];
    means.push_back(sum / static_cast<double>(values.size()));
  }
  return {percentile(means, 0.025), percentile(means, 0.975)};
}

}  // namespace kvlab
