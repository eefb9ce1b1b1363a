#include "result/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <kvlab/error.hpp>
#include <map>
#include <tuple>
#include <utility>

#include "base/text.hpp"
#include "result/choice.hpp"
#include "result/compare_report.hpp"
#include "result/ladder.hpp"
#include "result/report_blocks.hpp"
#include "result/report_layout.hpp"
#include "result/rows.hpp"
#include "result/varying.hpp"
#include "result/warnings.hpp"

namespace kvlab::results {
namespace {

double as_double(std::int64_t v) { return v < 0 ? not_measured : static_cast<double>(v); }

// Mean over the cells that measured it, with the sample standard deviation where there are two or more.
template <class Get>
std::string spread(const Group& group, Get get) {
  std::vector<double> values;
  for (const SummaryRow* row : group.good)
    if (measured(get(*row))) values.push_back(get(*row));
  if (values.empty()) return "-";
  double mean = 0, squares = 0;
  for (double v : values) mean += v / static_cast<double>(values.size());
  if (values.size() == 1) return number(mean);
  for (double v : values) squares += (v - mean) * (v - mean);
  return fmt::format("{} ± {:.2g}", number(mean), std::sqrt(squares / static_cast<double>(values.size() - 1)));
}

template <class Get>
std::string mean(const Group& group, Get get) {
  const std::string text = spread(group, get);
  return text.substr(0, text.find(" ±"));
}

// That of the cell's row, or of all cells' answers where there are several.
Interval interval_of(const Group& group, const Samples& samples) {
  if (group.good.size() > 1) return pooled_interval(group, samples);
  return {group.first().score_lo, group.first().score_hi};
}

bool has_interval(const Group& group, const Samples& samples) {
  return !group.good.empty() && measured(interval_of(group, samples).low);
}

std::string score_text(const Group& group, const Samples& samples) {
  if (group.good.empty()) return group.first().status;
  const std::string text = spread(group, [](const SummaryRow& r) { return r.score; });
  if (text == "-") return text;
  const Interval interval = interval_of(group, samples);
  if (!measured(interval.low)) return group.good.size() > 1 ? text : text + " (-)";
  return fmt::format("{} ({}-{})", text, number(interval.low), number(interval.high));
}

constexpr const char* interval_note =
    "in brackets: 95 % interval over contexts like these; Wilson's for answers right or wrong, else bootstrap";

// The group's own labels, and "disturbed" if any of its good cells was.
std::vector<std::string> labels_of(const Group& group) {
  auto labels = identity_of(group.first());
  const auto is_disturbed = [](const SummaryRow* row) { return split_labels(row->labels) != identity_of(*row); };
  if (std::any_of(group.good.begin(), group.good.end(), is_disturbed)) labels.emplace_back("disturbed");
  return labels;
}

// Each warning once, with its cells.
std::vector<std::string> cell_warnings(const std::vector<SummaryRow>& rows) {
  constexpr std::size_t named = 3;
  std::vector<std::pair<std::string, std::vector<std::string>>> found;
  for (const SummaryRow& row : rows)
    for (std::string& text : warnings_of(row)) {
      auto at = std::find_if(found.begin(), found.end(), [&](const auto& f) { return f.first == text; });
      if (at == found.end()) at = found.insert(at, {std::move(text), {}});
      at->second.push_back(row.cell);
    }
  std::vector<std::string> out;
  for (auto& [text, cells] : found) {
    const std::size_t count = cells.size();
    if (count > 1 && count == rows.size()) {
      out.push_back(text + " (every cell)");
      continue;
    }
    cells.resize(std::min(count, named));
    std::string names = join(cells);
    if (count > named) names += fmt::format(" and {} more", count - named);
    out.push_back(fmt::format("{} ({} {})", text, count == 1 ? "cell" : "cells", names));
  }
  return out;
}

// The number of draws of the block's rows; -1 where they differ or nothing is drawn.
std::int64_t draws_of(const Block& block) {
  const std::int64_t draws = block.groups.front().first().draws;
  const bool same = std::all_of(block.groups.begin(), block.groups.end(),
                                [&](const Group& group) { return group.first().draws == draws; });
  return same ? draws : -1;
}

std::string pass_text(const Group& group) {
  const std::string text = spread(group, [](const SummaryRow& r) { return r.pass; });
  if (group.good.size() != 1 || !measured(group.first().pass_lo)) return text;
  return fmt::format("{} ({}-{})", text, number(group.first().pass_lo), number(group.first().pass_hi));
}

struct ReportColumn {
  std::string name;
  std::function<std::string(const Group&)> text;
};

template <class Get>
ReportColumn spread_of(const char* name, Get get) {
  return {name, [get](const Group& group) { return spread(group, get); }};
}

template <class Get>
ReportColumn mean_of(const char* name, Get get) {
  return {name, [get](const Group& group) { return mean(group, get); }};
}

std::vector<ReportColumn> measured_columns(const Block& block, const Samples& samples) {
  using Row = const SummaryRow&;
  const ReportColumn score{"score", [&samples](const Group& group) { return score_text(group, samples); }};
  const auto compression = mean_of("compr. ×", [](Row r) { return r.compression; });
  const auto fired = mean_of("fired", [](Row r) { return as_double(r.fired); });
  const auto replayed = [](const Group& group) {
    const auto labels = split_labels(group.first().labels);
    return std::count(labels.begin(), labels.end(), "replayed") > 0;
  };
  const auto device_mb = mean_of(
      "device MB", [](Row r) { return r.device_bytes_decode < 0 ? not_measured : r.device_bytes_decode / 1e6; });
  if (std::all_of(block.groups.begin(), block.groups.end(), replayed))
    return {spread_of("mass", [](Row r) { return r.mass; }),
            spread_of("page recall", [](Row r) { return r.page_recall; }),
            mean_of("tokens", [](Row r) { return r.kept_tokens; }),
            device_mb,
            mean_of("host MB", [](Row r) { return as_double(r.host_bytes_peak) / 1e6; }),
            mean_of("KB/step to device", [](Row r) { return r.moved_device / 1e3; }),
            mean_of("to host", [](Row r) { return r.moved_host / 1e3; }),
            fired};
  if (block.workload.empty())
    return {score,
            spread_of("KL", [](Row r) { return r.kl; }),
            spread_of("top-1", [](Row r) { return r.top1; }),
            spread_of("mass", [](Row r) { return r.mass; }),
            device_mb,
            compression,
            spread_of("ms/token", [](Row r) { return r.tpot_ms_p50; }),
            spread_of("TTFT ms", [](Row r) { return r.ttft_ms; }),
            fired};
  std::vector<ReportColumn> columns{score,
                                    spread_of("tokens/s", [](Row r) { return r.tokens_per_s; }),
                                    spread_of("TTFT ms p50", [](Row r) { return r.ttft_ms; }),
                                    spread_of("p95", [](Row r) { return r.ttft_ms_p95; }),
                                    spread_of("ms/token mean", [](Row r) { return r.tpot_ms_mean; }),
                                    spread_of("p50", [](Row r) { return r.tpot_ms_p50; }),
                                    spread_of("p95", [](Row r) { return r.tpot_ms_p95; }),
                                    spread_of("queue ms p50", [](Row r) { return r.queue_ms_p50; }),
                                    mean_of("preempt.", [](Row r) { return as_double(r.preemptions); }),
                                    mean_of("peak MB", [](Row r) { return as_double(r.device_bytes_peak) / 1e6; }),
                                    compression,
                                    fired};
  if (std::any_of(block.groups.begin(), block.groups.end(),
                  [](const Group& g) { return measured(g.first().overhead); }))
    columns.insert(columns.end() - 3, spread_of("overhead %", [](Row r) { return 100 * r.overhead; }));
  return columns;
}

// The columns after policy, budget and n.
std::vector<ReportColumn> columns_for(const Block& block, const Samples& samples) {
  std::vector<ReportColumn> columns = measured_columns(block, samples);
  const std::int64_t draws = draws_of(block);
  if (draws > 1 && columns.front().name == "score") {
    columns.front().name = fmt::format("avg@{}", draws);
    columns.insert(columns.begin() + 1, {fmt::format("pass@{}", draws), pass_text});
  }
  return columns;
}

ReportTable table_of(const Block& block, const Samples& samples, ReportPage& page) {
  Notes notes(page.notes);
  ReportTable table;
  table.title = title_of(block);
  const auto columns = columns_for(block, samples);
  table.header = {"policy", "budget", "n"};
  for (const auto& column : columns) table.header.push_back(column.name);
  if (std::any_of(block.groups.begin(), block.groups.end(),
                  [&](const Group& group) { return has_interval(group, samples); }))
    table.header[3] += notes.mark(interval_note);  // of the score
  for (const Group& group : block.groups) {
    std::string policy = policy_text(group, block);
    for (const std::string& label : labels_of(group)) policy += notes.mark(label_note(label, group.first()));
    for (const SummaryRow* row : group.bad)
      policy += notes.mark(of_one_row(fmt::format("{}: cell {}: {}", row->status, row->cell, row->error)));
    table.rows.push_back({policy, budget_text(group), std::to_string(group.good.size())});
    for (const auto& column : columns) table.rows.back().push_back(column.text(group));
  }
  // The column n goes if no row has more than one run.
  if (std::all_of(table.rows.begin(), table.rows.end(),
                  [](const auto& row) { return row[2] == "1" || row[2] == "0"; })) {
    table.header.erase(table.header.begin() + 2);
    for (auto& row : table.rows) row.erase(row.begin() + 2);
  }
  return table;
}

// Titles of all policies' parameters. A parameter with the name of a column of /summary gets "params." in front.
std::map<std::string, std::string> parameter_columns(const std::vector<std::map<std::string, std::string>>& rows,
                                                     const std::vector<h5::Column>& columns) {
  std::map<std::string, std::string> titles;  // by parameter
  for (const auto& row : rows)
    for (const auto& [name, value] : row) titles[name] = name;
  for (const h5::Column& column : columns)
    if (const auto same = titles.find(column.name); same != titles.end()) same->second = "params." + column.name;
  return titles;
}

std::string csv(const std::vector<SummaryRow>& rows) {
  const auto columns = columns_of(rows);
  std::vector<std::map<std::string, std::string>> parameters;
  for (const SummaryRow& row : rows) parameters.push_back(flat_parameters(row.params));
  const auto titles = parameter_columns(parameters, columns);
  std::string out;
  for (std::size_t c = 0; c < columns.size(); ++c) out += (c ? "," : "") + columns[c].name;
  for (const auto& [name, title] : titles) out += "," + quote_csv(title);
  out += "\n";
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const h5::Column& column = columns[c];
      if (c) out += ",";
      if (column.type == h5::ColumnType::i64)
        out += std::to_string(column.i64[r]);
      else if (column.type == h5::ColumnType::f64)
        out += measured(column.f64[r]) ? fmt::format("{}", column.f64[r]) : "";
      else
        out += quote_csv(column.text[r]);
    }
    for (const auto& [name, title] : titles) {
      const auto value = parameters[r].find(name);
      out += "," + (value == parameters[r].end() ? "" : quote_csv(value->second));
    }
    out += "\n";
  }
  return out;
}

