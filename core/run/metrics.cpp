#include "run/metrics.hpp"

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

std::vector<std::string> split(const std::string& text, const std::string& at) {
  std::vector<std::string> out(1);
  for (const char c : text)
    if (at.find(c) != std::string::npos)
      out.emplace_back();
    else
      out.back() += c;
  return out;
}

std::string trimmed(const std::string& text, const std::string& what) {
  const std::size_t begin = text.find_first_not_of(what);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(what) - begin + 1);
}

// The first run of digits; empty when there is none.
std::string first_integer(const std::string& text) {
  const std::size_t begin = text.find_first_of("0123456789");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_first_not_of("0123456789", begin) - begin);
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

double in_order(const std::string& answer, const std::vector<std::string>& references) {
  std::vector<std::string> items;
  for (const std::string& piece : split(answer, ",;\n")) {
    std::string item = fold(piece.substr(piece.rfind(':') + 1));  // after "key:", or all of it
    item = trimmed(item, " ");
    if (item.rfind("and ", 0) == 0) item.erase(0, 4);
    const std::size_t number = item.find_first_not_of("0123456789");  // "3. x", "3) x", "- x"
    if (number != std::string::npos && item.find_first_of(".)-*", number) == number &&
        item.compare(number + 1, 1, " ") == 0)
      item.erase(0, number + 2);
    item = trimmed(item, " .\"'`");
    if (!item.empty()) items.push_back(item);
  }
  double right = 0;
  for (std::size_t i = 0; i < std::min(items.size(), references.size()); ++i) right += items[i] == fold(references[i]);
  return right / static_cast<double>(references.size());
}

// Cells by (row's name, column): the first column names the row; a row's cells are parted by '|'.
using Cells = std::vector<std::string>;
void add_cells(const std::string& row, Cells& out) {
  auto cells = split(trimmed(row, " \t\r|"), "|");
  for (std::string& c : cells) c = trimmed(fold(c), " .");
  for (std::size_t i = 1; i < cells.size(); ++i) out.push_back(cells[0] + "|" + std::to_string(i) + "|" + cells[i]);
}

double table_f1(const std::string& answer, const std::vector<std::string>& references) {
  Cells wanted, got, header;
  add_cells(references.front(), header);
  for (std::size_t i = 1; i < references.size(); ++i) add_cells(references[i], wanted);
  for (const std::string& line : split(answer, "\n")) {
    Cells row;
    if (line.find_first_not_of("|-: \t\r") != std::string::npos) add_cells(line, row);
    if (row != header) got.insert(got.end(), row.begin(), row.end());
  }
  std::sort(wanted.begin(), wanted.end());
  std::sort(got.begin(), got.end());
  Cells both;
  std::set_intersection(wanted.begin(), wanted.end(), got.begin(), got.end(), std::back_inserter(both));
  return f_score(static_cast<double>(both.size()), got.size(), wanted.size());
}

// The share of references "N: text" for which entry N has the text.
using Entries = std::map<std::string, std::string>;
double met(const Entries& entries, const std::vector<std::string>& references) {
  double count = 0;
  for (const std::string& r : references) {
    const auto entry = entries.find(first_integer(r));
    count += entry != entries.end() && contains(entry->second, trimmed(r.substr(r.find(':') + 1), " "));
  }
  return count / static_cast<double>(references.size());
}

double demands(const std::string& answer, const std::vector<std::string>& references) {
  constexpr std::string_view mark = "#*#";
  Entries entries;
  for (std::size_t at = 0;;) {
    const std::size_t end = answer.find(mark, at);
    const std::string entry = answer.substr(at, end - at);
    entries[at == 0 ? "1" : first_integer(entry)] = entry;  // the prompt ends with the first entry's heading
    if (end == std::string::npos) break;
    at = end + mark.size();
  }
  return met(entries, references);
}

double listed_demands(const std::string& answer, const std::vector<std::string>& references) {
  Entries entries;
  for (const std::string& line : split(answer, "\n"))
    if (const std::string item = trimmed(line, " \t\r");
        !item.empty() && std::isdigit(static_cast<unsigned char>(item[0])))
      entries.emplace(first_integer(item), item);
  return met(entries, references);
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
  static const std::map<std::string, Listwise> all = {{"contains_all", contains_all},
                                                      {"in_order", in_order},
                                                      {"table_f1", table_f1},
                                                      {"demands", demands},
                                                      {"listed_demands", listed_demands}};
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
