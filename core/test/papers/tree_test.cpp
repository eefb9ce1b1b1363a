// The published values of this tree name cells that its experiments have, and its experiments can run.
#include <fmt/format.h>
#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <tuple>

#include "base/part_timer.hpp"
#include "cases/case.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/recall.hpp"
#include "experiment/catalog.hpp"
#include "experiment/experiment.hpp"
#include "experiment/variants.hpp"
#include "papers/beside.hpp"
#include "papers/targets.hpp"
#include "plugin/loader.hpp"
#include "result/profile_file.hpp"
#include "result/report_blocks.hpp"
#include "run/profile.hpp"
#include "run/runner.hpp"
#include "support/places.hpp"

using namespace kvlab;
using namespace kvlab::papers;
using results::SummaryRow;

namespace {

const std::vector<Part> all_parts{Part::gemm,   Part::attend, Part::append,  Part::score,
                                  Part::select, Part::recall, Part::compact, Part::other};

// The tokens of a task's prompts, where its parameters say them.
std::int64_t context_of(const TaskSpec& task) {
  const auto params = to_json(task.task.params);
  for (const char* key : {"context", "prompt"})
    if (params.contains(key) && params[key].is_number()) return params[key].get<std::int64_t>();
  return -1;
}

// A row with the labels that the cell will have, and 1 for nearly everything that its metrics measure.
SummaryRow row_of(const Experiment& e, const Cell& cell, std::size_t number) {
  const PolicySpec& policy = e.policies[cell.policy];
  const TaskSpec& task = e.tasks[cell.task];
  SummaryRow row;
  row.cell = std::to_string(number);
  row.model = e.models[cell.model].name(), row.policy = policy.name, row.task = task_label(task);
  row.params = cell.params, row.ablated = policy.ablated;
  row.seed = cell.seed, row.repeat = cell.repeat;
  row.context_tokens = context_of(task);
  if (policy.budget.kind == BudgetAmount::tokens) row.budget_tokens = policy.budget.value;
  if (policy.budget.kind == BudgetAmount::ratio && row.context_tokens > 0)
    row.budget_tokens = policy.budget.value * static_cast<double>(row.context_tokens);
  if (!e.workloads.empty()) row.workload = e.workloads[cell.workload].text();
  const auto has = [&](Metric metric) { return e.metrics.count(metric) != 0; };
  if (has(Metric::score)) row.score = 1;
  if (has(Metric::score) && e.sampling.on()) row.pass = 1;
  if (has(Metric::fidelity)) row.kl = row.top1 = row.mass = 1;
  if (has(Metric::memory)) {
    row.device_bytes_peak = row.host_bytes_peak = 1;
    row.device_bytes_decode = row.compression = 1;
  }
  if (has(Metric::latency)) {
    row.ttft_ms = row.tpot_ms_p50 = row.tpot_ms_p95 = row.tpot_ms_p99 = 1;
    row.tpot_ms_mean = 1 + static_cast<double>(number);  // a target may take one cell's step from another's
    row.tokens_per_s = row.overhead = 1;
  }
  return row;
}

OurRun run_of(const Experiment& e, const PluginCatalog& catalog) {
  OurRun out;
  std::set<std::string> tasks;
  for (const TaskSpec& task : e.tasks) tasks.insert(task_label(task));
  out.tasks = tasks.size();
  for (const Cell& cell : cells(e, catalog, {})) {
    out.summary.rows.push_back(row_of(e, cell, out.summary.rows.size()));
    results::SampleRow sample;
    if (!e.workloads.empty() && e.metrics.count(Metric::latency))
      sample.arrival_ms = sample.queue_ms = 0, sample.ttft_ms = 0.5, sample.end_ms = 1;
    out.samples[out.summary.rows.back().cell] = {sample};
    if (e.metrics.count(Metric::memory)) out.fetched[out.summary.rows.back().cell] = 1;
    if (e.metrics.count(Metric::parts))
      for (const Part part : all_parts) out.parts[out.summary.rows.back().cell][name_of(part)] = 1;
  }
  return out;
}

// What the experiment's profilers leave of two layers that they saw nothing of.
results::ProfileFile profile_of(const Experiment& e, const PluginCatalog& catalog) {
  results::ProfileFile out;
  out.model = e.models.front().name();
  Shape shape;
  shape.layers = 2, shape.query_heads = 8, shape.kv_heads = 4, shape.head_dim = 64, shape.page_size = e.page_size;
  shape.max_slots = 1, shape.max_tokens = 4096;
  for (const PluginUse& use : e.profilers) {
    cases::HeapWorkspace memory;
    const auto profiler = create<Profiler>(*catalog.find(Role::profiler, use.name), use.params);
    profiler->attach(shape, memory);
    out.profilers.push_back({use.name, "", {}});
    profiler->finish(out.profilers.back().profile);
  }
  return out;
}

// Why a value will find no cell, however well everything runs; "" = it will find one. Profilers that saw nothing leave
// arrays without numbers.
std::string fault(const Reading& reading, const Ours& ours) {
  if (reading.read != "shared_heads") return our_value(reading, ours).why;
  for (const std::string& stem : reading.pair)
    if (!ours.profiles.count(stem)) return "the item runs no profile experiment " + stem;
  return our_value(reading, ours).why;
}

}  // namespace

