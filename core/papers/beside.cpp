#include "papers/beside.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <set>

#include "base/text.hpp"
#include "result/answers.hpp"
#include "result/compare_report.hpp"
#include "result/place.hpp"
#include "result/profile_report.hpp"
#include "result/report_blocks.hpp"

namespace kvlab::papers {
namespace {

using results::Block;
using results::Group;
using results::measured;
using results::not_measured;
using results::number;
using results::SummaryRow;

constexpr double near = 0.1;  // a run's prompts and budgets come out a little off the numbers that name them

using Get = std::function<double(const SummaryRow&)>;

double of_count(std::int64_t n) { return n < 0 ? not_measured : static_cast<double>(n); }

// Sums parts of a cell's mean step; NaN where one was not measured.
double part_sum(const OurRun& run, const std::string& cell, const std::vector<std::string>& parts) {
  const auto own = run.parts.find(cell);
  if (own == run.parts.end()) return not_measured;
  double sum = 0;
  for (const std::string& part : parts) {
    const auto ms = own->second.find(part);
    sum += ms == own->second.end() ? not_measured : ms->second;
  }
  return sum;
}

// The mean over a cell's samples; NaN without any.
double sample_mean(const OurRun& run, const std::string& cell, std::int64_t results::SampleRow::*of) {
  const auto own = run.samples.find(cell);
  if (own == run.samples.end() || own->second.empty()) return not_measured;
  double sum = 0;
  for (const results::SampleRow& row : own->second) sum += static_cast<double>(row.*of);
  return sum / static_cast<double>(own->second.size());
}

// The mean number of a workload's requests that are admitted and not at their end, from the first admission to the last
// end.
double requests_at_once(const OurRun& run, const std::string& cell) {
  const auto own = run.samples.find(cell);
  if (own == run.samples.end()) return not_measured;
  double inside = 0, begin = std::numeric_limits<double>::infinity(), end = -begin;
  for (const results::SampleRow& row : own->second) {
    const double admitted = row.arrival_ms + row.queue_ms;
    inside += row.end_ms - admitted;  // NaN where there are no times
    begin = std::min(begin, admitted), end = std::max(end, row.end_ms);
  }
  return end > begin ? inside / (end - begin) : not_measured;
}

// The most requests of a workload that are between their first and their last token at one moment.
double most_that_decode(const OurRun& run, const std::string& cell) {
  const auto own = run.samples.find(cell);
  if (own == run.samples.end()) return not_measured;
  std::vector<std::pair<double, int>> changes;
  for (const results::SampleRow& row : own->second) {
    const double first = row.arrival_ms + row.ttft_ms;
    if (!measured(first) || !measured(row.end_ms)) return not_measured;
    changes.emplace_back(first, 1), changes.emplace_back(row.end_ms, -1);
  }
  std::sort(changes.begin(), changes.end());  // at one moment those that end come first
  int now = 0, most = 0;
  for (const auto& [when, change] : changes) most = std::max(most, now += change);
  return most > 0 ? most : not_measured;
}

Get getter(const Reading& reading, const OurRun& run) {
  if (reading.read == "fetched_bytes")
    return [&](const SummaryRow& row) {
      const auto own = run.fetched.find(row.cell);
      return own == run.fetched.end() ? not_measured : own->second;
    };
  if (reading.read == "part_ms") return [&](const SummaryRow& row) { return part_sum(run, row.cell, reading.parts); };
  if (reading.read == "part_share")
    return [&](const SummaryRow& row) {
      double all = 0;
      if (const auto own = run.parts.find(row.cell); own != run.parts.end())
        for (const auto& [part, ms] : own->second) all += ms;
      return part_sum(run, row.cell, reading.parts) / all;
    };
  if (reading.read == "requests_at_once") return [&](const SummaryRow& r) { return requests_at_once(run, r.cell); };
  if (reading.read == "decode_tokens_per_s")
    return [&](const SummaryRow& r) { return 1e3 * most_that_decode(run, r.cell) / r.tpot_ms_p50; };
  if (reading.read == "prompt_tokens")
    return [&](const SummaryRow& r) { return sample_mean(run, r.cell, &results::SampleRow::prompt_tokens); };
  if (reading.read == "answer_tokens")
    return [&](const SummaryRow& r) { return sample_mean(run, r.cell, &results::SampleRow::output_tokens); };
  static const std::map<std::string, Get> all{
      {"score", [](const SummaryRow& r) { return r.score; }},
      {"pass", [](const SummaryRow& r) { return r.pass; }},
      {"kl", [](const SummaryRow& r) { return r.kl; }},
      {"top1", [](const SummaryRow& r) { return r.top1; }},
      {"mass", [](const SummaryRow& r) { return r.mass; }},
      {"compression", [](const SummaryRow& r) { return r.compression; }},
      {"device_bytes_peak", [](const SummaryRow& r) { return of_count(r.device_bytes_peak); }},
      {"device_bytes_decode", [](const SummaryRow& r) { return r.device_bytes_decode; }},
      {"host_bytes_peak", [](const SummaryRow& r) { return of_count(r.host_bytes_peak); }},
      {"ttft_ms", [](const SummaryRow& r) { return r.ttft_ms; }},
      {"tpot_ms_mean", [](const SummaryRow& r) { return r.tpot_ms_mean; }},
      {"tpot_ms_p50", [](const SummaryRow& r) { return r.tpot_ms_p50; }},
      {"tpot_ms_p95", [](const SummaryRow& r) { return r.tpot_ms_p95; }},
      {"tpot_ms_p99", [](const SummaryRow& r) { return r.tpot_ms_p99; }},
      {"tokens_per_s", [](const SummaryRow& r) { return r.tokens_per_s; }},
      {"overhead", [](const SummaryRow& r) { return r.overhead; }},
  };
  return all.at(reading.read);
}

bool fits(const std::optional<double>& wanted, double got) {
  return !wanted || std::fabs(got - *wanted) <= near * std::fabs(*wanted);
}

// A run's cells with what reports know of them.
class Cells {
 public:
  explicit Cells(const OurRun& run) : blocks_(results::blocks_of(run.summary.rows)) {
    for (const SummaryRow& row : run.summary.rows) {
      const auto own = run.samples.find(row.cell);
      rows_.push_back({0, own == run.samples.end() ? std::vector<results::SampleRow>() : own->second});
    }
    for (std::size_t r = 0; r < rows_.size(); ++r) samples_.emplace(&run.summary.rows[r], &rows_[r]);
  }

