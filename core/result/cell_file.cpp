#include "result/cell_file.hpp"

#include <algorithm>
#include <kvlab/error.hpp>

#include "result/rows.hpp"

namespace kvlab::results {
namespace {

using Shape = std::vector<std::int64_t>;

std::int64_t length(std::size_t n) { return static_cast<std::int64_t>(n); }

void want(bool fits, const std::string& id, const char* what) {
  if (!fits) throw Error(Errc::internal, std::string("got pieces of different lengths, wanted ") + what, "cell " + id);
}

template <class T>
void write_if(const h5::Location& at, const std::string& name, const std::vector<T>& values, const Shape& shape,
              const char* unit) {
  if (!values.empty()) at.write(name, values, shape, unit);
}

std::vector<float> read_f32_if(const h5::Location& at, const std::string& name, std::size_t rank,
                               Shape* shape = nullptr) {
  return at.has(name) ? at.read_f32(name, rank, shape) : std::vector<float>{};
}

// Text attributes of the root, in the order of the schema.
constexpr std::pair<const char*, std::string RunInfo::*> info_texts[] = {
    {"kvlab_version", &RunInfo::kvlab_version},
    {"git_commit", &RunInfo::git_commit},
    {"created_utc", &RunInfo::created_utc},
    {"command", &RunInfo::command},
    {"experiment_yaml", &RunInfo::experiment_yaml},
    {"host", &RunInfo::host},
    {"cpu", &RunInfo::cpu},
    {"gpu", &RunInfo::gpu},
    {"backend", &RunInfo::backend},
};

// Those that files of earlier versions do not have.
constexpr std::pair<const char*, std::string RunInfo::*> later_info_texts[] = {
    {"experiment_file", &RunInfo::experiment_file},
    {"models", &RunInfo::models},
};

void check_schema(const h5::File& file) {
  const std::int64_t got = file.integer_attribute(".", "schema_version");
  if (got != schema_version)
    throw Error(Errc::result_file,
                "got schema version " + std::to_string(got) + ", wanted " + std::to_string(schema_version),
                file.file());
}

}  // namespace

void check_id(const std::string& id) {
  const bool good = !id.empty() && id.size() <= 128 && std::all_of(id.begin(), id.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '-';
  });
  if (!good) throw Error(Errc::internal, "got the cell id '" + id + "', wanted 1 to 128 of A-Z a-z 0-9 _ -");
}

void check_lengths(const CellResult& cell) {
  const std::string& id = cell.id;
  const auto rows_of = [&](std::size_t size, std::int64_t columns, const char* what) {
    want(size == 0 || (columns > 0 && length(size) % columns == 0), id, what);
  };
  want(cell.summary.cell == id, id, "summary.cell equal to the id");
  want(cell.token_offsets.empty() || cell.samples.empty() || cell.token_offsets.size() == cell.samples.size() + 1, id,
       "token_offsets [sample + 1]");
  want(std::is_sorted(cell.token_offsets.begin(), cell.token_offsets.end()), id, "ascending token_offsets");
  want(cell.token_ms.empty() || (!cell.token_offsets.empty() && cell.token_offsets.front() == 0 &&
                                 cell.token_offsets.back() == length(cell.token_ms.size())),
       id, "token_offsets from 0 to the length of token_ms");
  want(cell.step_device_ms.empty() || cell.step_device_ms.size() == cell.step_ms.size(), id,
       "step_device_ms [engine step]");
  want(cell.step_parts.size() == cell.step_ms.size() * cell.parts.size() || cell.step_parts.empty(), id,
       "step_parts [engine step, part]");
  const Fidelity& f = cell.fidelity;
  want(f.offsets.empty() || (f.offsets.front() == 0 && std::is_sorted(f.offsets.begin(), f.offsets.end()) &&
                             (f.kl.empty() || f.offsets.back() == length(f.kl.size()))),
       id, "fidelity/offsets ascending from 0 to the length of fidelity/kl");
  for (const auto* piece : {&f.mass, &f.page_recall, &f.output_error})
    rows_of(piece->size(), f.layers, "fidelity rows [generated token, layer]");
  const Trace& t = cell.trace;
  want(length(t.kept_offsets.size()) == t.samples * t.layers * t.kv_heads * 2 || t.kept_offsets.empty(), id,
       "trace/kept_offsets [sample, layer, kv_head, 2]");
  want(t.kept.empty() || !t.kept_offsets.empty(), id, "trace/kept with kept_offsets");
  for (std::size_t i = 0; i + 1 < t.kept_offsets.size(); i += 2)
    want(t.kept_offsets[i] >= 0 && t.kept_offsets[i] <= t.kept_offsets[i + 1] &&
             t.kept_offsets[i + 1] <= length(t.kept.size()),
         id, "trace/kept_offsets within trace/kept");
  for (const TraceEvent& e : t.events)
    want(e.begin >= 0 && e.count >= 0 && e.begin <= length(t.selected.size()) - e.count, id,
         "trace/events within trace/selected");
  want(t.token_offsets.empty() || length(t.token_offsets.size()) == length(cell.samples.size()) * token_columns, id,
       "trace/token_offsets [sample, 4]");
  want(std::is_sorted(t.token_offsets.begin(), t.token_offsets.end()), id, "ascending trace/token_offsets");
  want(t.token_offsets.empty() ? t.tokens.empty()
                               : t.token_offsets.front() == 0 && t.token_offsets.back() == length(t.tokens.size()),
       id, "trace/token_offsets from 0 to the length of trace/tokens");
}