TEST_CASE("every published value names one cell of the experiments that its item runs") {
  const std::filesystem::path root = test::source_root();
  Registry registry({test::plugin_folder()});
  const RegistryCatalog catalog(registry);
  std::size_t values = 0;
  std::string faults;
  for (const Paper& paper : read_papers(root / "analysis/papers"))
    for (const Item& item : paper.items) {
      const std::string name = paper.name + "/" + item.name;
      Ours ours;
      for (const std::string& file : item.small) load_experiment((root / file).string(), {}, catalog);
      for (const std::string& file : item.run) {
        const Experiment e = load_experiment((root / file).string(), {}, catalog);
        const std::string stem = std::filesystem::path(file).stem().string();
        if (e.profilers.empty())
          ours.runs.emplace(stem, run_of(e, catalog));
        else
          ours.profiles.emplace(stem, profile_of(e, catalog));
      }
      for (const PublishedRow& row : item.rows)
        for (std::size_t c = 0; row.missing.empty() && c < row.values.size(); ++c) {
          if (!results::measured(row.values[c].value)) continue;
          ++values;
          if (const std::string why = fault(row.values[c].reading, ours); !why.empty())
            faults += name + ", row '" + row.name + "', column '" + item.columns[c] + "': " + why + "\n";
        }
    }
  CHECK(values > 500);
  if (!faults.empty()) FAIL(faults);
}

namespace {

// The lines that `kvlab bench` would print on a GPU, with 1 for what it measures.
nlohmann::json lines_of(const TargetRun& run) {
  nlohmann::json out;
  out["ops"] = nlohmann::json::array();
  const auto add = [&](const std::string& op, const std::string& shape, const std::string& kernel, bool beside) {
    out["ops"].push_back(
        {{"op", op}, {"shape", shape}, {"kernel", kernel}, {"seconds_median", 1}, {"rate", 1}, {"percent", 1}});
    if (beside) out["ops"].back()["beside"] = {{"slowdown_percent", 1}};
  };
  for (const std::string& op : run.bench) {
    for (const cases::Case& c : cases::all())
      if (c.op == op && c.timed(Device::cuda)) add(op, c.shape, c.kernel, false);
    if (op == "copy")
      for (const cases::Recall::Way way : {cases::Recall::Way::relay, cases::Recall::Way::gather})
        for (const int page_size : {16, 32}) {
          cases::Recall::Of of{way, 0, page_size};
          of.pages = static_cast<int>((std::int64_t{64} << 20) / of.page_bytes());
          add(op, fmt::format("recall {} pages of {} tokens, {} B each", of.pages, of.page_size, of.page_bytes()),
              of.name(), true);
        }
    if (op == "decode")
      for (const char* kernel : {"eager", "graph"}) {
        const auto& o = run.options;
        REQUIRE(o.size() == 4);
        add(op, "synthetic/llama-3.1-8b, batch " + o[1] + " at " + o[3], kernel, false);
      }
  }
  return out;
}

}  // namespace