  std::vector<const Block*> blocks(const Reading& r) const {
    std::vector<const Block*> out;
    for (const Block& b : blocks_)
      if ((r.task.empty() || r.over_tasks || b.task == r.task) && (r.model.empty() || b.model == r.model) &&
          fits(r.context, static_cast<double>(b.context)))
        out.push_back(&b);
    return out;
  }

  // The only group with this name. A budget tells several apart.
  static const Group* group(const Block& block, const std::string& policy, const std::optional<double>& budget,
                            std::string& why) {
    const Group *found = nullptr, *failed = nullptr;  // a failed cell may know no budget
    for (const Group& g : block.groups) {
      if (!policy.empty() && g.first().policy != policy) continue;
      const bool known = !g.good.empty() || measured(g.first().budget_tokens);
      if (budget && known && !fits(budget, g.first().budget_tokens)) continue;
      if (g.good.empty()) {
        failed = &g;
        continue;
      }
      if (found) return why = "several rows fit", nullptr;
      found = &g;
    }
    if (!found) why = failed ? failed->first().status : "not run";
    return found;
  }

  Interval score_interval(const Group& g) const {
    if (g.good.size() > 1) return results::pooled_interval(g, samples_);
    return {g.first().score_lo, g.first().score_hi};
  }

  // Of own / other, whose answers are paired. The ratio of two perplexities is exp of the difference in nats.
  Interval ratio_interval(const Group& own, const Group& other) const {
    results::Contexts contexts;
    const results::Answers a = answers(own), b = answers(other);
    contexts.add(a), contexts.add(b);
    const std::vector<Pair> pairs = results::paired(a, b, contexts).pairs;
    if (a.empty() || !a.begin()->second.forced) return kvlab::ratio_interval(pairs);
    const Interval nats = difference_of(pairs).interval;
    return {std::exp(nats.low), std::exp(nats.high)};
  }

 private:
  results::Answers answers(const Group& g) const {
    std::vector<results::CellSamples> cells;
    for (const SummaryRow* row : g.good) cells.push_back({row->seed, &samples_.at(row)->samples});
    return results::answers_of(cells);
  }