void write_info(const h5::File& file, const RunInfo& info) {
  file.set_attribute(".", "schema_version", std::int64_t{info.schema});
  for (const auto& [name, member] : info_texts) file.set_attribute(".", name, info.*member);
  for (const auto& [name, member] : later_info_texts) file.set_attribute(".", name, info.*member);
  file.set_attribute(".", "threads", std::int64_t{info.threads});
}

RunInfo read_info(const h5::File& file) {
  check_schema(file);
  RunInfo info;
  for (const auto& [name, member] : info_texts) info.*member = file.text_attribute(".", name);
  for (const auto& [name, member] : later_info_texts)
    if (file.has_attribute(".", name)) info.*member = file.text_attribute(".", name);
  info.threads = static_cast<int>(file.integer_attribute(".", "threads"));
  return info;
}

bool is_recording(const h5::File& file) {
  return file.has_attribute(".", "kind") && file.text_attribute(".", "kind") == "recording";
}

void refuse_recording(const h5::File& file) {
  if (is_recording(file))
    throw Error(Errc::result_file, "got a recording, wanted a result; `kvlab replay` reads it", file.file());
}

void write_summary_rows(const h5::File& file, const std::vector<SummaryRow>& rows) {
  file.write_table("summary", columns_of(rows));
}

std::vector<SummaryRow> read_summary_rows(const h5::File& file) {
  check_schema(file);
  return read_rows<SummaryRow>(file, "summary");
}

void write_cell_group(const h5::File& file, const CellResult& cell) {
  const h5::Location at = file.create_group("cells/" + cell.id);
  if (!cell.samples.empty()) at.write_table("samples", columns_of(cell.samples));
  write_if(at, "token_ms", cell.token_ms, {length(cell.token_ms.size())}, "ms");
  write_if(at, "token_offsets", cell.token_offsets, {length(cell.token_offsets.size())}, "generated token");
  write_if(at, "step_ms", cell.step_ms, {length(cell.step_ms.size())}, "ms");
  write_if(at, "step_device_ms", cell.step_device_ms, {length(cell.step_device_ms.size())}, "ms");
  if (!cell.step_parts.empty()) {
    at.write("step_parts", cell.step_parts, {length(cell.step_ms.size()), length(cell.parts.size())}, "ms");
    at.set_attribute("step_parts", "parts", cell.parts);
  }
  if (!cell.ledger.empty()) at.write_table("ledger", columns_of(cell.ledger));
  if (!cell.plugins.empty()) at.write_table("plugins", columns_of(cell.plugins));

  const Fidelity& f = cell.fidelity;
  write_if(at, "fidelity/offsets", f.offsets, {length(f.offsets.size())}, "generated token");
  write_if(at, "fidelity/kl", f.kl, {length(f.kl.size())}, "nats");
  write_if(at, "fidelity/top1", f.top1, {length(f.top1.size())}, "1 = agrees");
  const auto per_layer = [&](const char* name, const std::vector<float>& values, const char* unit) {
    if (!values.empty()) at.write(name, values, {length(values.size()) / f.layers, f.layers}, unit);
  };
  per_layer("fidelity/mass", f.mass, "share");
  per_layer("fidelity/page_recall", f.page_recall, "share");
  per_layer("fidelity/output_error", f.output_error, "relative L2");

  const Trace& t = cell.trace;
  if (!t.kept_offsets.empty()) {
    at.write("trace/kept", t.kept, {length(t.kept.size())}, "position");
    at.write("trace/kept_offsets", t.kept_offsets, {t.samples, t.layers, t.kv_heads, 2}, "entry of kept");
  }
  if (!t.events.empty()) {
    at.write("trace/selected", t.selected, {length(t.selected.size())}, "token or page");
    at.write_table("trace/events", columns_of(t.events));
    at.set_attribute("trace/events", "pages", t.pages);
  }
  if (!t.token_offsets.empty()) {
    at.write("trace/tokens", t.tokens, {length(t.tokens.size())}, "token id");
    at.write("trace/token_offsets", t.token_offsets, {length(cell.samples.size()), token_columns},
             "entry of tokens: begin of prompt, of fed tokens, of answer; the answer's end");
  }
}