TEST_CASE("every target names one cell of its experiment, or one line of kvlab bench") {
  const std::filesystem::path root = test::source_root();
  Registry registry({test::plugin_folder()});
  const RegistryCatalog catalog(registry);
  std::string faults;
  std::size_t rows = 0;
  for (const TargetTable& table : read_all_targets(root / "analysis/targets")) {
    TargetResults results;
    for (const TargetRun& run : table.runs) {
      CAPTURE(table.name, run.name);
      if (run.experiment.empty()) {
        results.lines[run.name] = lines_of(run);
        continue;
      }
      std::vector<std::string> sets = run.sets;
      for (const auto& [policy, from] : run.profiles) sets.push_back(policy + ".profile=absent.h5");
      const Experiment e = load_experiment((root / run.experiment).string(), sets, catalog);
      if (e.profilers.empty()) results.ours.runs.emplace(run.name, run_of(e, catalog));
    }
    const std::vector<const TargetRun*> read = table.runs_of({});
    CHECK(read.size() == table.runs.size());  // no run is idle
    for (const TargetRow& row : table.rows) {
      ++rows;
      if (!row.why_not.empty()) continue;
      if (const Measured m = measure(row, results); !results::measured(m.value))
        faults += table.name + ", row " + row.name + ": " + m.why + "\n";
    }
    if (!table.beside) continue;
    std::ifstream in(root / "analysis/targets/peers.py");
    const std::string script{std::istreambuf_iterator<char>(in), {}};
    for (const auto& [theirs, ours] : table.beside->shapes) {
      CAPTURE(theirs, ours);
      TargetTerm term{table.beside->ours, {}, "attend", ours, ""};
      term.reading.read = "us";
      std::string why;
      CHECK(line_of(term, results.lines.at(table.beside->ours), why));
      std::string pair = theirs;
      pair.replace(pair.find(" x "), 3, ", ");
      CHECK(script.find("(" + pair + ")") != script.npos);  // the script times that shape
    }
  }
  CHECK(rows > 100);
  if (!faults.empty()) FAIL(faults);
}

// As `kvlab check` does, on the CPU. What other machines have is not asked for: weights, data, room for pages.
TEST_CASE("every experiment of the tree passes its checks, and every profile in it can be read") {
  namespace fs = std::filesystem;
  const fs::path root = test::source_root();
  Registry registry({test::plugin_folder()});
  const RegistryCatalog catalog(registry);
  int profiles = 0;
  std::vector<Experiment> experiments;
  std::set<fs::path> made;  // profiles that experiments of the tree make
  for (const auto& entry : fs::recursive_directory_iterator(root / "experiments")) {
    CAPTURE(entry.path().string());
    if (entry.path().extension() == ".h5") {
      CHECK(!results::read_profile(entry.path().string()).profilers.empty());
      ++profiles;
    }
    if (entry.path().extension() != ".yaml") continue;
    experiments.push_back(load_experiment(entry.path().string(), {"backend=cpu"}, catalog));
    const Experiment& e = experiments.back();
    if (!e.profilers.empty()) made.insert(fs::weakly_canonical(root / e.output));
  }
  int passed = 0;
  std::string faults;
  for (const Experiment& e : experiments) try {
      if (e.profilers.empty())
        check_experiment(e, catalog, made);
      else
        check_profile(e, catalog);
      ++passed;
    } catch (const Error& error) {
      const std::string why = error.what();
      const auto says = [&](const char* what) { return why.find(what) != why.npos; };
      if (!says("/../../models/") && !says("/../../data/") && !says("tools/fetch-model") &&
          !says("the free memory of this machine"))
        faults += why + "\n";
    }
  if (!faults.empty()) FAIL(faults);
  CHECK(passed > 60);
  CHECK(profiles > 5);
}