  std::vector<Block> blocks_;
  std::vector<results::RowSamples> rows_;
  results::Samples samples_;
};

OurValue in_unit(OurValue v, const std::string& as) {
  const auto each = [&](const std::function<double(double)>& f) {
    v.value = f(v.value);
    v.interval = {f(v.interval.low), f(v.interval.high)};
    if (v.interval.low > v.interval.high) std::swap(v.interval.low, v.interval.high);
  };
  if (as == "percent" || as == "retained") each([](double x) { return 100 * x; });
  if (as == "saved") each([](double x) { return 100 * (1 - x); });
  if (as == "inverse") each([](double x) { return 1 / x; });
  return v;
}

OurValue of_block(const Reading& r, const OurRun& run, const Cells& cells, const Block& block) {
  OurValue out;
  const Group* own = Cells::group(block, r.policy, r.budget, out.why);
  if (!own) return out;
  const Get get = getter(r, run);
  out.value = results::mean_over(*own, get);
  const bool scored = r.read == "score";
  if (r.as == "value" || r.as == "percent") {
    if (scored) out.interval = cells.score_interval(*own);
    if (r.read == "pass" && own->good.size() == 1) out.interval = {own->first().pass_lo, own->first().pass_hi};
  } else {
    const Group* other = Cells::group(block, r.against, std::nullopt, out.why);
    if (!other) return {not_measured, out.interval, r.against + ": " + out.why};
    const double base = results::mean_over(*other, get);
    if (scored) out.interval = cells.ratio_interval(*own, *other);
    out.value /= base;
  }
  if (!measured(out.value)) out.why = "not measured";
  return in_unit(out, r.as);
}

// The mean over these tasks; none: over all of the run.
OurValue over_tasks(const Reading& r, const OurRun& run, const Cells& cells, const std::vector<std::string>& wanted) {
  OurValue out;
  std::set<std::string> tasks;
  double sum = 0;
  for (const Block* block : cells.blocks(r)) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), block->task) == wanted.end()) continue;
    if (!tasks.insert(block->task).second) {
      out.why = "several tables of " + block->task;
      return out;
    }
    const OurValue one = of_block(r, run, cells, *block);
    if (!measured(one.value)) {
      out.why = block->task + ": " + one.why;
      return out;
    }
    sum += one.value;
  }
  const std::size_t all = wanted.empty() ? run.tasks : wanted.size();
  if (tasks.size() == all)
    out.value = sum / static_cast<double>(all);
  else
    out.why = fmt::format("{} of {} tasks", tasks.size(), all);
  return out;
}

OurValue shared_heads(const Reading& r, const Ours& ours) {
  const ProfileArray* sets[2] = {};
  for (int i = 0; i < 2; ++i) {
    const auto file = ours.profiles.find(r.pair[static_cast<std::size_t>(i)]);
    if (file == ours.profiles.end()) return {not_measured, {not_measured, not_measured}, "not run"};
    for (const results::ProfilerOutput& one : file->second.profilers)
      if (const auto found = one.profile.find(r.array); found != one.profile.end()) sets[i] = &found->second;
    if (!sets[i]) return {not_measured, {not_measured, not_measured}, "no array " + r.array};
  }
  OurValue out;
  if (sets[0]->extent != sets[1]->extent) return {not_measured, out.interval, "other shapes"};
  out.value = results::shared_heads(*sets[0], *sets[1]);
  return in_unit(out, r.as);
}

// The mean, the least or the greatest number of a profile's array, of those that are finite.
OurValue of_array(const Reading& r, const Ours& ours) {
  OurValue out;
  out.why = "not run";
  const auto& files = ours.profiles;
  const auto file = r.run.empty() && files.size() == 1 ? files.begin() : files.find(r.run);
  if (r.run.empty() && files.size() > 1) out.why = "no run is named";
  if (file == files.end()) return out;
  out.why = "no array " + r.array;
  double sum = 0, count = 0, least = std::numeric_limits<double>::infinity(), most = -least;
  for (const results::ProfilerOutput& one : file->second.profilers)
    if (const auto found = one.profile.find(r.array); found != one.profile.end()) {
      out.why.clear();
      for (const float v : found->second.values)
        if (std::isfinite(v))
          sum += double{v}, ++count, least = std::min(least, double{v}), most = std::max(most, double{v});
    }
  if (count == 0) return out;
  out.value = r.read == "array_mean" ? sum / count : r.read == "array_least" ? least : most;
  return in_unit(out, r.as);
}

