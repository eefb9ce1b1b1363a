#include "papers/targets.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <kvlab/error.hpp>
#include <tuple>

#include "base/text.hpp"
#include "papers/file_reader.hpp"
#include "result/report_blocks.hpp"

namespace kvlab::papers {
namespace {

using results::measured;
using results::not_measured;
using results::number;
using yaml::Node;
using Kind = Node::Kind;

// The last two are of lines with a decode step beside them.
const std::vector<std::string> line_reads{"us", "gb_per_s", "percent", "gb_per_s_beside", "slowdown"};
// percent: of in percent of against. saved and beyond: what of lacks, and has, beside against.
const std::vector<std::string> forms{"value", "ratio", "inverse", "percent", "saved", "beyond"};

class Reader final : public FileReader {
 public:
  using FileReader::FileReader;

  TargetTable table(const std::string& name) {
    TargetTable out;
    out.name = name;
    const Node& root = document_.root;
    Taken top(*this, root, {"title", "gpu", "setting", "notes", "small", "runs", "rows", "beside"},
              "a table of targets");
    out.title = text(top["title"], "title", root);
    out.gpu = text(top["gpu"], "gpu", root);
    out.setting = settings(top["setting"]);
    out.notes = texts(top["notes"]), out.small = texts(top["small"]);
    each(top["runs"], "runs", [&](const yaml::Entry& e) { out.runs.push_back(run(e)); });
    each(top["rows"], "rows", [&](const yaml::Entry& e) { out.rows.push_back(row(e)); });
    if (const Node* beside = top["beside"]) out.beside = peers(*beside);
    for (const auto& [node, kinds, run] : named_) {
      const TargetRun* found = out.run(run);
      const int kind = !found ? 0 : !found->experiment.empty() ? cells : lines;
      if (!(kind & kinds))
        wrong(*node, found ? "run '" + run + "'" : "no run '" + run + "'",
              kinds == cells ? "one with an experiment" : "one of `bench` or `peers`");
    }
    problems_.raise();
    return out;
  }

 private:
  enum : int { cells = 1, lines = 2 };

  template <class Body>
  void each(const Node* map, const char* key, Body body) {
    if (!map || !map->is(Kind::map))
      return wrong(map ? *map : document_.root, "no map", std::string("a map of ") + key);
    for (const yaml::Entry& e : map->entries) body(e);
  }
  void names(const Node& at, int kinds, const std::string& run) { named_.emplace_back(&at, kinds, run); }

  TargetRun run(const yaml::Entry& e) {
    TargetRun out;
    out.name = e.key.text;
    out.where = document_.where(e.key.place);
    const Node& node = e.value;
    Taken keys(*this, node, {"experiment", "set", "small", "profiles", "bench", "options", "peers", "seconds"},
               out.name);
    if (const Node* n = keys["experiment"]) out.experiment = text(n, "experiment", node);
    out.sets = texts(keys["set"]), out.small_sets = texts(keys["small"]);
    out.bench = texts(keys["bench"]), out.options = texts(keys["options"]);
    for (const auto& [policy, from] : settings(keys["profiles"])) {
      out.profiles[policy] = from;
      names(node, cells, from);
    }
    if (const Node* n = keys["peers"]) out.peers = word(*n, {"true"}) == "true";
    if (!out.experiment.empty() + !out.bench.empty() + out.peers != 1)
      wrong(node, "a run of no or several sorts", "one of: experiment, bench, peers");
    const auto seconds = keys["seconds"] ? number(*keys["seconds"]) : std::nullopt;
    if (!seconds || !(*seconds > 0)) wrong(node, "no 'seconds'", "an estimate of the time it takes");
    out.seconds = seconds.value_or(1);
    return out;
  }