std::string head_of(const RunInfo& info) {
  std::string head = "kvlab " + info.kvlab_version;
  if (!info.git_commit.empty()) head += " (" + info.git_commit + ")";
  for (const std::string& part :
       {info.created_utc, info.host, info.backend == "cuda" ? info.gpu : info.cpu, info.backend})
    if (!part.empty()) head += ", " + part;
  if (info.threads > 0) head += fmt::format(", {} threads", info.threads);
  return of_one_row(head);
}

// Result files together.
struct Read {
  std::vector<RunInfo> infos;
  std::vector<SummaryRow> rows;
  std::vector<RowSamples> samples;  // of each row, or none
  std::vector<std::string> warnings;
};

// "cpu" for results/cpu.h5; the whole path where another file has that name, too.
std::string name_of(const std::string& path, const std::vector<std::string>& paths) {
  const auto stem = [](const std::string& p) { return std::filesystem::path(p).stem().string(); };
  const auto same = std::count_if(paths.begin(), paths.end(), [&](const auto& p) { return stem(p) == stem(path); });
  return same > 1 ? path : stem(path);
}

Read read_all(const std::vector<std::string>& paths) {
  Read out;
  for (std::size_t file = 0; file < paths.size(); ++file) {
    Summary summary = read_summary(paths[file]);
    auto samples = read_samples(paths[file]);
    for (SummaryRow& row : summary.rows) {
      out.samples.push_back({file, std::move(samples[row.cell])});
      if (paths.size() > 1) row.policy = name_of(paths[file], paths) + ":" + row.policy;
      out.rows.push_back(std::move(row));
    }
    out.infos.push_back(std::move(summary.info));
    out.warnings.insert(out.warnings.end(), summary.warnings.begin(), summary.warnings.end());
  }
  return out;
}