std::string printed(double v) { return fmt::format("{:g}", v); }  // as the paper has it

// Inside the interval or not; without one the difference in percent of the published value.
std::string verdict(double published, const OurValue& own) {
  if (!measured(published)) return "-";
  if (!measured(own.value)) return own.why;
  if (measured(own.interval.low))
    return published < own.interval.low ? "ours is higher" : published > own.interval.high ? "ours is lower" : "inside";
  if (published == 0) return fmt::format("{:+.3g}", own.value);
  return fmt::format("{:+.3g} %", 100 * (own.value / published - 1));
}

std::string joined(const std::set<std::string>& words) {
  return words.empty() ? "-" : results::of_one_row(join({words.begin(), words.end()}));
}

// What ran here, for the settings that a result knows.
std::map<std::string, std::string> settings_here(const Ours& ours) {
  std::set<std::string> models, gpus, tasks, budgets, labels;
  for (const auto& [stem, run] : ours.runs) {
    const results::RunInfo& info = run.summary.info;
    gpus.insert(info.backend == "cuda" ? info.gpu : "none, " + info.cpu);
    for (const SummaryRow& row : run.summary.rows) {
      models.insert(row.model), tasks.insert(row.task);
      if (measured(row.budget_tokens)) budgets.insert(number(row.budget_tokens));
      for (const std::string& label : results::identity_of(row))
        if (label != "graph" && label != "events" && label != "eager") labels.insert(label);
    }
  }
  for (const auto& [stem, profile] : ours.profiles) models.insert(profile.model);
  return {{"model", joined(models)},
          {"gpu", joined(gpus)},
          {"data", joined(tasks) + (labels.empty() ? "" : " (" + joined(labels) + ")")},
          {"budget", budgets.empty() ? "-" : joined(budgets) + " tokens"}};
}

results::ReportTable setting_table(const Item& item, const Ours& ours) {
  results::ReportTable table;
  table.title = "what may differ";
  table.header = {"setting", "the paper", "here"};
  table.text_columns = 3;
  const auto here = settings_here(ours);
  for (const auto& [key, text] : item.setting) {
    const auto own = here.find(key);
    table.rows.push_back({key, text, own == here.end() ? "see the experiment" : own->second});
  }
  return table;
}

bool of_profile(const Reading& r) { return r.read == "shared_heads" || r.read.starts_with("array_"); }

// stem: values of this run alone; empty: all. small: ours are of the item's small experiments.
results::ReportTable value_table(const Item& item, const Ours& ours, results::Notes* notes, const std::string& stem,
                                 bool small) {
  results::ReportTable table;
  table.title = item.title + (small ? " (small: another model and task)" : "");
  table.header = {"row", "column", "published", "ours", "95 %", "verdict"};
  table.text_columns = 2;
  for (const PublishedRow& row : item.rows) {
    if (!stem.empty() && !row.missing.empty()) continue;
    const std::string name = row.name + (row.missing.empty() || !notes ? "" : notes->mark(row.missing));
    for (std::size_t c = 0; c < row.values.size(); ++c) {
      const Published& p = row.values[c];
      if (!measured(p.value)) continue;
      if (!stem.empty() && (of_profile(p.reading) || (!p.reading.run.empty() && p.reading.run != stem))) continue;
      const std::string column = item.columns[c] + (p.reading.unit.empty() ? "" : " [" + p.reading.unit + "]");
      if (!row.missing.empty()) {
        table.rows.push_back({name, column, printed(p.value), "-", "-", "cannot run"});
        continue;
      }
      const OurValue own = our_value(p.reading, ours);
      const std::string interval =
          measured(own.interval.low) ? fmt::format("{}-{}", number(own.interval.low), number(own.interval.high)) : "-";
      table.rows.push_back({name, column, printed(p.value), number(own.value), interval,
                            small && measured(own.value) ? "not compared" : verdict(p.value, own)});
    }
  }
  return table;
}

}  // namespace

