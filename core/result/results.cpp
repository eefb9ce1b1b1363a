#include "result/results.hpp"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <kvlab/error.hpp>
#include <system_error>
#include <utility>

#include "base/new_file.hpp"
#include "result/cell_file.hpp"
#include "result/h5.hpp"
#include "result/rows.hpp"
#include "result/sealed.hpp"

namespace kvlab::results {
namespace {

namespace fs = std::filesystem;

struct Part {
  std::string id, path;
  fs::file_time_type written;
};

// The parts by name, so that every walk over a folder has one order.
std::vector<Part> list_parts(const std::string& out_path) {
  std::vector<Part> parts;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(parts_folder(out_path), ignored)) {
    if (entry.path().extension() != ".h5") continue;
    parts.push_back({entry.path().stem().string(), entry.path().string(), entry.last_write_time(ignored)});
  }
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.id < b.id; });
  return parts;
}

// Makes `path` newer than `time`. File systems stamp files with a clock that stands still for milliseconds, so that two
// files written one after the other may bear one time.
void make_newer(const std::string& path, fs::file_time_type time) {
  std::error_code ignored;
  const auto written = fs::last_write_time(path, ignored);
  if (!ignored && written <= time) fs::last_write_time(path, time + std::chrono::nanoseconds(1), ignored);
}

// Checks that a part is usable and returns the one row of its summary.
SummaryRow part_row(const h5::File& file, const std::string& id) {
  auto rows = read_summary_rows(file);
  if (rows.size() != 1 || rows.front().cell != id)
    throw Error(Errc::result_file, "got a summary of other cells, wanted one row for cell " + id, file.file());
  if (!file.has("cells/" + id)) throw Error(Errc::result_file, "got no group cells/" + id, file.file());
  return std::move(rows.front());
}

// `name`, or `name` with a number behind it if a file has that name.
std::string free_name(const std::string& name) {
  std::error_code ignored;
  std::string free = name;
  for (int n = 2; fs::exists(fs::symlink_status(free, ignored)); ++n) free = name + "." + std::to_string(n);
  return free;
}

// Copies cells of OUT whose parts were deleted into new parts, since OUT is rebuilt from parts and finished cells stay.
// Returns their rows.
std::vector<SummaryRow> restore_parts(const std::string& out_path) {
  std::vector<SummaryRow> restored;
  std::error_code ignored;
  if (!fs::is_regular_file(out_path, ignored)) return restored;
  const h5::File out = open_sealed(out_path);
  const RunInfo info = read_info(out);
  for (SummaryRow& row : read_summary_rows(out)) {
    const std::string path = part_path(out_path, row.cell);
    if (fs::exists(path, ignored) || !out.has("cells/" + row.cell)) continue;
    write_sealed(path, [&](const h5::File& part) {
      write_info(part, info);
      write_summary_rows(part, {row});
      part.create_group("cells");
      copy_cell(out, part, row.cell);
    });
    restored.push_back(std::move(row));
  }
  return restored;
}

// read_summary(). visit(file, id) is called for each row with the file that it comes from; a part's call replaces
// OUT's.
template <class Visit>
Summary gather(const std::string& out_path, const Visit& visit) {
  const auto held = h5::lock();
  Summary out;
  std::error_code missing;
  const auto written = fs::last_write_time(out_path, missing);
  const bool there = !missing;
  bool readable = false;
  std::vector<Part> parts = list_parts(out_path);
  if (there) {
    try {
      const h5::File file = open_sealed(out_path);
      refuse_recording(file);
      out.info = read_info(file);
      out.rows = read_summary_rows(file);
      for (const SummaryRow& row : out.rows) visit(file, row.cell);
      readable = true;
    } catch (const Error& e) {
      if (parts.empty()) throw;
      out.warnings.push_back(std::string(e.what()) + "; read its parts instead");
    }
  }
  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.written < b.written; });
  for (const Part& part : parts) {
    if (readable && part.written < written) continue;
    try {
      const h5::File file = open_sealed(part.path);
      SummaryRow row = part_row(file, part.id);
      visit(file, part.id);
      const auto same =
          std::find_if(out.rows.begin(), out.rows.end(), [&](const SummaryRow& r) { return r.cell == part.id; });
      if (same != out.rows.end())
        *same = std::move(row);
      else
        out.rows.push_back(std::move(row));
      if (!readable) out.info = read_info(file);
    } catch (const Error& e) {
      out.warnings.emplace_back(e.what());
    }
  }
  if (!readable && out.rows.empty())
    throw Error(Errc::result_file,
                parts.empty() ? "got no such file and no parts beside it, wanted a result file"
                              : "got no readable part, wanted a result file: " + out.warnings.back(),
                out_path);
  return out;
}