// Earlier versions wrote the questions of a traced cell beside its trace, and the samples without them.
void read_earlier_questions(const h5::Location& at, CellResult& cell) {
  Shape shape;
  const auto rows = at.read_i32("trace/questions", 2, &shape);
  const auto count = length(cell.samples.size());
  if (shape[0] != count || shape[1] != 3)
    throw Error(Errc::result_file,
                "got trace/questions of " + std::to_string(shape[0]) + " by " + std::to_string(shape[1]) + ", wanted " +
                    std::to_string(count) + " by 3",
                at.file() + ": cells/" + cell.id);
  for (std::size_t i = 0; i < cell.samples.size(); ++i) {
    cell.samples[i].task_sample = rows[3 * i];
    cell.samples[i].question = rows[3 * i + 1];
    cell.samples[i].follows = rows[3 * i + 2];
  }
  cell.trace.pages = at.integer_attribute("trace/questions", "pages");
}

CellResult read_cell_group(const h5::File& file, const std::string& id) {
  CellResult cell;
  cell.id = id;
  const auto rows = read_summary_rows(file);
  const auto row = std::find_if(rows.begin(), rows.end(), [&](const SummaryRow& r) { return r.cell == id; });
  if (row == rows.end() || !file.has("cells/" + id))
    throw Error(Errc::result_file, "got no cell " + id + ", wanted one of /summary", file.file());
  cell.summary = *row;
  const h5::Location at = file.group("cells/" + id);
  if (at.has("samples")) cell.samples = read_rows<SampleRow>(at, "samples");
  cell.token_ms = read_f32_if(at, "token_ms", 1);
  if (at.has("token_offsets")) cell.token_offsets = at.read_i64("token_offsets", 1);
  cell.step_ms = read_f32_if(at, "step_ms", 1);
  cell.step_device_ms = read_f32_if(at, "step_device_ms", 1);
  cell.step_parts = read_f32_if(at, "step_parts", 2);
  if (at.has("step_parts")) cell.parts = at.texts_attribute("step_parts", "parts");
  if (at.has("ledger")) cell.ledger = read_rows<LedgerRow>(at, "ledger");
  if (at.has("plugins")) cell.plugins = read_rows<PluginRow>(at, "plugins");

  Fidelity& f = cell.fidelity;
  if (at.has("fidelity/offsets")) f.offsets = at.read_i64("fidelity/offsets", 1);
  f.kl = read_f32_if(at, "fidelity/kl", 1);
  f.top1 = read_f32_if(at, "fidelity/top1", 1);
  for (const auto& [name, values] : {std::pair{"fidelity/mass", &f.mass},
                                     {"fidelity/page_recall", &f.page_recall},
                                     {"fidelity/output_error", &f.output_error}}) {
    Shape shape;
    *values = read_f32_if(at, name, 2, &shape);
    if (shape.empty()) continue;
    if (f.layers != 0 && f.layers != shape[1])
      throw Error(Errc::result_file, "got fidelity of different layer counts", file.file() + ": cells/" + id);
    f.layers = shape[1];
  }

  Trace& t = cell.trace;
  if (at.has("trace/kept_offsets")) {
    Shape shape;
    t.kept_offsets = at.read_i64("trace/kept_offsets", 4, &shape);
    t.samples = shape[0];
    t.layers = shape[1];
    t.kv_heads = shape[2];
    t.kept = at.read_i32("trace/kept", 1);
  }
  if (at.has("trace/events")) {
    t.selected = at.read_i32("trace/selected", 1);
    t.events = read_rows<TraceEvent>(at, "trace/events");
    if (at.has_attribute("trace/events", "pages")) t.pages = at.integer_attribute("trace/events", "pages");
  }
  if (at.has("trace/questions")) read_earlier_questions(at, cell);
  if (at.has("trace/token_offsets")) {
    t.token_offsets = at.read_i64("trace/token_offsets", 2);
    t.tokens = at.read_i32("trace/tokens", 1);
  }
  try {
    check_lengths(cell);
  } catch (const Error& e) {
    throw Error(Errc::result_file, e.message(), file.file() + ": cells/" + id);
  }
  return cell;
}

void copy_cell(const h5::File& from, const h5::File& to, const std::string& id) {
  from.copy_to("cells/" + id, to, "cells/" + id);
}

}  // namespace kvlab::results