Samples samples_of(const Read& read) {
  Samples samples;
  for (std::size_t r = 0; r < read.samples.size(); ++r) samples.emplace(&read.rows[r], &read.samples[r]);
  return samples;
}

ReportPage page_of(const Read& read, const ReportOptions& options) {
  ReportPage page;
  for (const RunInfo& info : read.infos) page.origins.push_back(head_of(info));
  const Samples samples = samples_of(read);
  const std::vector<Block> blocks = blocks_of(read.rows);
  if (!options.choose.empty()) {
    add_choices(options.choose, options.lose, blocks, samples, page);
  } else if (options.ladder) {
    add_ladders(blocks, samples, page);
  } else if (const auto& compare = options.compare; compare.size() == 2) {
    page.tables = against(compare[0], compare[1], blocks, samples, page.notes);
  } else {
    for (const Block& block : blocks) {
      page.tables.push_back(table_of(block, samples, page));
      if (auto table = against_full(block, samples, page.notes)) page.tables.push_back(std::move(*table));
    }
    for (const std::string& warning : cell_warnings(read.rows)) page.warnings.push_back(of_one_row(warning));
  }
  for (const std::string& warning : read.warnings) page.warnings.push_back(of_one_row(warning));
  if (read.rows.empty()) page.warnings.emplace_back("no cell has finished yet");
  return page;
}

}  // namespace