TEST_CASE("a value that names what no experiment has is found by name") {
  Registry registry({test::plugin_folder()});
  const RegistryCatalog catalog(registry);
  const Experiment e = load_experiment((test::source_root() / "experiments/quickstart.yaml").string(), {}, catalog);
  Ours ours;
  ours.runs.emplace("quickstart", run_of(e, catalog));
  Reading reading;
  reading.policy = "snapkv", reading.task = "niah", reading.budget = 64;
  CHECK(fault(reading, ours).empty());
  const auto with = [&](auto change) {
    Reading other = reading;
    change(other);
    return fault(other, ours);
  };
  CHECK(with([](Reading& r) { r.policy = "snapkw"; }) == "not run");
  CHECK(with([](Reading& r) { r.task = "niahs"; }) == "not run");
  CHECK(with([](Reading& r) { r.run = "quickstop"; }) == "not run");
  CHECK(with([](Reading& r) { r.model = "other"; }) == "not run");
  CHECK(with([](Reading& r) { r.context = 2048; }) == "not run");
  CHECK(with([](Reading& r) { r.budget = 128; }) == "not run");
  CHECK(with([](Reading& r) { r.budget = std::nullopt; }) == "several rows fit");
  CHECK(with([](Reading& r) { r.as = "ratio", r.against = "fool"; }) == "fool: not run");
  CHECK(with([](Reading& r) { r.read = "part_ms", r.parts = {"gemm"}; }) == "not measured");

  CHECK(with([](Reading& r) { r.read = "pass"; }) == "not measured");  // nothing is drawn
  CHECK(with([](Reading& r) { r.read = "answer_tokens"; }).empty());
  CHECK(with([](Reading& r) { r.read = "requests_at_once"; }) == "not measured");  // it has no workload

  const std::string heads = (test::source_root() / "experiments/quality/heads.yaml").string();
  ours.profiles.emplace("heads", profile_of(load_experiment(heads, {}, catalog), catalog));
  const auto of_heads = [&](const std::string& array, const std::string& other) {
    Reading shared;
    shared.read = "shared_heads", shared.array = array, shared.pair = {"heads", other};
    return fault(shared, ours);
  };
  CHECK(of_heads("satellite", "heads").empty());
  CHECK(of_heads("satelite", "heads") == "no array satelite");
  const auto of_array = [&](const std::string& array, const std::string& stem) {
    Reading own;
    own.read = "array_least", own.array = array, own.run = stem;
    return fault(own, ours);
  };
  CHECK(of_array("satellite", "heads").empty());
  CHECK(of_array("satelite", "heads") == "no array satelite");
  CHECK(of_array("satellite", "feet") == "not run");
  CHECK(of_heads("satellite", "feet") == "the item runs no profile experiment feet");
}

namespace {

// "figure10b" as {figure, 10, b}, which sorts as papers count.
std::tuple<std::string, int, std::string> parts_of(const std::string& item) {
  const std::size_t digit = item.find_first_of("0123456789");
  std::size_t end = 0;
  const int number = std::stoi(item.substr(digit), &end);
  return {item.substr(0, digit), number, item.substr(digit + end)};
}

// Whether `item` lies in first..last: "figure6a to figure6c", "table1 to table3", which includes a table2b.
bool in_range(const std::string& item, const std::string& first, const std::string& last) {
  const auto [kind, number, letter] = parts_of(item);
  const auto [first_kind, low, low_letter] = parts_of(first);
  const auto [last_kind, high, high_letter] = parts_of(last);
  if (kind != first_kind || kind != last_kind) return false;
  return std::pair(low, low_letter) <= std::pair(number, letter) &&
         (number < high || (number == high && (high_letter.empty() || letter <= high_letter)));
}

// A row of a table of analysis/REPRODUCTION.md whose first column has items.
struct Judged {
  std::string line;
  std::vector<std::string> header, cells;
  const std::string* cell(const std::string& column) const {
    const auto at = std::find(header.begin(), header.end(), column);
    return at == header.end() ? nullptr : &cells[static_cast<std::size_t>(at - header.begin())];
  }
};

std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> out;
  for (std::size_t begin = 1, end; (end = line.find('|', begin)) != line.npos; begin = end + 1) {
    const std::size_t first = line.find_first_not_of(' ', begin), last = line.find_last_not_of(' ', end - 1);
    out.push_back(first < end ? line.substr(first, last + 1 - first) : "");
  }
  return out;
}

std::vector<Judged> judged(std::istream& in) {
  std::vector<Judged> out;
  std::vector<std::string> header;
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("|")) header.clear();
    if (!line.starts_with("| ")) continue;
    if (header.empty())
      header = cells_of(line);
    else if (header[0].starts_with("item"))
      out.push_back({line, header, cells_of(line)});
  }
  return out;
}

