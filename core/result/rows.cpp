#include "result/rows.hpp"

#include <kvlab/error.hpp>
#include <set>
#include <type_traits>
#include <variant>

namespace kvlab::results {
namespace {

using h5::Column;
using h5::ColumnType;

constexpr const char* trace_words[] = {"select", "promote", "evict", "trigger"};

template <class Row>
struct Field {
  using Member =
      std::variant<std::int32_t Row::*, std::int64_t Row::*, double Row::*, std::string Row::*, TraceKind Row::*>;

  const char* name;
  Member member;
  const char* unit = "";
  bool label = false;  // a text of a few short words
  bool later = false;  // files of earlier versions do not have it

  ColumnType type() const {
    switch (member.index()) {
      case 0: return ColumnType::i32;
      case 1: return ColumnType::i64;
      case 2: return ColumnType::f64;
      case 3: return label ? ColumnType::label : ColumnType::text;
      default: return ColumnType::label;
    }
  }
};

const std::vector<Field<SummaryRow>>& fields(const SummaryRow*) {
  using R = SummaryRow;
  static const std::vector<Field<R>> list = {
      {"cell", &R::cell},
      {"model", &R::model},
      {"policy", &R::policy},
      {"params", &R::params},
      {"task", &R::task},
      {"context_tokens", &R::context_tokens, "tokens"},
      {"budget_tokens", &R::budget_tokens, "tokens"},
      {"budget_bytes", &R::budget_bytes, "bytes"},
      {"seed", &R::seed},
      {"repeat", &R::repeat},
      {"status", &R::status},
      {"error", &R::error},
      {"labels", &R::labels},
      {"samples", &R::samples},
      {"score", &R::score},
      {"score_lo", &R::score_lo},
      {"score_hi", &R::score_hi},
      {"kl", &R::kl, "nats"},
      {"top1", &R::top1, "share"},
      {"mass", &R::mass, "share"},
      {"device_bytes_peak", &R::device_bytes_peak, "bytes"},
      {"host_bytes_peak", &R::host_bytes_peak, "bytes"},
      {"disk_bytes_peak", &R::disk_bytes_peak, "bytes"},
      {"device_bytes_decode", &R::device_bytes_decode, "bytes"},
      {"compression", &R::compression, "ratio"},
      {"fired", &R::fired, "edits"},
      {"output_tokens", &R::output_tokens, "tokens"},
      {"ttft_ms", &R::ttft_ms, "ms"},
      {"tpot_ms_p50", &R::tpot_ms_p50, "ms"},
      {"tpot_ms_p95", &R::tpot_ms_p95, "ms"},
      {"tpot_ms_p99", &R::tpot_ms_p99, "ms"},
      {"tokens_per_s", &R::tokens_per_s, "tokens/s"},
      {"tpot_ms_mean", &R::tpot_ms_mean, "ms", false, true},
      {"workload", &R::workload, "", false, true},
      {"ttft_ms_p95", &R::ttft_ms_p95, "ms", false, true},
      {"queue_ms_p50", &R::queue_ms_p50, "ms", false, true},
      {"preemptions", &R::preemptions, "", false, true},
      {"overhead", &R::overhead, "share", false, true},
      {"ablated", &R::ablated, "", false, true},
      {"warnings", &R::warnings, "", false, true},
      {"nonfinite", &R::nonfinite, "numbers", false, true},
      {"load", &R::load, "processes", false, true},
      {"other_cores", &R::other_cores, "cores", false, true},
      {"waiting_threads", &R::waiting_threads, "threads", false, true},
      {"involuntary_switches", &R::involuntary_switches, "", false, true},
      {"voluntary_switches", &R::voluntary_switches, "", false, true},
      {"threads", &R::threads, "threads", false, true},
      {"pauses", &R::pauses, "steps", false, true},
      {"by_age", &R::by_age, "1 = ranks by age alone", false, true},
      {"page_recall", &R::page_recall, "share", false, true},
      {"kept_tokens", &R::kept_tokens, "tokens", false, true},
      {"moved_device", &R::moved_device, "bytes/step", false, true},
      {"moved_host", &R::moved_host, "bytes/step", false, true},
      {"reruns", &R::reruns, "", false, true},
      {"cpu_mhz_begin", &R::cpu_mhz_begin, "MHz", false, true},
      {"cpu_mhz_end", &R::cpu_mhz_end, "MHz", false, true},
      {"gpu_mhz_begin", &R::gpu_mhz_begin, "MHz", false, true},
      {"gpu_mhz_end", &R::gpu_mhz_end, "MHz", false, true},
      {"host_bytes_decode", &R::host_bytes_decode, "bytes", false, true},
      {"disk_bytes_decode", &R::disk_bytes_decode, "bytes", false, true},
      {"fragmentation", &R::fragmentation, "bytes", false, true},
      {"sampling", &R::sampling, "", false, true},
      {"draws", &R::draws, "", false, true},
      {"pass", &R::pass, "share", false, true},
      {"pass_lo", &R::pass_lo, "share", false, true},
      {"pass_hi", &R::pass_hi, "share", false, true},
  };
  return list;
}

const std::vector<Field<SampleRow>>& fields(const SampleRow*) {
  using R = SampleRow;
  static const std::vector<Field<R>> list = {
      {"sample", &R::sample},
      {"prompt_sha256", &R::prompt_sha256},
      {"prompt_tokens", &R::prompt_tokens, "tokens"},
      {"output", &R::output},
      {"output_tokens", &R::output_tokens, "tokens"},
      {"stop", &R::stop},
      {"score", &R::score},
      {"kl", &R::kl, "nats"},
      {"top1", &R::top1, "share"},
      {"first_divergence", &R::first_divergence, "generated token"},
      {"arrival_ms", &R::arrival_ms, "ms"},
      {"queue_ms", &R::queue_ms, "ms"},
      {"ttft_ms", &R::ttft_ms, "ms"},
      {"end_ms", &R::end_ms, "ms", false, true},
      {"preemptions", &R::preemptions, "", false, true},
      {"task_sample", &R::task_sample, "", false, true},
      {"question", &R::question, "", false, true},
      {"follows", &R::follows, "1 = a turn", false, true},
      {"pauses", &R::pauses, "steps", false, true},
      {"draw", &R::draw, "", false, true},
      {"id", &R::id, "", false, true},
  };
  return list;
}

const std::vector<Field<LedgerRow>>& fields(const LedgerRow*) {
  using R = LedgerRow;
  static const std::vector<Field<R>> list = {
      {"engine_step", &R::engine_step},     {"tier", &R::tier, "", true},  {"tag", &R::tag, "", true},
      {"held", &R::held, "bytes"},          {"moved", &R::moved, "bytes"}, {"unused", &R::unused, "bytes", false, true},
      {"codec", &R::codec, "", true, true},
  };
  return list;
}

const std::vector<Field<TraceEvent>>& fields(const TraceEvent*) {
  using R = TraceEvent;
  static const std::vector<Field<R>> list = {
      {"sample", &R::sample},          {"token", &R::token}, {"layer", &R::layer},
      {"kv_head", &R::kv_head},        {"kind", &R::kind},   {"begin", &R::begin, "entries"},
      {"count", &R::count, "entries"},
  };
  return list;
}

const std::vector<Field<PluginRow>>& fields(const PluginRow*) {
  using R = PluginRow;
  static const std::vector<Field<R>> list = {
      {"role", &R::role, "", true}, {"name", &R::name}, {"version", &R::version}, {"sha256", &R::sha256}};
  return list;
}

TraceKind trace_kind(const std::string& word, const std::string& where) {
  for (std::size_t i = 0; i < std::size(trace_words); ++i)
    if (word == trace_words[i]) return static_cast<TraceKind>(i);
  throw Error(Errc::result_file, "got the event kind '" + word + "', wanted select, promote, evict or trigger", where);
}

// The vector of `column` that holds a member of type T.
template <class T>
auto& values(Column& column) {
  if constexpr (std::is_same_v<T, std::int32_t>)
    return column.i32;
  else if constexpr (std::is_same_v<T, std::int64_t>)
    return column.i64;
  else if constexpr (std::is_same_v<T, double>)
    return column.f64;
  else
    return column.text;
}

template <class T, class Row>
T member_type(T Row::*);

template <class Row>
std::vector<Column> columns(const std::vector<Row>& rows) {
  std::vector<Column> out;
  for (const Field<Row>& field : fields(static_cast<const Row*>(nullptr))) {
    Column column;
    column.name = field.name;
    column.unit = field.unit;
    column.type = field.type();
    std::visit(
        [&](auto member) {
          using T = decltype(member_type(member));
          auto& v = values<T>(column);
          v.reserve(rows.size());
          for (const Row& row : rows) {
            if constexpr (std::is_same_v<T, TraceKind>)
              v.emplace_back(trace_words[static_cast<std::size_t>(row.*member)]);
            else
              v.push_back(row.*member);
          }
        },
        field.member);
    out.push_back(std::move(column));
  }
  return out;
}

}  // namespace

std::vector<Column> columns_of(const std::vector<SummaryRow>& rows) { return columns(rows); }
std::vector<Column> columns_of(const std::vector<SampleRow>& rows) { return columns(rows); }
std::vector<Column> columns_of(const std::vector<LedgerRow>& rows) { return columns(rows); }
std::vector<Column> columns_of(const std::vector<TraceEvent>& rows) { return columns(rows); }
std::vector<Column> columns_of(const std::vector<PluginRow>& rows) { return columns(rows); }

template <class Row>
std::vector<Row> read_rows(const h5::Location& at, const std::string& name) {
  std::vector<Column> table = columns(std::vector<Row>{});
  auto list = fields(static_cast<const Row*>(nullptr));
  const std::set<std::string> there = at.columns_of(name);
  for (std::size_t c = list.size(); c-- > 0;) {
    if (!list[c].later || there.count(list[c].name)) continue;
    list.erase(list.begin() + static_cast<std::ptrdiff_t>(c));
    table.erase(table.begin() + static_cast<std::ptrdiff_t>(c));
  }
  at.read_table(name, table);
  std::vector<Row> rows(table.front().rows());
  for (std::size_t c = 0; c < table.size(); ++c)
    std::visit(
        [&](auto member) {
          using T = decltype(member_type(member));
          auto& v = values<T>(table[c]);
          for (std::size_t r = 0; r < rows.size(); ++r) {
            if constexpr (std::is_same_v<T, TraceKind>)
              rows[r].*member = trace_kind(v[r], at.file() + ": " + name);
            else
              rows[r].*member = std::move(v[r]);
          }
        },
        list[c].member);
  return rows;
}

template std::vector<SummaryRow> read_rows(const h5::Location&, const std::string&);
template std::vector<SampleRow> read_rows(const h5::Location&, const std::string&);
template std::vector<LedgerRow> read_rows(const h5::Location&, const std::string&);
template std::vector<TraceEvent> read_rows(const h5::Location&, const std::string&);
template std::vector<PluginRow> read_rows(const h5::Location&, const std::string&);

}  // namespace kvlab::results
