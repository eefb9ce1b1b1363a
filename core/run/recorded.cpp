#include "run/recorded.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <map>
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

}  // namespace

RecordedTrace read_recorded(const std::string& file, const std::string& id) {
  const results::Trace trace = find_cell(file, id).trace;
  // By sample, then layer and head: its lists, in the order of the steps.
  std::map<int, std::map<std::pair<int, int>, std::vector<const TraceEvent*>>> samples;
  std::set<int> layers, heads;
  for (const TraceEvent& e : trace.events) {
    if (!is_list(e)) continue;
    samples[e.sample][{e.layer, e.kv_head}].push_back(&e);
    layers.insert(e.layer), heads.insert(e.kv_head);
  }
  RecordedTrace out;
  out.samples = static_cast<int>(samples.size());
  out.layers = static_cast<int>(layers.size()), out.heads = static_cast<int>(heads.size());
  out.first.push_back(0);
  for (const auto& [number, lists] : samples) {
    const std::size_t steps = lists.begin()->second.size();
    const bool whole = lists.size() == layers.size() * heads.size() &&
                       std::all_of(lists.begin(), lists.end(), [&](const auto& l) { return l.second.size() == steps; });
    if (!whole)
      throw Error(Errc::data,
                  "got a trace of sample " + std::to_string(number) +
                      " that lacks lists, wanted one of each layer and KV head in every step",
                  file);
    for (std::size_t step = 0; step < steps; ++step)
      for (const auto& [place, events] : lists) {
        const TraceEvent& e = *events[step];
        out.begin.push_back(static_cast<std::int64_t>(out.page.size()));
        for (std::int64_t i = e.begin; i < e.begin + e.count; ++i) {
          const std::int32_t page = trace.selected[static_cast<std::size_t>(i)];
          if (page < 0 || page == INT32_MAX)
            throw Error(Errc::data, "got page " + std::to_string(page) + " in the trace, wanted 0 or more", file);
          out.page.push_back(page);
          out.pages = std::max(out.pages, page + 1);
        }
      }
    out.first.push_back(out.first.back() + static_cast<std::int32_t>(steps));
  }
  out.begin.push_back(static_cast<std::int64_t>(out.page.size()));
  return out;
}

}  // namespace kvlab
