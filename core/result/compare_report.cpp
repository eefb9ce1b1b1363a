#include "result/compare_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <kvlab/error.hpp>
#include <nlohmann/json.hpp>
#include <set>

#include "base/text.hpp"
#include "result/answers.hpp"

namespace kvlab::results {
namespace {

constexpr const char* columns_note =
    "lost, won: questions with a lower or a higher score than there; no end: answers that the limit of length ended; "
    "loops: that end in a phrase of two words or more, three times in a row; length: tokens / tokens there";
constexpr const char* difference_note =
    "the score minus that one, mean over questions; in brackets its 95 % interval: Tango's for answers right or wrong, "
    "one to each of 6 contexts or more, else bootstrap over contexts";
constexpr const char* nll_note =
    "nats per token above that one: the log of the perplexities' ratio; in brackets its 95 % interval, bootstrap over "
    "texts";
constexpr const char* mcnemar_note = "of no difference, two-sided: McNemar's exact test; Holm: adjusted for all rows";
constexpr const char* flips_note = "of no difference, two-sided: sign flips of contexts; Holm: adjusted for all rows";
constexpr const char* rank_note =
    "by score; in brackets its 95 % interval over contexts, too narrow where policies are nearly equal";
constexpr const char* noise_note = "keeps everything as well: its difference is noise";

// A row of a comparison. Borrows its answers.
struct Row {
  std::string policy, budget;
  const Answers* own = nullptr;
  const Answers* other = nullptr;  // null: others are compared with this row
  bool noise = false;
  Paired paired{};
  Difference difference{};
};

std::string p_text(double p) { return !measured(p) ? "-" : p < 1e-4 ? "<1e-4" : fmt::format("{:.2g}", p); }

// What rounding left is 0.
std::string short_number(double v, int digits = 3) {
  return fmt::format("{:.{}g}", std::fabs(v) < 1e-12 ? 0. : v, digits);
}

std::string difference_text(const Difference& d, bool faint) {
  const auto end = [](double v) { return short_number(v, 2); };
  const std::string interval =
      measured(d.interval.low) ? fmt::format(" ({} to {})", end(d.interval.low), end(d.interval.high)) : " (-)";
  return (faint ? "~" : "") + short_number(d.mean) + interval;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

class Comparison {
 public:
  Comparison(std::vector<std::string>& notes, std::deque<Answers>& answers) : notes_(notes), answers_(answers) {}

  const Answers* keep(Answers answers) { return &answers_.emplace_back(std::move(answers)); }
  void add(Row row);
  void add_noise(const Answers& own, const Answers& other);  // no row of its own
  bool empty() const { return compared_ == 0; }
  ReportTable table(const std::string& title);

 private:
  void pair(Row& row);
  void count_noise(const Row& row);
  double detectable() const;
  double churn() const;
  std::vector<std::string> words_of(const Row& row, double holm, const std::string& rank) const;
  std::vector<std::string> rank_texts() const;
  std::vector<std::string> header();
  std::string noise_text() const;
  bool of(ScoreRange range) const;

  Notes notes_;
  std::deque<Answers>& answers_;
  Contexts contexts_;
  std::vector<Row> rows_;
  std::size_t compared_ = 0, policies_ = 0;  // rows that are compared; those that are no noise
  bool forced_ = false, mcnemar_ = true;
  double smallest_ = not_measured;  // difference that can be told from none
  // Neither large enough for this table nor, by its own test, told from none.
  bool undetected(const Difference& d) const { return std::fabs(d.mean) < smallest_ && !(d.p < 0.05); }
  struct {
    std::int64_t comparisons = 0, pairs = 0, flipped = 0, other_text = 0;
    double most = 0, error = 0, churn = 0;
  } noise_;
};

void Comparison::pair(Row& row) {
  contexts_.add(*row.own);
  contexts_.add(*row.other);
  row.paired = paired(*row.own, *row.other, contexts_);
  row.difference = difference_of(row.paired.pairs);
}

void Comparison::add(Row row) {
  for (const auto& [question, answer] : *row.own) forced_ |= answer.forced;
  if (row.other) {
    pair(row);
    if (row.difference.pairs == 0) return;
    ++compared_;
    row.noise ? count_noise(row) : void(++policies_);
    mcnemar_ &= row.difference.mcnemar;
  }
  rows_.push_back(std::move(row));
}

void Comparison::add_noise(const Answers& own, const Answers& other) {
  Row row{"", "", &own, &other, true};
  pair(row);
  if (row.difference.pairs > 0) count_noise(row);
}

void Comparison::count_noise(const Row& row) {
  const Difference& d = row.difference;
  ++noise_.comparisons;
  noise_.pairs += d.pairs;
  noise_.flipped += d.lost + d.won;
  noise_.other_text += row.paired.other_text;
  noise_.most = std::max(noise_.most, std::fabs(d.mean));
  if (measured(d.error)) noise_.error = std::max(noise_.error, d.error);
  noise_.churn = std::max(noise_.churn, static_cast<double>(d.lost + d.won) / static_cast<double>(d.pairs));
}

// Flips that cancel out: of full against itself where that was measured, and of the rows.
double Comparison::churn() const {
  double sum = 0;
  for (const Row& row : rows_)
    if (row.other && !row.noise)
      sum += 2. * static_cast<double>(std::min(row.difference.lost, row.difference.won)) /
             static_cast<double>(row.difference.pairs);
  return policies_ == 0 ? noise_.churn : std::max(noise_.churn, sum / static_cast<double>(policies_));
}

bool Comparison::of(ScoreRange range) const {
  return std::all_of(rows_.begin(), rows_.end(), [&](const Row& r) { return !r.other || r.difference.range <= range; });
}

// Rows have standard errors of their own: their median stands for a row of this table.
double Comparison::detectable() const {
  std::vector<double> errors;
  std::int64_t contexts = 0;
  for (const Row& row : rows_) {
    contexts = std::max(contexts, row.difference.contexts);
    if (row.other && !row.noise && row.difference.error > 1e-12) errors.push_back(row.difference.error);
  }
  const bool alone = of(ScoreRange::zero_one) && mcnemar_;
  double out = not_measured;
  if (alone || (errors.empty() && of(ScoreRange::share)))
    out = detectable_share(static_cast<double>(contexts), alone ? churn() : 0);
  else if (!errors.empty())
    out = detectable_mean(std::max(median(errors), noise_.error));
  return measured(out) ? std::max(out, noise_.most) : out;
}

// Ranks are of the contexts that all rows share.
std::vector<std::string> Comparison::rank_texts() const {
  std::vector<const Row*> ranked;
  for (const Row& row : rows_)
    if (!row.noise) ranked.push_back(&row);
  std::map<int, std::size_t> places;
  std::vector<std::vector<double>> values(ranked.size());
  std::vector<double> weights;
  Contexts contexts = contexts_;
  for (const auto& [question, first] : *ranked.front()->own) {
    const auto scored = [&, &q = question](const Row* row) {
      const auto found = row->own->find(q);
      return found != row->own->end() && std::isfinite(found->second.score);
    };
    if (!std::all_of(ranked.begin(), ranked.end(), scored)) continue;
    const auto [place, made] = places.emplace(contexts.of(question), weights.size());
    if (made) {
      weights.push_back(0);
      for (auto& v : values) v.push_back(0);
    }
    weights[place->second] += first.weight;
    for (std::size_t r = 0; r < ranked.size(); ++r)
      values[r][place->second] += ranked[r]->own->at(question).score * first.weight;
  }
  if (weights.size() < 2) return {};
  std::vector<std::string> out;
  const auto ranks = ranks_of(values, weights, forced_);
  auto next = ranks.begin();
  for (const Row& row : rows_) {
    if (row.noise) {
      out.emplace_back("-");
      continue;
    }
    out.push_back(fmt::format("{:g} ({}-{})", next->rank, next->low, next->high));
    ++next;
  }
  return out;
}

std::vector<std::string> Comparison::header() {
  std::vector<std::string> out{"policy", "budget"};
  out.push_back((forced_ ? "nats/token" : "difference") + notes_.mark(forced_ ? nll_note : difference_note));
  out.push_back("p" + notes_.mark(mcnemar_ ? mcnemar_note : flips_note));
  if (policies_ > 1) out.emplace_back("Holm");
  if (of(ScoreRange::zero_one))
    out.insert(out.end(), {"lost", "won", "both", "neither"});
  else
    out.insert(out.end(), {"lost", "won", "equal"});
  if (!forced_) out.insert(out.end(), {"length", "no end", "loops"});
  return out;
}

std::vector<std::string> Comparison::words_of(const Row& row, double holm, const std::string& rank) const {
  const Difference& d = row.difference;
  const bool compared = row.other;
  const auto count = [&](std::int64_t n) { return compared ? std::to_string(n) : "-"; };
  std::vector<std::string> out{row.policy, row.budget};
  out.push_back(compared ? difference_text(d, undetected(d)) : "-");
  out.push_back(compared ? p_text(d.p) : "-");
  if (policies_ > 1) out.push_back(p_text(holm));
  out.push_back(count(d.lost));
  out.push_back(count(d.won));
  if (of(ScoreRange::zero_one))
    out.insert(out.end(), {count(d.both), count(d.neither)});
  else
    out.push_back(count(d.both + d.neither));
  if (!forced_) {
    double cut = 0, looping = 0;
    for (const auto& [question, a] : *row.own) cut += a.cut, looping += a.looping;
    const bool lengths = compared && row.paired.other_tokens > 0;
    out.push_back(lengths ? fmt::format("{:.2f}", row.paired.own_tokens / row.paired.other_tokens) : "-");
    out.push_back(short_number(cut));
    out.push_back(short_number(looping));
  }
  if (!rank.empty()) out.push_back(rank);
  return out;
}

std::string Comparison::noise_text() const {
  return fmt::format(
      "noise floor, full against full in {} {}: a difference of {} at most, {} of {} answers flipped, {} other texts",
      noise_.comparisons, noise_.comparisons == 1 ? "comparison" : "comparisons", short_number(noise_.most),
      noise_.flipped, noise_.pairs, noise_.other_text);
}

ReportTable Comparison::table(const std::string& title) {
  std::vector<double> p;
  std::int64_t pairs = 0, contexts = 0;
  for (const Row& row : rows_) {
    p.push_back(row.other && !row.noise ? row.difference.p : not_measured);
    pairs = std::max(pairs, row.difference.pairs);
    contexts = std::max(contexts, row.difference.contexts);
  }
  const std::vector<double> adjusted = holm(p);
  const std::vector<std::string> ranks = policies_ > 1 ? rank_texts() : std::vector<std::string>{};
  smallest_ = detectable();
  ReportTable out;
  out.title = fmt::format("{}{}: {} {} in {} {}", title, notes_.mark(columns_note), pairs,
                          pairs == 1 ? "question" : "questions", contexts, contexts == 1 ? "context" : "contexts");
  out.header = header();
  if (!ranks.empty()) out.header.push_back("rank" + notes_.mark(rank_note));
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    Row& row = rows_[r];
    if (row.noise) row.policy += notes_.mark(noise_note);
    if (row.other && row.difference.pairs < pairs)
      row.policy += notes_.mark(fmt::format("only {} of the questions are paired", row.difference.pairs));
    if (row.other && undetected(row.difference)) out.faint.push_back(r);
    out.rows.push_back(words_of(row, adjusted[r], ranks.empty() ? "" : ranks[r]));
  }
  out.under.push_back(measured(smallest_) ? fmt::format("smallest difference that this table can detect: {} (power "
                                                        "about 80 %, two-sided 5 %); ~ is smaller, with p from 0.05",
                                                        short_number(smallest_))
                                          : "too few contexts to detect a difference (power 80 %, two-sided 5 %)");
  if (noise_.comparisons > 0) out.under.push_back(noise_text());
  return out;
}

std::size_t file_of(const Group& group, const Samples& samples) {
  const auto found = samples.find(&group.first());
  return found == samples.end() ? 0 : found->second->file;
}

bool is_full(const Group& group) { return !group.good.empty() && keeps_everything(group.first()); }

// Later repeats of what keeps everything against the first.
void add_repeats(Comparison& comparison, const Group& full, const Samples& samples) {
  std::set<std::int64_t> repeats;
  for (const SummaryRow* row : full.good) repeats.insert(row->repeat);
  if (repeats.size() < 2) return;
  const Answers* first = comparison.keep(answers_of(full, samples, *repeats.begin()));
  for (auto r = std::next(repeats.begin()); r != repeats.end(); ++r)
    comparison.add_noise(*comparison.keep(answers_of(full, samples, *r)), *first);
}

// "snap 64"
std::string full_name(const Group& group, const Block& block) {
  const std::string budget = budget_text(group);
  return policy_text(group, block) + (budget == "-" ? "" : " " + budget);
}

// The group of this name, or null. Errc::config if it fits several.
const Group* named(const std::string& name, const Block& block) {
  std::vector<const Group*> found;
  std::vector<std::string> names;
  for (const Group& group : block.groups) {
    if (full_name(group, block) == name) return &group;
    if (policy_text(group, block) != name) continue;
    found.push_back(&group);
    names.push_back(full_name(group, block));
  }
  if (found.size() > 1)
    throw Error(Errc::config,
                fmt::format("got '{}', which {} rows of '{}' have, wanted one of: {}", name, found.size(),
                            title_of(block), join(names)),
                "--compare");
  return found.empty() ? nullptr : found.front();
}

}  // namespace

bool keeps_everything(const SummaryRow& row) {
  if (!row.ablated.empty()) return false;
  const nlohmann::json params = nlohmann::json::parse(row.params, nullptr, false);
  return params.is_object() && params.size() == params.count("page_size");
}

Answers answers_of(const Group& group, const Samples& samples, std::int64_t repeat) {
  std::vector<CellSamples> cells;
  for (const SummaryRow* row : group.good)
    if (const auto found = samples.find(row); found != samples.end() && (repeat < 0 || row->repeat == repeat))
      cells.push_back({row->seed, &found->second->samples});
  return answers_of(cells);
}

Interval pooled_interval(const Group& group, const Samples& samples) {
  const Answers answers = answers_of(group, samples);
  Contexts contexts;
  contexts.add(answers);
  std::vector<Scored> scored;
  bool forced = false;
  for (const auto& [question, a] : answers) {
    scored.push_back({contexts.of(question), a.score * a.weight, a.weight});
    forced |= a.forced;
  }
  return forced ? perplexity_interval(scored) : score_interval(scored);
}

std::optional<ReportTable> against_full(const Block& block, const Samples& samples, std::vector<std::string>& notes) {
  std::map<std::size_t, const Group*> fulls;  // by file: the first that keeps everything
  for (const Group& group : block.groups)
    if (is_full(group)) fulls.emplace(file_of(group, samples), &group);
  const auto first = std::find_if(block.groups.begin(), block.groups.end(), is_full);
  if (fulls.empty() || std::ranges::count(split_labels(first->first().labels), "synthetic")) return std::nullopt;
  std::deque<Answers> answers;
  Comparison comparison(notes, answers);
  std::map<const Group*, const Answers*> references;
  for (const auto& [file, full] : fulls) references[full] = comparison.keep(answers_of(*full, samples));
  comparison.add({policy_text(*first, block), budget_text(*first), references.at(&*first)});
  for (const Group& group : block.groups) {
    if (is_full(group)) add_repeats(comparison, group, samples);
    if (&group == &*first || group.good.empty()) continue;
    const auto own_full = fulls.find(file_of(group, samples));
    const Group* other = is_full(group) || own_full == fulls.end() ? &*first : own_full->second;
    comparison.add({policy_text(group, block), budget_text(group), comparison.keep(answers_of(group, samples)),
                    references.at(other), is_full(group)});
  }
  if (comparison.empty()) return std::nullopt;
  return comparison.table(title_of(block) + ", against " + policy_text(*first, block));
}

std::vector<ReportTable> against(const std::string& own, const std::string& other, const std::vector<Block>& blocks,
                                 const Samples& samples, std::vector<std::string>& notes) {
  std::vector<ReportTable> out;
  std::set<std::string> names;
  for (const Block& block : blocks) {
    for (const Group& group : block.groups) names.insert(full_name(group, block));
    const Group *a = named(own, block), *b = named(other, block);
    if (!a || !b) continue;
    if (a == b)
      throw Error(Errc::config, fmt::format("got the row '{}' twice, wanted two rows", full_name(*a, block)),
                  "--compare");
    std::deque<Answers> answers;
    Comparison comparison(notes, answers);
    const Answers* reference = comparison.keep(answers_of(*b, samples));
    comparison.add({policy_text(*b, block), budget_text(*b), reference});
    comparison.add({policy_text(*a, block), budget_text(*a), comparison.keep(answers_of(*a, samples)), reference});
    if (!comparison.empty())
      out.push_back(
          comparison.table(title_of(block) + ", " + full_name(*a, block) + " against " + full_name(*b, block)));
  }
  if (!out.empty()) return out;
  throw Error(
      Errc::config,
      fmt::format("got '{}' and '{}', which no table has together with scores of the same questions, wanted two "
                  "of: {}",
                  one_line(own), one_line(other), join({names.begin(), names.end()})),
      "--compare");
}

}  // namespace kvlab::results
