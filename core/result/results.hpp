// The result files of a run (HDF5 schema version 1). So that cells survive a kill, every finished cell is a file of its
// own, OUT.parts/<id>.h5, and OUT is rebuilt from those. A part and OUT have the same layout.
//
// Both files begin with a 512-byte HDF5 user block: a text line with the length and a hash of everything after it. It
// is checked before HDF5 parses a byte, since HDF5 itself crashes on some damaged files. All functions may be called
// from any thread (they take h5::lock()). Failures are Error(Errc::result_file or Errc::io).
#pragma once
#include <compare>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab::results {

inline constexpr int schema_version = 1;
inline constexpr double not_measured = std::numeric_limits<double>::quiet_NaN();

// Root attributes, the same in every part of a run and in OUT.
struct RunInfo {
  int schema = schema_version;
  std::string kvlab_version, git_commit, created_utc, command, experiment_yaml, host, cpu, gpu, backend;
  int threads = 0;
  // Empty in files of earlier versions.
  std::string experiment_file;  // its absolute path; relative paths in the text start at its folder
  std::string models;           // JSON: run/model_record.hpp
};

// One row of /summary. NaN or -1 = not measured. Text is UTF-8; other bytes become U+FFFD when it is written.
struct SummaryRow {
  std::string cell, model, policy;
  std::string params;        // JSON
  std::string ablated;       // the component that `ablate` switched off; empty: none
  std::int64_t by_age = -1;  // 1 = the scorer ranks tokens by their age alone (Scorer::by_age)
  std::string task;
  std::int64_t context_tokens = -1;
  double budget_tokens = not_measured;  // mean per KV head; NaN = the policy has no budget
  std::int64_t budget_bytes = -1;
  std::int64_t seed = -1, repeat = 0;
  std::string status = "ok";  // ok | failed | oom
  std::string error;
  std::string labels;  // comma separated: injected, functional, oracle, synthetic, sampled, replayed, graph, eager,
                       // disturbed
  std::int64_t samples = 0;
  double score = not_measured, score_lo = not_measured, score_hi = not_measured;  // 0 to 1; perplexity for `text`
  double kl = not_measured;                                                       // nats
  double top1 = not_measured, mass = not_measured;                                // shares, 0 to 1
  std::int64_t device_bytes_peak = -1, host_bytes_peak = -1, disk_bytes_peak = -1;
  // Means over decode steps. fragmentation: device bytes of pages that hold no token (LedgerRow::unused).
  double device_bytes_decode = not_measured, host_bytes_decode = not_measured, disk_bytes_decode = not_measured;
  double fragmentation = not_measured;
  double compression = not_measured;
  std::int64_t fired = -1;  // edits that changed something
  std::int64_t output_tokens = -1;
  double ttft_ms = not_measured;
  double tpot_ms_p50 = not_measured, tpot_ms_p95 = not_measured, tpot_ms_p99 = not_measured;
  double tokens_per_s = not_measured;
  double tpot_ms_mean = not_measured;
  std::string workload;  // empty without one; with one, tokens_per_s is of the whole time
  double ttft_ms_p95 = not_measured, queue_ms_p50 = not_measured;
  std::int64_t preemptions = -1;
  std::int64_t pauses = -1;            // Served::pauses of all requests
  double overhead = not_measured;      // share of decode steps' time in which the GPU's kernels did not run
  std::string warnings;                // said while the cell ran, one per line (result/warnings.hpp)
  double page_recall = not_measured;   // share, 0 to 1: mean of the cell's fidelity/page_recall
  double kept_tokens = not_measured;   // per KV head, mean over decode steps; of a replay
  double moved_device = not_measured;  // mean bytes that a decode step brings to the device from the host
  double moved_host = not_measured;    // the same to the host from the device
  std::int64_t nonfinite = 0;          // NaN and infinite numbers in the call that ended a failed cell
  // The fields below describe the timed part of a timed cell.
  double load = not_measured;             // the machine's load average over a minute, at its end
  double other_cores = not_measured;      // mean number of our cores that other processes used
  double waiting_threads = not_measured;  // mean number of our threads that could run and had no core
  std::int64_t involuntary_switches = -1, voluntary_switches = -1;
  std::int64_t threads = -1;  // the fewest OpenMP threads that worked
  std::string sampling;       // SamplingSpec::text of drawn answers; else empty
  std::int64_t draws =
      -1;  // answers that are drawn to each question; score is then their mean, avg@draws. -1 = none is
  // Share of questions with an answer of score 1 among their draws, pass@draws, and its 95 % interval.
  double pass = not_measured, pass_lo = not_measured, pass_hi = not_measured;
  std::int64_t reruns = -1;  // how often --strict ran the cell again; the row is the last run's. -1 = without --strict
  // MHz before and after: the mean over the cores that we may use, and the GPU's multiprocessors
  // (base/clock_rates.hpp).
  double cpu_mhz_begin = not_measured, cpu_mhz_end = not_measured;
  double gpu_mhz_begin = not_measured, gpu_mhz_end = not_measured;
};