// A table of each cell of read_summary(); empty where the cell has none.
template <class Row>
std::map<std::string, std::vector<Row>> tables_of_cells(const std::string& out_path, const std::string& name) {
  std::map<std::string, std::vector<Row>> tables;
  gather(out_path, [&](const h5::File& file, const std::string& id) {
    const std::string table = "cells/" + id + "/" + name;
    tables[id] = file.has(table) ? read_rows<Row>(file, table) : std::vector<Row>();
  });
  return tables;
}

}  // namespace

bool is_there(const std::string& out_path) { return fs::exists(out_path) || !list_parts(out_path).empty(); }

std::string parts_folder(const std::string& out_path) { return follow_links(out_path) + ".parts"; }

std::string part_path(const std::string& out_path, const std::string& id) {
  check_id(id);
  return parts_folder(out_path) + "/" + id + ".h5";
}

std::string write_part(const std::string& out_path, const CellResult& cell, const RunInfo& info) {
  const auto held = h5::lock();
  const std::string path = part_path(out_path, cell.id);
  check_lengths(cell);
  write_sealed(path, [&](const h5::File& file) {
    write_info(file, info);
    write_summary_rows(file, {cell.summary});
    write_cell_group(file, cell);
  });
  std::error_code missing;
  const auto out_written = fs::last_write_time(out_path, missing);
  if (!missing) make_newer(path, out_written);
  return path;
}

Finished finished(const std::string& out_path) {
  const auto held = h5::lock();
  Finished out;
  std::map<std::string, std::string> damaged;  // id -> what is wrong
  remove_abandoned(parts_folder(out_path));
  for (const Part& part : list_parts(out_path)) {
    try {
      out.cells.emplace(part.id, part_row(open_sealed(part.path), part.id));
    } catch (const Error& e) {
      if (origin_of(part.path) != Origin::ours) {
        out.warnings.push_back(std::string(e.what()) + "; it is left alone");
        continue;
      }
      damaged.emplace(part.id, e.what());
      std::error_code ignored;
      if (e.code() == Errc::result_file) fs::rename(part.path, free_name(part.path + ".damaged"), ignored);
    }
  }
  try {
    for (SummaryRow& row : restore_parts(out_path)) {
      const std::string id = row.cell;
      out.cells.emplace(id, std::move(row));
    }
  } catch (const Error& e) {
    if (e.code() != Errc::result_file) throw;
    out.warnings.push_back(std::string(e.what()) + "; it is built from its parts again");
  }
  for (const auto& [id, what] : damaged)
    out.warnings.push_back(
        what + (out.cells.count(id) ? "; its copy in the result file takes its place" : "; the cell will run again"));
  return out;
}

std::vector<std::string> rebuild(const std::string& out_path, const RunInfo& info,
                                 const std::vector<std::string>& ids) {
  const auto held = h5::lock();
  std::vector<std::string> warnings;
  write_sealed(out_path, [&](const h5::File& out) {
    write_info(out, info);
    out.create_group("cells");
    std::vector<SummaryRow> rows;
    for (const std::string& id : ids) {
      const std::string path = part_path(out_path, id);
      std::error_code ignored;
      if (!fs::exists(path, ignored)) continue;
      try {
        const h5::File part = open_sealed(path);
        rows.push_back(part_row(part, id));
        copy_cell(part, out, id);
      } catch (const Error& e) {
        if (out.has("cells/" + id)) throw;  // half copied: this OUT cannot be used
        warnings.emplace_back(e.what());
      }
    }
    write_summary_rows(out, rows);
  });
  for (const Part& part : list_parts(out_path)) make_newer(out_path, part.written);
  return warnings;
}

Summary read_summary(const std::string& out_path) {
  return gather(out_path, [](const h5::File&, const std::string&) {});
}

std::map<std::string, std::vector<PluginRow>> read_plugins(const std::string& out_path) {
  return tables_of_cells<PluginRow>(out_path, "plugins");
}

std::map<std::string, std::vector<SampleRow>> read_samples(const std::string& out_path) {
  return tables_of_cells<SampleRow>(out_path, "samples");
}

std::map<std::string, std::vector<LedgerRow>> read_ledgers(const std::string& out_path) {
  return tables_of_cells<LedgerRow>(out_path, "ledger");
}

void add_label(SummaryRow& row, const std::string& label) { row.labels += (row.labels.empty() ? "" : ", ") + label; }

bool has_label(const SummaryRow& row, const std::string& label) {
  return (", " + row.labels + ", ").find(", " + label + ", ") != std::string::npos;
}

SummaryRow read_new_part(const std::string& out_path, const std::string& id) {
  const auto held = h5::lock();
  return part_row(open_sealed(part_path(out_path, id), Look::at_length), id);
}

CellResult read_cell(const std::string& file, const std::string& id) {
  const auto held = h5::lock();
  check_id(id);
  const h5::File opened = open_sealed(file);
  return read_cell_group(opened, id);
}

}  // namespace kvlab::results