OurRun read_run(const std::string& file, std::size_t tasks, Extra extra) {
  OurRun out{results::read_summary(file), tasks, results::read_samples(file), {}, {}};
  if (extra.ledgers)
    for (const auto& [cell, ledger] : results::read_ledgers(file)) out.fetched[cell] = mean_fetched(ledger);
  if (!extra.parts) return out;
  for (const SummaryRow& row : out.summary.rows) {
    const std::string part = results::part_path(file, row.cell);
    out.parts[row.cell] = mean_parts(results::read_cell(std::filesystem::exists(part) ? part : file, row.cell));
  }
  return out;
}

std::map<std::string, double> mean_parts(const results::CellResult& cell) {
  std::map<std::string, double> sums;
  double steps = 0;
  const std::size_t parts = cell.parts.size();
  for (std::size_t step = 0; step < cell.step_device_ms.size() && (step + 1) * parts <= cell.step_parts.size();
       ++step) {
    if (!std::isfinite(cell.step_device_ms[step])) continue;  // a prompt
    ++steps;
    for (std::size_t p = 0; p < parts; ++p) sums[cell.parts[p]] += double{cell.step_parts[step * parts + p]};
  }
  for (auto& [part, ms] : sums) ms /= steps;
  return sums;
}

double mean_fetched(const std::vector<results::LedgerRow>& ledger) {
  std::map<std::int64_t, double> steps;
  for (const results::LedgerRow& row : ledger)
    if (row.tier == "device" && row.moved > 0) steps[row.engine_step] += static_cast<double>(row.moved);
  double sum = 0;
  for (const auto& [step, bytes] : steps) sum += bytes;
  return steps.empty() ? not_measured : sum / static_cast<double>(steps.size());
}

OurValue our_value(const Reading& r, const Ours& ours) {
  if (of_profile(r)) return r.read == "shared_heads" ? shared_heads(r, ours) : of_array(r, ours);
  OurValue out;
  out.why = "not run";
  if (r.run.empty() && ours.runs.size() > 1) out.why = "no run is named";
  const auto run = r.run.empty() && ours.runs.size() == 1 ? ours.runs.begin() : ours.runs.find(r.run);
  if (run == ours.runs.end()) return out;
  const Cells cells(run->second);
  const auto blocks = cells.blocks(r);
  if (blocks.empty()) return out;
  if (!r.over_tasks) {
    if (blocks.size() == 1) return of_block(r, run->second, cells, *blocks.front());
    out.why = "several tables fit";
    return out;
  }
  if (r.groups.empty()) return over_tasks(r, run->second, cells, {});
  double sum = 0;
  for (const std::vector<std::string>& group : r.groups) {
    const OurValue one = over_tasks(r, run->second, cells, group);
    if (!measured(one.value)) return one;
    sum += one.value;
  }
  out.value = sum / static_cast<double>(r.groups.size());
  out.why.clear();
  return out;
}

Extra extra_of(const Item& item) {
  Extra out;
  for (const PublishedRow& row : item.rows)
    for (const Published& p : row.values) {
      out.parts |= !p.reading.parts.empty();
      out.ledgers |= p.reading.read == "fetched_bytes";
    }
  return out;
}

namespace {

results::ReportPage page_of(const std::string& paper, const Item& item, const Ours& ours, const std::string& stem,
                            bool small) {
  results::ReportPage page;
  page.origins = {paper + "/" + item.name + ": " + item.title};
  results::Notes notes(page.notes);
  page.tables.push_back(setting_table(item, ours));
  results::ReportTable values = value_table(item, ours, &notes, stem, small);
  if (!values.rows.empty()) page.tables.push_back(std::move(values));
  for (const std::string& note : item.notes) notes.mark(note);
  return page;
}

}  // namespace

results::ReportPage beside(const std::string& paper, const Item& item, const Ours& ours) {
  return page_of(paper, item, ours, "", false);
}

results::ReportPage beside_small(const std::string& paper, const Item& item, const Ours& ours) {
  return page_of(paper, item, ours, "", true);
}

results::ReportPage beside_run(const Chosen& chosen, const std::string& stem, const OurRun& run) {
  return page_of(chosen.paper->name, *chosen.item, {{{stem, run}}, {}}, stem, false);
}

std::string beside_csv(const Item& item, const Ours& ours) {
  return results::render_csv(value_table(item, ours, nullptr, "", false));
}

}  // namespace kvlab::papers