void add_label(SummaryRow& row, const std::string& label);
bool has_label(const SummaryRow& row, const std::string& label);

struct SampleRow {
  std::int64_t sample = 0;        // index in the cell: one row per question or request
  std::int64_t task_sample = -1;  // index in the task: rows of one context share it; -1 in files of earlier versions
  std::int64_t question = -1;     // index in that sample
  std::int64_t draw = -1;         // of the answers that are drawn to the question; -1 = none is
  std::int64_t follows = -1;      // 1 = a turn: it goes on where the question before it ended
  std::string id;                 // of its record in the task's data file; empty for a generated prompt
  std::string prompt_sha256;
  std::int64_t prompt_tokens = 0;
  std::string output;
  std::int64_t output_tokens = 0;
  std::string stop;
  double score = not_measured, kl = not_measured, top1 = not_measured;
  std::int64_t first_divergence = -1;  // generated token; -1 = none or not measured
  double arrival_ms = not_measured, queue_ms = not_measured, ttft_ms = not_measured;
  double end_ms = not_measured;   // of a request's last token; since the start, like arrival_ms
  std::int64_t preemptions = -1;  // of a request
  std::int64_t pauses = -1;       // of a request
};

// A plugin that a cell or a profile used: one row of /cells/ID/plugins, or of /plugins in a profile file. A profile
// file that the cell's policy read has a row too: role "profile", its path, no version.
struct PluginRow {
  std::string role, name, version;
  std::string sha256;  // of its file; empty for a part of kvlab itself
  auto operator<=>(const PluginRow&) const = default;
};

struct LedgerRow {
  std::int64_t engine_step = 0;
  std::string tier, tag;
  std::int64_t held = 0, moved = 0;  // bytes; moved = since the previous engine step
  std::int64_t unused = -1;          // of `held`: bytes of pages for tokens that are not there. -1 = not known
  std::string codec;  // of the pages (store/codec_name.hpp). Empty: bytes outside of pages, and in earlier files
};

enum class TraceKind : std::uint8_t { select, promote, evict, trigger };

// Its tokens or pages are Trace::selected[begin, begin + count).
struct TraceEvent {
  std::int32_t sample = 0, token = 0, layer = 0, kv_head = 0;
  TraceKind kind = TraceKind::select;
  std::int64_t begin = 0, count = 0;
};

// An empty vector = not measured: its dataset is not written.
struct Fidelity {
  std::vector<float> kl, top1;                         // [generated token] of the full cache's answer, which is forced
  std::vector<std::int64_t> offsets;                   // [sample + 1] into the rows of this group
  std::int64_t layers = 0;                             // of the three below
  std::vector<float> mass, page_recall, output_error;  // [generated token, layer]
};

struct Trace {
  std::int64_t samples = 0, layers = 0, kv_heads = 0;  // of kept_offsets
  std::vector<std::int32_t> kept;          // positions kept after the prompt, ascending per (sample, layer, kv_head)
  std::vector<std::int64_t> kept_offsets;  // [sample, layer, kv_head, 2]: begin and end in `kept`
  std::vector<std::int32_t> selected;      // tokens or pages, by event
  std::vector<TraceEvent> events;
  std::int64_t pages = 0;                   // that a KV head has room for; 0 = the file does not say
  std::vector<std::int32_t> tokens;         // ids, sample by sample: its fed tokens, then its answer
  std::vector<std::int64_t> token_offsets;  // [sample, 4] into `tokens`, see token_columns
};