  // base: what the term has where the map says nothing.
  TargetTerm term(const Node& node, const TargetTerm& base) {
    TargetTerm out = base;
    if (node.is(Kind::map) && (node.find("op") || !base.op.empty())) {
      Taken keys(*this, node, {"run", "op", "shape", "kernel", "read"}, "a line of `kvlab bench`");
      const auto set = [&](const char* key, std::string& to) {
        if (const Node* n = keys[key]) to = text(n, key, node);
      };
      set("run", out.run), set("op", out.op), set("shape", out.shape), set("kernel", out.kernel);
      if (const Node* n = keys["read"])
        out.reading.read = word(*n, line_reads);
      else if (base.op.empty())
        wrong(node, "no key 'read'", "one of: " + join(line_reads));
      if (out.shape.empty()) wrong(node, "no key 'shape'", "that of a line");
      names(node, lines, out.run);
      return out;
    }
    if (node.find("policy")) out.reading.budget.reset();  // that of the other policy
    add(node, out.reading);
    out.run = out.reading.run;
    for (const char* key : {"as", "against", "unit", "over", "pair", "array"})
      if (node.find(key)) wrong(node, fmt::format("key '{}'", key), "it at the row, or not at all");
    check(out.reading, node);
    names(node, cells, out.run);
    return out;
  }

  TargetRow row(const yaml::Entry& e) {
    TargetRow out;
    out.name = e.key.text;
    out.where = document_.where(e.key.place);
    const Node& node = e.value;
    Taken keys(*this, node, {"title", "of", "against", "without", "as", "unit", "at_most", "at_least", "why_not"},
               out.name);
    out.title = text(keys["title"], "title", node);
    if (const Node* n = keys["why_not"]) out.why_not = text(n, "why_not", node);
    if (const Node* n = keys["as"]) out.as = word(*n, forms);
    if (const Node* n = keys["unit"]) out.unit = text(n, "unit", node);
    if (const Node* n = keys["at_most"]) out.at_most = number(*n);
    if (const Node* n = keys["at_least"]) out.at_least = number(*n);
    if (out.at_most.has_value() == out.at_least.has_value())
      wrong(node, out.at_most ? "both 'at_most' and 'at_least'" : "no target", "one of: at_most, at_least");
    if (!out.why_not.empty()) return out;
    if (!keys["of"]) {
      wrong(node, "no key 'of'", "what is measured, or 'why_not'");
      return out;
    }
    out.of = term(*keys["of"], {});
    if (const Node* n = keys["against"]) out.against = term(*n, out.of);
    if (const Node* n = keys["without"]) out.without = term(*n, out.of);
    if ((out.as == "value") == out.against.has_value())
      wrong(node, out.against ? "'against' beside as: value" : "as: " + out.as + " without 'against'",
            "a form with what it is held against");
    return out;
  }

  PeerTable peers(const Node& node) {
    PeerTable out;
    Taken keys(*this, node, {"title", "ours", "peers", "shapes"}, "a table of other libraries");
    out.title = text(keys["title"], "title", node);
    out.ours = text(keys["ours"], "ours", node), out.peers = text(keys["peers"], "peers", node);
    names(node, lines, out.ours), names(node, lines, out.peers);
    out.shapes = settings(keys["shapes"]);
    return out;
  }

