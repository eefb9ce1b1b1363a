#include "run/recorded.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/text.hpp"
#include "result/results.hpp"

namespace kvlab {
namespace {

using results::TraceEvent;

bool is_list(const TraceEvent& e) { return e.kind == results::TraceKind::select && e.count > 0; }

results::CellResult find_cell(const std::string& file, const std::string& id) {
  results::CellResult found;
  std::vector<std::string> traced;
  for (const auto& row : results::read_summary(file).rows) {
    if (!id.empty() && row.cell != id) continue;
    results::CellResult cell = results::read_cell(file, row.cell);
    if (std::none_of(cell.trace.events.begin(), cell.trace.events.end(), is_list)) continue;
    traced.push_back(row.cell);
    if (traced.size() == 1) found = std::move(cell);
  }
  if (traced.empty())
    throw Error(Errc::data,
                "got no trace of selected pages" + (id.empty() ? "" : " in cell '" + id + "'") +
                    ", wanted the result file of a run with metrics: [trace] and a policy that selects pages",
                file);
  if (traced.size() > 1)
    throw Error(Errc::data, "got several cells with a trace, wanted cell: one of " + join(traced), file);
  return found;
}

int page_size_of(const results::SummaryRow& row) {
  const auto params = nlohmann::json::parse(row.params, nullptr, false);
  return params.is_object() ? params.value("page_size", 0) : 0;
}

}  // namespace

RecordedTrace read_recorded(const std::string& file, const std::string& id) {
  const results::CellResult cell = find_cell(file, id);
  const results::Trace& trace = cell.trace;
  const auto wrong = [&](const std::string& what) { throw Error(Errc::data, what, file); };
  // [place in the cell][layer, head] -> lists in the order of the steps.
  std::map<int, std::map<std::pair<int, int>, std::vector<const TraceEvent*>>> lists;
  std::set<int> layers, heads;
  for (const TraceEvent& e : trace.events) {
    if (e.kind != results::TraceKind::select) continue;
    lists[e.sample][{e.layer, e.kv_head}].push_back(&e);
    layers.insert(e.layer), heads.insert(e.kv_head);
  }
  RecordedTrace out;
  out.layers.assign(layers.begin(), layers.end());
  out.heads = static_cast<int>(heads.size());
  out.model_layers = static_cast<int>(trace.layers);
  out.page_size = page_size_of(cell.summary);
  const bool told = !cell.samples.empty() && cell.samples.front().task_sample >= 0;  // older files do not tell
  const auto known = told ? static_cast<int>(cell.samples.size()) : 0;
  constexpr int most_samples = 10'000'000;
  const int last = known > 0 ? known - 1 : std::min(lists.rbegin()->first, most_samples - 1);
  if (lists.begin()->first < 0 || lists.rbegin()->first > last)
    wrong("got lists of samples " + std::to_string(lists.begin()->first) + " to " +
          std::to_string(lists.rbegin()->first) + " in a trace, wanted 0 to " + std::to_string(last));
  std::int64_t rows = 0;
  for (int number = 0; number <= last; ++number) {
    RecordedTrace::Question q{number, 0, false, 0, 0};
    if (known > 0) {
      const auto& from = cell.samples[static_cast<std::size_t>(number)];
      q.sample = static_cast<std::int32_t>(from.task_sample);
      q.question = static_cast<std::int32_t>(from.question);
      q.follows = from.follows > 0;
    }
    q.first = static_cast<std::int32_t>(rows);
    const auto own = lists.find(number);
    if (own != lists.end()) {
      const std::size_t steps = own->second.begin()->second.size();
      if (own->second.size() != layers.size() * heads.size() ||
          std::any_of(own->second.begin(), own->second.end(), [&](const auto& l) { return l.second.size() != steps; }))
        wrong("got a trace of sample " + std::to_string(number) +
              " that lacks lists, wanted one of each layer and KV head in every step");
      for (std::size_t step = 0; step < steps; ++step)
        for (const auto& [place, events] : own->second) {
          const TraceEvent& e = *events[step];
          out.begin.push_back(static_cast<std::int64_t>(out.page.size()));
          out.page.insert(out.page.end(), trace.selected.begin() + e.begin, trace.selected.begin() + e.begin + e.count);
        }
      q.steps = static_cast<std::int32_t>(steps);
      rows += q.steps;
    }
    out.questions.push_back(q);
  }
  out.begin.push_back(static_cast<std::int64_t>(out.page.size()));
  const auto [least, most] = std::minmax_element(out.page.begin(), out.page.end());
  const bool bounded = trace.pages > 0;
  if (*least < 0 || *most == INT32_MAX || (bounded && *most >= trace.pages))
    wrong("got page " + std::to_string(*least < 0 ? *least : *most) + " in the trace, wanted 0 or more" +
          (bounded ? ", below " + std::to_string(trace.pages) : ""));
  out.pages = bounded ? static_cast<int>(std::min<std::int64_t>(trace.pages, INT32_MAX)) : *most + 1;
  std::sort(out.questions.begin(), out.questions.end(), [](const auto& a, const auto& b) {
    return std::pair(a.sample, a.question) < std::pair(b.sample, b.question);
  });
  return out;
}

std::vector<std::int32_t> follow(const RecordedTrace& recorded, const std::vector<Item>& items) {
  std::map<int, std::map<int, std::int32_t>> samples;  // of the recorded run: place of each question
  for (std::size_t i = 0; i < recorded.questions.size(); ++i)
    samples[recorded.questions[i].sample][recorded.questions[i].question] = static_cast<std::int32_t>(i);
  std::vector<const std::map<int, std::int32_t>*> in_order;
  for (const auto& [sample, questions] : samples) in_order.push_back(&questions);
  std::vector<std::int32_t> out;
  for (const Item& item : items) {
    const std::string what = item.follows ? "turn" : "question";
    const auto& questions = *in_order[static_cast<std::size_t>(item.sample) % in_order.size()];
    const auto own = questions.find(item.question);
    if (own == questions.end())
      throw Error(Errc::config, "got " + what + " " + std::to_string(item.question) + " of sample " +
                                    std::to_string(item.sample) +
                                    " with inject, wanted a trace that has it: this one has " +
                                    std::to_string(questions.size()) + " of that sample");
    if (recorded.questions[static_cast<std::size_t>(own->second)].follows != item.follows)
      throw Error(Errc::config, "got " + what + " " + std::to_string(item.question) + " of sample " +
                                    std::to_string(item.sample) + " with inject, wanted a trace in which it is a " +
                                    what + " too: there it is a " + (item.follows ? "question" : "turn"));
    out.push_back(own->second);
  }
  return out;
}

std::string other_shape(const RecordedTrace& recorded, const ModelConfig& model, int page_size) {
  std::vector<std::string> there, here;
  const auto compare = [&](const std::string& before, const std::string& after, int got, int wanted) {
    if (got == 0 || got == wanted) return;
    there.push_back(before + std::to_string(got) + after);
    here.push_back(before + std::to_string(wanted) + after);
  };
  compare("", " layers", recorded.model_layers, model.layers);
  compare("", " KV heads", recorded.heads, model.kv_heads);
  compare("pages of ", " tokens", recorded.page_size, page_size);
  if (there.empty()) return "";
  return "got a trace of " + join(there) + " with inject, wanted the run's " + join(here) +
         ": layers and KV heads follow recorded ones by their number, modulo the recorded count, and page numbers are "
         "scaled";
}

}  // namespace kvlab