Format parse_format(std::string_view word) {
  constexpr std::pair<std::string_view, Format> words[] = {
      {"table", Format::table}, {"md", Format::md}, {"csv", Format::csv}, {"latex", Format::latex}};
  for (const auto& [name, format] : words)
    if (word == name) return format;
  throw Error(Errc::config, "got format '" + std::string(word) + "', wanted table, md, csv or latex");
}

std::string report(const std::vector<std::string>& paths, const ReportOptions& options) {
  if (options.format == Format::csv && !options.compare.empty())
    throw Error(Errc::config, "got csv, wanted table, md or latex", "--compare");
  if (options.format == Format::csv && !options.choose.empty())
    throw Error(Errc::config, "got csv, wanted table, md or latex", "--choose");
  const Read read = read_all(paths);
  if (options.format == Format::csv)
    return options.ladder ? ladders_csv(blocks_of(read.rows), samples_of(read)) : csv(read.rows);
  return render(page_of(read, options), options.format, options.colour);
}

std::string report(const std::string& path, Format format) {
  return report(std::vector<std::string>{path}, {.format = format});
}

std::string report(const Summary& summary, Format format) {
  if (format == Format::csv) return csv(summary.rows);
  return render(page_of({{summary.info}, summary.rows, {}, summary.warnings}, {.format = format}), format);
}

}  // namespace kvlab::results