// The items that a first cell names, with their paper: "flexicache/table1 to table3, figure2; leankv/figure5".
std::vector<Chosen> named_items(const std::vector<Paper>& papers, const std::string& cell, std::string& faults) {
  static const std::regex name("(?:([a-z]+)/)?((?:table|figure)\\d+[a-z]?)(?: to ((?:table|figure)\\d+[a-z]?))?");
  std::vector<Chosen> out;
  const Paper* paper = nullptr;
  for (std::sregex_iterator at(cell.begin(), cell.end(), name), end; at != end; ++at) {
    if ((*at)[1].matched) {
      const auto found = std::ranges::find(papers, (*at)[1].str(), &Paper::name);
      paper = found == papers.end() ? nullptr : &*found;
    }
    const std::string begin = (*at)[2], last = (*at)[3].matched ? (*at)[3].str() : begin;
    const std::size_t before = out.size();
    if (paper)
      for (const Item& item : paper->items)
        if (in_range(item.name, begin, last)) out.push_back({paper, &item});
    if (out.size() == before) faults += "no item " + (*at)[0].str() + "\n";
  }
  return out;
}

// `*` stands for any text.
bool fits_pattern(const std::string& text, const std::string& pattern) {
  const std::size_t star = pattern.find('*');
  if (star == pattern.npos) return text == pattern;
  const std::string head = pattern.substr(0, star), tail = pattern.substr(star + 1);
  return text.size() >= head.size() + tail.size() && text.starts_with(head) && text.ends_with(tail);
}

std::vector<std::string> in_backticks(const std::string& cell) {
  static const std::regex code("`([^`]+)`");
  std::vector<std::string> out;
  for (std::sregex_iterator at(cell.begin(), cell.end(), code), end; at != end; ++at) out.push_back((*at)[1]);
  return out;
}

// What is wrong with the verdicts: one in each row, in a cell of its own, with a reason in the last one. Each item has
// a row, and each published row a name in one. `all` in the column `rows` names those that no row of ours runs, but not
// the ones that are `missing`, whose reasons differ.
std::string verdict_faults(const std::vector<Paper>& papers, std::istream& in) {
  static const std::set<std::string> verdicts{"reproduced",      "direction only", "not reproduced",    "uninformative",
                                              "cannot run here", "not run yet",    "nothing to measure"};
  std::string faults;
  std::map<std::string, std::set<std::string>> left;  // by item: published rows, and "" for the item itself
  for (const Paper& paper : papers)
    for (const Item& item : paper.items) {
      std::set<std::string>& rows = left[paper.name + "/" + item.name];
      rows.insert("");
      for (const PublishedRow& row : item.rows) rows.insert(row.name);
    }
  for (const Judged& row : judged(in)) {
    const auto wrong = [&](const std::string& why) { faults += why + ": " + row.line + "\n"; };
    const std::string* verdict = row.cells.size() == row.header.size() ? row.cell("verdict") : nullptr;
    if (!verdict || verdict == &row.cells.back()) {
      wrong("no column for verdict and reason");
      continue;
    }
    if (!verdicts.count(*verdict)) wrong("no verdict alone in its cell");
    if (row.cells.back().size() < 5) wrong("no reason");
    const std::string* named = row.cell("rows");
    std::vector<std::string> names;
    for (std::size_t c = 1; c + 1 < row.cells.size(); ++c) {
      const auto more = in_backticks(row.cells[c]);
      names.insert(names.end(), more.begin(), more.end());
    }
    std::string unknown;
    std::set<std::string> idle(names.begin(), names.end());
    for (const Chosen& chosen : named_items(papers, row.cells[0], unknown)) {
      std::set<std::string>& rows = left.at(chosen.name());
      rows.erase("");
      for (const PublishedRow& published : chosen.item->rows)
        for (const std::string& name : names)
          if (fits_pattern(published.name, name)) rows.erase(published.name), idle.erase(name);
      if (!named || *named != "all") continue;
      if (*verdict != "cannot run here" && *verdict != "not run yet" && *verdict != "nothing to measure")
        wrong("`all` with a verdict of what ran");
      for (const PublishedRow& published : chosen.item->rows)
        if (published.missing.empty()) rows.erase(published.name);
    }
    if (!unknown.empty()) wrong(unknown);
    if (named && !idle.empty()) wrong("no published row " + *idle.begin());
  }
  for (const auto& [item, rows] : left)
    for (const std::string& row : rows) faults += item + (row.empty() ? "" : ", row " + row) + " has no verdict\n";
  return faults;
}

}  // namespace