  std::vector<std::tuple<const Node*, int, std::string>> named_;
};

bool of_beside(const std::string& read) { return read == "gb_per_s_beside" || read == "slowdown"; }

double number_of(const nlohmann::json& line, const std::string& read) {
  if (read == "slowdown") return line.at("beside").at("slowdown_percent").get<double>();
  if (read == "us") return 1e6 * line.at("seconds_median").get<double>();
  if (read == "percent") return line.at("percent").get<double>();
  return 1e-9 * line.at("rate").get<double>();
}

// Why a run left no number that it should have.
std::string without(const TargetResults& results, const std::string& run) {
  const auto failed = results.failed.find(run);
  return failed == results.failed.end() ? "not run" : run + " " + failed->second;
}

double value_of(const TargetTerm& term, const TargetResults& results, std::string& why) {
  if (term.op.empty()) {
    const OurValue own = our_value(term.reading, results.ours);
    if (!measured(own.value)) why = own.why == "not run" ? without(results, term.run) : own.why;
    return own.value;
  }
  const auto bench = results.lines.find(term.run);
  if (bench == results.lines.end()) {
    why = without(results, term.run);
    return not_measured;
  }
  const nlohmann::json* line = line_of(term, bench->second, why);
  return line ? number_of(*line, term.reading.read) : not_measured;
}

double formed(const std::string& as, double of, double against) {
  if (as == "ratio") return of / against;
  if (as == "inverse") return against / of;
  if (as == "percent") return 100 * of / against;
  if (as == "saved") return 100 * (1 - of / against);
  if (as == "beyond") return 100 * (1 - against / of);
  return of;
}

std::string target_text(const TargetRow& row) {
  return fmt::format("{} {:g}{}", row.at_most ? "<=" : ">=", row.at_most ? *row.at_most : *row.at_least,
                     row.unit.empty() ? "" : " " + row.unit);
}

std::string text_of(double v) { return measured(v) ? number(v) : "-"; }

std::set<std::string> devices_of(const TargetResults& results) {
  std::set<std::string> all;
  for (const auto& [name, run] : results.ours.runs) {
    const results::RunInfo& info = run.summary.info;
    all.insert(info.backend == "cuda" ? info.gpu : "no GPU, " + info.cpu);
  }
  for (const auto& [name, bench] : results.lines) {
    const std::string device = bench.value("device", "?");
    all.insert(device == "cpu" ? "no GPU" : device.substr(0, device.find(',')));
  }
  return all;
}

std::string device_of(const TargetResults& results) {
  const std::set<std::string> all = devices_of(results);
  return all.empty() ? "-" : join({all.begin(), all.end()}, "; ");
}

results::ReportTable row_table(const TargetTable& table, const TargetResults& results,
                               const std::set<std::string>& only) {
  results::ReportTable out;
  out.title = table.title;
  out.header = {"row", "what", "measured", "target", "verdict", "of", "against"};
  out.text_columns = 2;
  for (const TargetRow& row : table.rows) {
    if (!only.empty() && !only.count(row.name)) continue;
    Measured m = measure(row, results);
    if (!row.against && row.without) {  // what is taken off
      std::string why;
      m.against = value_of(*row.without, results, why);
    }
    out.rows.push_back({row.name, row.title, text_of(m.value), target_text(row), verdict(row, m, results),
                        text_of(m.of), text_of(m.against)});
  }
  return out;
}

// A column for each kernel of the script's, a row for each shape. Times are in microseconds.
results::ReportTable peer_table(const PeerTable& of, const TargetResults& results) {
  results::ReportTable out;
  out.title = of.title;
  out.header = {"shape", "kvlab"};
  const auto ours = results.lines.find(of.ours), theirs = results.lines.find(of.peers);
  std::vector<std::string> kernels;
  if (theirs != results.lines.end())
    for (const nlohmann::json& line : theirs->second.at("ops"))
      if (const std::string kernel = line.at("kernel");
          std::find(kernels.begin(), kernels.end(), kernel) == kernels.end())
        kernels.push_back(kernel);
  out.header.insert(out.header.end(), kernels.begin(), kernels.end());
  for (const auto& [shape, own] : of.shapes) {
    std::vector<std::string> row{shape};
    std::string why;
    const auto cell = [&](const std::string& run, const std::string& name, const std::string& kernel) {
      TargetTerm term{run, {}, "attend", name, kernel};
      term.reading.read = "us";
      return text_of(value_of(term, results, why));
    };
    row.push_back(cell(of.ours, own, ""));
    for (const std::string& kernel : kernels) row.push_back(cell(of.peers, shape, kernel));
    out.rows.push_back(std::move(row));
  }
  if (ours == results.lines.end()) out.under.push_back("kvlab: " + without(results, of.ours));
  if (theirs == results.lines.end()) out.under.push_back("other libraries: " + without(results, of.peers));
  if (theirs != results.lines.end() && theirs->second.contains("skipped"))
    for (const nlohmann::json& one : theirs->second["skipped"])
      out.under.push_back(one.at("kernel").get<std::string>() + ": " + one.at("why").get<std::string>());
  return out;
}

}  // namespace

const TargetRun* TargetTable::run(const std::string& wanted) const {
  const auto found = std::find_if(runs.begin(), runs.end(), [&](const TargetRun& r) { return r.name == wanted; });
  return found == runs.end() ? nullptr : &*found;
}

std::vector<const TargetRun*> TargetTable::runs_of(const std::vector<std::string>& only) const {
  std::set<std::string> needed;
  for (const TargetRow& row : rows) {
    if (!only.empty() && std::find(only.begin(), only.end(), row.name) == only.end()) continue;
    needed.insert(row.of.run);
    for (const auto& other : {row.against, row.without})
      if (other) needed.insert(other->run);
  }
  if (beside && only.empty()) needed.insert(beside->ours), needed.insert(beside->peers);
  for (const TargetRun& one : runs)
    if (needed.count(one.name))
      for (const auto& [policy, from] : one.profiles) needed.insert(from);
  std::vector<const TargetRun*> out;
  for (const TargetRun& one : runs)
    if (needed.count(one.name)) out.push_back(&one);
  return out;
}

TargetTable read_targets(const std::filesystem::path& file) {
  const yaml::Document document = yaml::parse_file(file.string());
  return Reader(document).table(file.stem().string());
}

std::vector<TargetTable> read_all_targets(const std::filesystem::path& folder) {
  std::vector<TargetTable> out;
  for (const auto& file : yaml_files(folder)) out.push_back(read_targets(file));
  return out;
}

const nlohmann::json* line_of(const TargetTerm& term, const nlohmann::json& bench, std::string& why) {
  const nlohmann::json* found = nullptr;
  for (const nlohmann::json& line : bench.at("ops")) {
    if (line.at("op") != term.op || line.at("shape") != term.shape) continue;
    if (!term.kernel.empty() && line.at("kernel") != term.kernel) continue;
    if (of_beside(term.reading.read) != line.contains("beside")) continue;
    if (found) return why = "several lines fit", nullptr;
    found = &line;
  }
  if (!found) why = "no such line";
  return found;
}

bool on_its_gpu(const TargetTable& table, const TargetResults& results) {
  const std::set<std::string> all = devices_of(results);
  return std::all_of(all.begin(), all.end(),
                     [&](const std::string& device) { return device.find(table.gpu) != device.npos; });
}

Measured measure(const TargetRow& row, const TargetResults& results) {
  Measured out{not_measured, not_measured, not_measured, row.why_not};
  if (!row.why_not.empty()) return out;
  out.of = value_of(row.of, results, out.why);
  if (row.against) out.against = value_of(*row.against, results, out.why);
  double without = 0;
  if (row.without) without = value_of(*row.without, results, out.why);
  out.value = formed(row.as, out.of - without, out.against - without);
  if (!measured(out.value) && out.why.empty()) out.why = "not measured";
  return out;
}

std::string verdict(const TargetRow& row, const Measured& m, const TargetResults& results) {
  if (!measured(m.value)) return m.why;
  if (!results.not_judged.empty()) return results.not_judged;
  return (row.at_most ? m.value <= *row.at_most : m.value >= *row.at_least) ? "met" : "missed";
}

results::ReportPage target_page(const TargetTable& table, const TargetResults& results,
                                const std::set<std::string>& only) {
  results::ReportPage page;
  page.origins = {fmt::format("targets/{} ({})", table.name, device_of(results))};
  results::ReportTable setting;
  setting.title = "what the targets are for";
  setting.header = {"setting", "the targets", "here"};
  setting.text_columns = 3;
  setting.rows.push_back({"gpu", table.gpu, device_of(results)});
  for (const auto& [key, value] : table.setting) setting.rows.push_back({key, value, "see the runs"});
  page.tables.push_back(std::move(setting));
  page.tables.push_back(row_table(table, results, only));
  if (table.beside && only.empty()) page.tables.push_back(peer_table(*table.beside, results));
  page.notes = table.notes;
  return page;
}

std::string target_csv(const TargetTable& table, const TargetResults& results, const std::set<std::string>& only) {
  return results::render_csv(row_table(table, results, only));
}

}  // namespace kvlab::papers