// Columns of Trace::token_offsets. Tokens between the first two were prefilled. A turn's fed tokens are those of its
// whole conversation, earlier answers included. An answer includes its end-of-sequence token.
inline constexpr std::int64_t token_columns = 4;  // begin of prompt, of fed tokens, of answer; the answer's end

struct CellResult {
  std::string id;      // [A-Za-z0-9_-], at most 128: names the part file and the group
  SummaryRow summary;  // `cell` must equal id
  std::vector<SampleRow> samples;
  std::vector<float> token_ms;              // [generated token]
  std::vector<std::int64_t> token_offsets;  // [sample + 1] into token_ms
  std::vector<float> step_ms;               // [engine step]
  std::vector<float> step_device_ms;        // [engine step] of the GPU's kernels; NaN = not measured
  std::vector<std::string> parts;           // names of the columns of step_parts
  std::vector<float> step_parts;            // ms [engine step, part]
  std::vector<LedgerRow> ledger;
  std::vector<PluginRow> plugins;  // task, policy, profile file; empty in older files
  Fidelity fidelity;
  Trace trace;
};

// Writes OUT.parts/<id>.h5 (temporary file, fsync, rename, fsync of the folder), replacing an older one. Lengths that
// do not fit together are Errc::internal; Errc::io if the disk does not take it. Returns the part's path.
std::string write_part(const std::string& out_path, const CellResult& cell, const RunInfo& info);

struct Finished {
  std::map<std::string, SummaryRow> cells;  // by id: every complete, readable part, failed and oom cells included
  std::vector<std::string> warnings;        // one line per damaged part, which was renamed to <id>.h5.damaged, and
                                            // per file among the parts that kvlab did not write, which stays
};

// The cells that need not run again; none if neither OUT nor its parts exist. It also removes temporary files that
// killed processes of this host left. Cells of OUT whose parts were deleted get new parts, copied from OUT.
Finished finished(const std::string& out_path);

// Writes OUT from the parts of `ids`, in that order (temporary file, fsync, rename); the parts stay. Ids without a part
// have not run yet and are left out. Returns warnings: one per damaged part, which is left out too. OUT is made in
// memory, in as many bytes as it has, and written to the disk in one piece. Errc::io if the disk has no room for it.
std::vector<std::string> rebuild(const std::string& out_path, const RunInfo& info, const std::vector<std::string>& ids);

struct Summary {
  RunInfo info;
  std::vector<SummaryRow> rows;
  std::vector<std::string> warnings;  // damaged files that were passed over
};

// OUT's rows, then those of parts that are newer than OUT (a part of the same id replaces OUT's row). Without a
// readable OUT: every part, oldest first. Errc::result_file if there is neither. Changes nothing on disk.
Summary read_summary(const std::string& out_path);

// The plugins of the cells of read_summary(), by the cell's id.
std::map<std::string, std::vector<PluginRow>> read_plugins(const std::string& out_path);

// The samples of the cells of read_summary(), by the cell's id.
std::map<std::string, std::vector<SampleRow>> read_samples(const std::string& out_path);

// The ledgers of the cells of read_summary(), by the cell's id.
std::map<std::string, std::vector<LedgerRow>> read_ledgers(const std::string& out_path);

// The row of a part that another process has just written. It does not read the cell's arrays, so it does not see
// whether they are damaged; rebuild() does.
SummaryRow read_new_part(const std::string& out_path, const std::string& id);

// Everything about one cell from one file (OUT or a part).
CellResult read_cell(const std::string& file, const std::string& id);

// Whether there is OUT or a part of it. A run that has just begun may have an empty folder of parts.
bool is_there(const std::string& out_path);

// The parts of a symbolic link OUT lie beside the file that it leads to.
std::string parts_folder(const std::string& out_path);                      // OUT.parts
std::string part_path(const std::string& out_path, const std::string& id);  // OUT.parts/<id>.h5

}  // namespace kvlab::results