TEST_CASE("every table, figure and published row has a verdict with a reason in analysis/REPRODUCTION.md") {
  std::ifstream in(test::source_root() / "analysis/REPRODUCTION.md");
  const std::string faults = verdict_faults(read_papers(test::source_root() / "analysis/papers"), in);
  if (!faults.empty()) FAIL(faults);
}

TEST_CASE("a verdict without a reason, and a published row without a verdict, are found") {
  Paper paper;
  paper.name = "known";
  for (const char* name : {"table1", "table2a"}) {
    paper.items.emplace_back().name = name;
    paper.items.back().rows = {{"Full", "", {}}, {"Ours, 8 bits", "", {}}, {"Other", "no code", {}}};
  }
  const auto faults = [&](const std::string& rows) {
    std::istringstream in("| verdict | meaning |\n|---|---|\n| any | of the legend |\n\n" + rows);
    return verdict_faults({paper}, in);
  };
  const std::string header = "| items | rows | verdict | why |\n|---|---|---|---|\n",
                    other = "| known/table1 to table2 | `Oth*` | cannot run here | no code |\n",
                    all = "| known/table1, table2a | all | not run yet | it takes long |\n";
  CHECK(faults(header + all + other).empty());
  CHECK(faults(header + all) == "known/table1, row Other has no verdict\nknown/table2a, row Other has no verdict\n");
  CHECK(faults(header + other).starts_with("known/table1, row Full has no verdict\n"));
  CHECK(faults("").starts_with("known/table1 has no verdict\n"));
  const auto says = [&](const std::string& row, const char* what) {
    const std::string out = faults(header + all + other + row);
    CAPTURE(out);
    CHECK(out.starts_with(what));
  };
  says("| known/table1 | `Full` | reproduced, nearly | as there |\n", "no verdict alone in its cell");
  says("| known/table1 | `Full` | reproduced: as there | as there |\n", "no verdict alone in its cell");
  says("| known/table1 | `Full` | reproduced | - |\n", "no reason");
  says("| known/table1 | `Full` | reproduced |\n", "no column for verdict and reason");
  says("| known/table1 | `Fool` | reproduced | as there |\n", "no published row Fool");
  says("| known/table1 | all | reproduced | as there |\n", "`all` with a verdict of what ran");
  says("| known/table3 | `Full` | reproduced | as there |\n", "no item known/table3");
  const std::string own =
      "| item | what | verdict | why |\n|---|---|---|---|\n| known/table1 | `Full`: steps; `Ours, 8 bits` | "
      "reproduced | as there |\n\n";
  CHECK(faults(own + header + "| known/table2a | all | not run yet | it takes long |\n" + other).empty());
}

// Scores say what a choice is worth only beside a blind one, one by age, and the best that there is.
TEST_CASE("every experiment of scores has controls: random, recency and an oracle") {
  namespace fs = std::filesystem;
  const fs::path root = test::source_root() / "experiments";
  Registry registry({test::plugin_folder()});
  const RegistryCatalog catalog(registry);
  const std::map<fs::path, std::string> exceptions{{"quality/noise.yaml", "the full cache against itself"}};
  std::set<fs::path> used;
  std::string faults;
  int asked = 0;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const fs::path file = fs::relative(entry.path(), root);
    static const std::set<fs::path> folders{"flexicache", "freekv",    "heterocache", "leankv",
                                            "compare",    "ablations", "quality",     "datasets.yaml"};
    if (entry.path().extension() != ".yaml" || !folders.count(*file.begin())) continue;
    const Experiment e = load_experiment(entry.path().string(), {}, catalog);
    if (!e.profilers.empty() || !e.metrics.count(Metric::score)) continue;
    ++asked;
    std::set<std::string> plugins;
    for (const PolicySpec& policy : e.policies)
      for_each_use(policy, [&](const PluginUse& use) { plugins.insert(use.name); });
    std::string lacks;
    if (!plugins.count("random")) lacks += " random";
    if (!plugins.count("window") && !plugins.count("streaming_llm")) lacks += " recency";
    if (!plugins.count("oracle") && !plugins.count("oracle_evict")) lacks += " oracle";
    if (lacks.empty()) continue;
    if (exceptions.count(file))
      used.insert(file);
    else
      faults += file.string() + " lacks" + lacks + "\n";
  }
  if (!faults.empty()) FAIL(faults);
  CHECK(used.size() == exceptions.size());
  CHECK(asked > 40);
}
