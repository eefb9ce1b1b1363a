#include "result/ladder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

#include "base/log.hpp"
#include "base/text.hpp"
#include "result/place.hpp"

namespace kvlab::results {
namespace {

constexpr double equal_within = 0.05;  // budgets in tokens, and bytes before a note names the difference

constexpr const char* place_note =
    "(score - random's) / (oracle's - random's), over the same questions; in brackets its 95 % interval, bootstrap "
    "over "
    "contexts. Resamples in which the oracle is not above random count beyond both ends";
constexpr const char* nll_note =
    "(random's nats per token - its own) / (random's - oracle's), over the same texts; in brackets its 95 % interval, "
    "bootstrap over texts. Resamples in which the oracle is not below random count beyond both ends";
constexpr const char* interval_note =
    "in brackets: 95 % interval over contexts like these; Wilson's for answers right or wrong, else bootstrap";

enum class Level { random, by_age, method, failed, oracle };

// A row of a ladder.
struct Step {
  Group group;
  std::string policy;
  Level level = Level::method;
  std::string method;  // that an ablation belongs to, as `key` of its method; or of the row itself
  Answers answers;
  std::optional<Place> place;  // of rows that are no end
};

// How a row's policy keeps to its budget, where its parameters tell.
// One budget of a block.
struct Ladder {
  const Block* block = nullptr;
  Way way = Way::unknown;   // of all its rows, where the block has an oracle of each way
  std::vector<Step> steps;  // from random to oracle
  Place ends;               // the oracle's: the span between both
  bool forced = false;      // texts: lower scores are better
  std::vector<std::string> others;
};

bool has_label(const Group& group, const char* label) { return std::ranges::count(identity_of(group.first()), label); }

nlohmann::json params_of(const Group& group) { return nlohmann::json::parse(group.first().params, nullptr, false); }

// "cpu:random" is the row random of cpu.h5.
bool is_random(const Group& group) {
  const SummaryRow& row = group.first();
  if (!row.ablated.empty()) return false;
  const nlohmann::json params = params_of(group);
  if (params.is_object() && params.contains("scorer")) return params["scorer"].contains("random");
  return row.policy == "random" || row.policy.ends_with(":random");
}

Way way_of(const Group& group) { return way_of(group.first()); }

double tokens_of(const Group& group) {
  if (group.good.empty()) return group.first().budget_tokens < 0 ? not_measured : group.first().budget_tokens;
  return mean_over(group, [](const SummaryRow& r) { return r.budget_tokens < 0 ? not_measured : r.budget_tokens; });
}

double bytes_of(const Group& group) {
  return mean_over(
      group, [](const SummaryRow& r) { return r.device_bytes_decode < 0 ? not_measured : r.device_bytes_decode; });
}

double score_of(const Group& group) {
  return mean_over(group, [](const SummaryRow& r) { return r.score; });
}

bool has_budget(const Group& group) { return group.first().budget_bytes >= 0 || measured(tokens_of(group)); }

bool same_budget(const Group& a, const Group& b) {
  const std::int64_t bytes = a.first().budget_bytes;
  if (bytes >= 0 || b.first().budget_bytes >= 0) return bytes == b.first().budget_bytes;
  return std::fabs(tokens_of(a) - tokens_of(b)) <= equal_within * tokens_of(b);
}

// "2.5 MB", "64 tokens"
std::string amount_of(const Group& group) {
  const std::int64_t bytes = group.first().budget_bytes;
  return bytes >= 0 ? fmt::format("{:.4g} MB", static_cast<double>(bytes) / 1e6) : number(tokens_of(group)) + " tokens";
}

// A row's name without its file, component and budget: what an ablation and its method share.
std::string method_of(const Group& group, const Block& block) {
  const SummaryRow& row = group.first();
  const std::string text = policy_text(group, block), ending = " -" + row.ablated;
  if (row.ablated.empty() || !row.policy.ends_with(ending)) return text;
  return text.substr(0, row.policy.size() - ending.size()) +
         text.substr(std::min(text.size(), of_one_row(row.policy).size()));
}

// The blocks' groups by budget, in the order of their rows.
std::vector<std::vector<const Group*>> by_budget(const Block& block) {
  std::vector<std::vector<const Group*>> out;
  for (const Group& group : block.groups) {
    if (!has_budget(group)) continue;
    const auto at =
        std::find_if(out.begin(), out.end(), [&](const auto& part) { return same_budget(group, *part.front()); });
    (at == out.end() ? *out.insert(at, std::vector<const Group*>{}) : *at).push_back(&group);
  }
  return out;
}

// The draws of one random policy as one group.
Group pooled(const std::vector<const Group*>& draws) {
  Group all;
  for (const Group* draw : draws) {
    all.good.insert(all.good.end(), draw->good.begin(), draw->good.end());
    all.bad.insert(all.bad.end(), draw->bad.begin(), draw->bad.end());
  }
  return all;
}

// Higher is better: a text's -nats.
double value_of(const Answered& a) { return a.forced ? -a.score * a.weight : a.score; }

Place place_of(const Answers& own, const Answers& low, const Answers& high, Contexts& contexts) {
  std::vector<Rung> rungs;
  for (const auto& [question, a] : own) {
    const auto l = low.find(question), h = high.find(question);
    if (l == low.end() || h == high.end()) continue;
    rungs.push_back({contexts.of(question), value_of(a), value_of(l->second), value_of(h->second), a.weight});
  }
  return kvlab::place_of(rungs);
}

// Where rows of one level stand among themselves: by place, else by score.
double height_of(const Step& step, bool forced) {
  if (step.place && measured(step.place->place)) return step.place->place;
  const double score = score_of(step.group);
  return !measured(score) ? -INFINITY : forced ? -score : score;
}

void sort_steps(Ladder& ladder) {
  const auto key = [&](const Step& step) {
    double method = height_of(step, ladder.forced);
    const bool ablation = !step.group.first().ablated.empty();
    for (const Step& other : ladder.steps)
      if (ablation && other.method == step.method && other.group.first().ablated.empty())
        method = height_of(other, ladder.forced);
    return std::tuple(step.level, method, step.method, !ablation, height_of(step, ladder.forced));
  };
  std::vector<std::pair<decltype(key(ladder.steps.front())), std::size_t>> order;
  for (std::size_t s = 0; s < ladder.steps.size(); ++s) order.emplace_back(key(ladder.steps[s]), s);
  std::sort(order.begin(), order.end());
  std::vector<Step> sorted;
  for (const auto& [k, s] : order) sorted.push_back(std::move(ladder.steps[s]));
  ladder.steps = std::move(sorted);
}

Ladder ladder_of(const Block& block, const std::vector<const Group*>& part, const std::vector<const Group*>& draws,
                 const Group* oracle, Way way, const Samples& samples) {
  Ladder out;
  out.block = &block;
  out.way = way;
  const auto add = [&](const Group& group, const std::string& policy, Level level) -> Step& {
    return out.steps.emplace_back(
        Step{group, policy, level, method_of(group, block), answers_of(group, samples), std::nullopt});
  };
  const Group random = pooled(draws);
  add(random,
      draws.size() == 1 ? policy_text(*draws.front(), block)
                        : fmt::format("{} ({} draws)", of_one_row(random.first().policy), draws.size()),
      Level::random);
  const auto stands_here = [&](const Group& group) {
    return way == Way::unknown || way_of(group) == Way::unknown || way_of(group) == way;
  };
  for (const Group* group : part)
    if (group != oracle && !std::ranges::count(draws, group) && stands_here(*group))
      add(*group, policy_text(*group, block),
          group->good.empty()                                            ? Level::failed
          : group->first().by_age == 1 && group->first().ablated.empty() ? Level::by_age
                                                                         : Level::method);
  add(*oracle, policy_text(*oracle, block), Level::oracle);
  Contexts contexts;
  for (const Step& step : out.steps) {
    contexts.add(step.answers);
    for (const auto& [question, a] : step.answers) out.forced |= a.forced;
  }
  const Answers low = out.steps.front().answers, high = out.steps.back().answers;
  out.ends = place_of(high, low, high, contexts);
  for (std::size_t s = 1; s + 1 < out.steps.size(); ++s)
    out.steps[s].place = place_of(out.steps[s].answers, low, high, contexts);
  sort_steps(out);
  for (const Group& group : block.groups)
    if (!has_budget(group))
      out.others.push_back(policy_text(group, block) + " " +
                           (group.good.empty() ? group.first().status : number(score_of(group))));
  return out;
}

// The ladders of a block, and why parts of it have none.
std::vector<Ladder> ladders_of(const Block& block, const Samples& samples, std::vector<std::string>& why_not) {
  std::vector<Ladder> out;
  const auto refuse = [&](const std::string& what, const std::string& why) {
    why_not.push_back(fmt::format("{}: no ladder: {}", what, why));
  };
  if (std::ranges::any_of(block.groups, [](const Group& g) { return has_label(g, "synthetic"); })) {
    refuse(title_of(block), "random weights have scores that say nothing");
    return out;
  }
  bool any = false;
  for (const auto& part : by_budget(block)) {
    std::vector<const Group*> draws;
    const Group *oracle = nullptr, *other = nullptr;  // the first one, and the first of the other way
    for (const Group* group : part) {
      if (group->good.empty()) continue;
      if (has_label(*group, "oracle")) {
        const Way first = oracle ? way_of(*oracle) : Way::unknown, own = way_of(*group);
        if (!oracle)
          oracle = group;
        else if (!other && first != Way::unknown && own != Way::unknown && own != first)
          other = group;
      } else if (is_random(*group) && (draws.empty() || draws.front()->first().policy == group->first().policy)) {
        draws.push_back(group);
      }
    }
    any |= !draws.empty() || oracle;
    if (!draws.empty() && other)
      for (const Group* top : way_of(*oracle) == Way::evicts ? std::array{oracle, other} : std::array{other, oracle})
        out.push_back(ladder_of(block, part, draws, top, way_of(*top), samples));
    else if (!draws.empty() && oracle)
      out.push_back(ladder_of(block, part, draws, oracle, Way::unknown, samples));
    else if (!draws.empty() || oracle)
      refuse(title_of(block) + ", " + amount_of(*part.front()),
             draws.empty() ? "got an oracle, wanted a finished row of the policy random, too"
                           : "got random, wanted a finished row with the label oracle, too");
  }
  if (!any)
    refuse(title_of(block), "wanted a finished row of the policy random and one with the label oracle, of one budget");
  return out;
}

std::string interval_text(const Interval& interval) {
  const auto end = [](double v) { return fmt::format("{:.2g}", std::fabs(v) < 1e-12 ? 0. : v); };
  return measured(interval.low) ? fmt::format(" ({} to {})", end(interval.low), end(interval.high)) : " (-)";
}

std::string mean_text(double v) { return fmt::format("{:.3g}", std::fabs(v) < 1e-12 ? 0. : v); }

// Why there is no place, of a span that does not tell random from the oracle.
std::string cannot_tell(const Ladder& ladder) {
  const Place& ends = ladder.ends;
  if (ends.questions == 0) return "this table cannot tell: random and oracle have no scored question in common";
  const char* what = ladder.forced ? "random's nats per token - oracle's" : "oracle - random";
  if (!measured(ends.span_interval.low))
    return fmt::format("this table cannot tell: {} contexts are too few for an interval of {}", ends.contexts, what);
  return fmt::format("this table cannot tell: {} is {}{}, and a place needs an interval above 0", what,
                     mean_text(ends.span), interval_text(ends.span_interval));
}

std::string place_text(const Ladder& ladder, const Step& step, Notes& notes) {
  if (!measured(ladder.ends.place) || step.level == Level::failed) return "-";
  if (step.level == Level::random) return "0";
  if (!step.place) return "1";  // the oracle that is the upper end
  const Place& p = *step.place;
  const std::string few = p.questions < ladder.ends.questions
                              ? notes.mark(fmt::format("only {} of {} questions", p.questions, ladder.ends.questions))
                              : "";
  return (measured(p.place) ? mean_text(p.place) + interval_text(p.interval) : "-") + few;
}

// Says where a row's bytes are not those of random.
std::string bytes_text(const Ladder& ladder, const Step& step, Notes& notes) {
  const double own = bytes_of(step.group), random = bytes_of(ladder.steps.front().group);
  const std::string text = measured(own) ? number(own / 1e6) : "-";
  if (!measured(own) || !measured(random) || std::fabs(own - random) <= equal_within * random) return text;
  const nlohmann::json params = params_of(step.group);
  const bool reads = params.is_object() && params.contains("selector") && !params.contains("placement");
  return text + notes.mark(fmt::format("holds {:.3g} times random's bytes on the device{}", own / random,
                                       reads ? ": a selector drops nothing, and its budget is what a step reads" : ""));
}

ReportTable table_of(const Ladder& ladder, const Samples& samples, ReportPage& page) {
  Notes notes(page.notes);
  ReportTable table;
  table.title =
      fmt::format("{}, {}: from random to oracle{}", title_of(*ladder.block), amount_of(ladder.steps.front().group),
                  ladder.way == Way::evicts    ? ", of eviction"
                  : ladder.way == Way::selects ? ", of selection"
                                               : "");
  table.header = {"policy", "budget", "device MB", "score" + notes.mark(interval_note),
                  "place" + notes.mark(ladder.forced ? nll_note : place_note)};
  for (const Step& step : ladder.steps) {
    std::string policy = step.policy;
    for (const std::string& label : identity_of(step.group.first()))
      policy += notes.mark(label_note(label, step.group.first()));
    for (const SummaryRow* row : step.group.bad)
      policy += notes.mark(of_one_row(fmt::format("{}: cell {}: {}", row->status, row->cell, row->error)));
    const std::string score = number(score_of(step.group));
    const Interval interval = pooled_interval(step.group, samples);
    table.rows.push_back({policy, budget_text(step.group), bytes_text(ladder, step, notes),
                          step.level == Level::failed ? step.group.first().status
                          : measured(interval.low)
                              ? fmt::format("{} ({}-{})", score, number(interval.low), number(interval.high))
                              : score,
                          place_text(ladder, step, notes)});
  }
  const Place& ends = ladder.ends;
  if (!measured(ends.place))
    table.under.push_back(cannot_tell(ladder));
  else
    table.under.push_back(fmt::format("{}: {}{}, {} {} in {} contexts",
                                      ladder.forced ? "random's nats per token - oracle's" : "oracle - random",
                                      mean_text(ends.span), interval_text(ends.span_interval), ends.questions,
                                      ends.questions == 1 ? "question" : "questions", ends.contexts));
  if (!ladder.others.empty()) table.under.push_back("scores without a budget: " + join(ladder.others));
  return table;
}

std::string exact(double v) { return measured(v) ? fmt::format("{}", v) : ""; }

}  // namespace

void add_ladders(const std::vector<Block>& blocks, const Samples& samples, ReportPage& page) {
  for (const Block& block : blocks)
    for (const Ladder& ladder : ladders_of(block, samples, page.warnings))
      page.tables.push_back(table_of(ladder, samples, page));
}

std::string ladders_csv(const std::vector<Block>& blocks, const Samples& samples) {
  ReportTable all;
  all.header = {"model",         "task",         "context",
                "workload",      "policy",       "ablated",
                "budget_tokens", "budget_bytes", "device_bytes_decode",
                "score",         "score_lo",     "score_hi",
                "place",         "place_lo",     "place_hi",
                "questions",     "contexts",     "span",
                "span_lo",       "span_hi",      "oracle"};
  std::vector<std::string> why_not;
  for (const Block& block : blocks)
    for (const Ladder& ladder : ladders_of(block, samples, why_not))
      for (const Step& step : ladder.steps) {
        const SummaryRow& row = step.group.first();
        const bool end = !step.place;
        const Place& p = end ? ladder.ends : *step.place;
        const double place = end && measured(p.place) ? (step.level == Level::oracle ? 1 : 0) : p.place;
        const Interval score = pooled_interval(step.group, samples);
        all.rows.push_back({block.model,
                            block.task,
                            std::to_string(block.context),
                            block.workload,
                            step.policy,
                            row.ablated,
                            exact(tokens_of(step.group)),
                            std::to_string(row.budget_bytes),
                            exact(bytes_of(step.group)),
                            exact(score_of(step.group)),
                            exact(score.low),
                            exact(score.high),
                            exact(place),
                            end ? "" : exact(p.interval.low),
                            end ? "" : exact(p.interval.high),
                            std::to_string(p.questions),
                            std::to_string(p.contexts),
                            exact(p.span),
                            exact(p.span_interval.low),
                            exact(p.span_interval.high),
                            ladder.steps.back().policy});
      }
  for (const std::string& reason : why_not) log::warn(reason);  // csv has no place for them
  return render_csv(all);
}

}  // namespace kvlab::results
