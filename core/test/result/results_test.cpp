#include "result/results.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <kvlab/error.hpp>
#include <numeric>
#include <random>
#include <sstream>
#include <thread>

#include "result/cell_file.hpp"
#include "result/h5.hpp"
#include "result/output.hpp"
#include "result/results_sample.hpp"
#include "result/rows.hpp"
#include "result/sealed.hpp"

using namespace kvlab;
using namespace kvlab::results;
namespace fs = std::filesystem;

namespace {

// Every value of a table as text. Unlike values, texts of NaN can be compared.
template <class Row>
std::vector<std::string> spelled(const std::vector<Row>& rows) {
  std::vector<std::string> out;
  for (const h5::Column& c : columns_of(rows)) {
    for (auto v : c.i32) out.push_back(c.name + "=" + std::to_string(v));
    for (auto v : c.i64) out.push_back(c.name + "=" + std::to_string(v));
    for (const auto& v : c.text) out.push_back(c.name + "=" + v);
    for (double v : c.f64) {
      std::uint64_t bits;
      std::memcpy(&bits, &v, 8);
      out.push_back(c.name + "=" + (std::isnan(v) ? "nan" : std::to_string(bits)));
    }
  }
  return out;
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

void check_equal(const CellResult& a, const CellResult& b) {
  CHECK(a.id == b.id);
  CHECK(spelled(std::vector{a.summary}) == spelled(std::vector{b.summary}));
  CHECK(spelled(a.samples) == spelled(b.samples));
  CHECK(same(a.token_ms, b.token_ms));
  CHECK(same(a.token_offsets, b.token_offsets));
  CHECK(same(a.step_ms, b.step_ms));
  CHECK(same(a.step_device_ms, b.step_device_ms));
  CHECK(a.parts == b.parts);
  CHECK(same(a.step_parts, b.step_parts));
  CHECK(spelled(a.ledger) == spelled(b.ledger));
  CHECK(spelled(a.plugins) == spelled(b.plugins));
  CHECK(same(a.fidelity.kl, b.fidelity.kl));
  CHECK(same(a.fidelity.top1, b.fidelity.top1));
  CHECK(same(a.fidelity.offsets, b.fidelity.offsets));
  CHECK(a.fidelity.layers == b.fidelity.layers);
  CHECK(same(a.fidelity.mass, b.fidelity.mass));
  CHECK(same(a.fidelity.page_recall, b.fidelity.page_recall));
  CHECK(same(a.fidelity.output_error, b.fidelity.output_error));
  CHECK(a.trace.samples == b.trace.samples);
  CHECK(a.trace.layers == b.trace.layers);
  CHECK(a.trace.kv_heads == b.trace.kv_heads);
  CHECK(same(a.trace.kept, b.trace.kept));
  CHECK(same(a.trace.kept_offsets, b.trace.kept_offsets));
  CHECK(same(a.trace.selected, b.trace.selected));
  CHECK(spelled(a.trace.events) == spelled(b.trace.events));
  CHECK(same(a.trace.tokens, b.trace.tokens));
  CHECK(same(a.trace.token_offsets, b.trace.token_offsets));
  CHECK(a.trace.pages == b.trace.pages);
}

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::vector<std::string> ids_of(const Summary& summary) {
  std::vector<std::string> ids;
  for (const SummaryRow& row : summary.rows) ids.push_back(row.cell);
  return ids;
}

using Ids = std::vector<std::string>;

}  // namespace

TEST_CASE("a part and OUT give back every field") {
  const TemporaryFolder dir;
  const std::string out = dir / "sub/résultats.h5";
  const CellResult full = sample_cell("c-1", 3);
  CellResult empty;
  empty.id = empty.summary.cell = "c_2";
  empty.summary.status = "oom";
  empty.summary.error = "wanted 68 GB";
  const std::string part = write_part(out, full, sample_info());
  CHECK(part == out + ".parts/c-1.h5");
  write_part(out, empty, sample_info());
  check_equal(read_cell(part, "c-1"), full);
  CHECK(rebuild(out, sample_info(), {"c_2", "not-yet", "c-1"}).empty());
  check_equal(read_cell(out, "c-1"), full);
  check_equal(read_cell(out, "c_2"), empty);

  const Summary summary = read_summary(out);
  CHECK(ids_of(summary) == Ids{"c_2", "c-1"});
  CHECK(summary.warnings.empty());
  const RunInfo got = summary.info, wanted = sample_info();
  CHECK(got.schema == 1);
  CHECK(got.kvlab_version == wanted.kvlab_version);
  CHECK(got.git_commit == wanted.git_commit);
  CHECK(got.created_utc == wanted.created_utc);
  CHECK(got.command == wanted.command);
  CHECK(got.experiment_yaml == wanted.experiment_yaml);
  CHECK(got.host == wanted.host);
  CHECK(got.cpu == wanted.cpu);
  CHECK(got.gpu.empty());
  CHECK(got.backend == wanted.backend);
  CHECK(got.threads == 2);
  CHECK(got.experiment_file == wanted.experiment_file);
  CHECK(got.models == wanted.models);
  CHECK(fs::exists(part));
}

TEST_CASE("tables of earlier versions, without the columns that came later, are read") {
  const TemporaryFolder folder;
  const std::string path = folder / "old.h5";
  const CellResult cell = sample_cell("a");
  const auto held = h5::lock();
  const auto earlier = [](std::vector<h5::Column> columns, const std::string& last) {
    while (columns.back().name != last) columns.pop_back();
    return columns;
  };
  write_sealed(path, [&](const h5::File& file) {
    file.write_table("summary", earlier(columns_of(std::vector{cell.summary}), "tokens_per_s"));
    file.write_table("samples", earlier(columns_of(cell.samples), "ttft_ms"));
    file.write_table("broken", earlier(columns_of(cell.samples), "queue_ms"));
  });
  const h5::File file = open_sealed(path);
  const auto rows = read_rows<SummaryRow>(file, "summary");
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].tokens_per_s == cell.summary.tokens_per_s);
  CHECK(rows[0].workload.empty());
  CHECK(rows[0].preemptions == -1);
  const auto samples = read_rows<SampleRow>(file, "samples");
  REQUIRE(samples.size() == 2);
  CHECK(samples[1].queue_ms == 2);
  CHECK(std::isnan(samples[1].end_ms));
  CHECK_THROWS_AS(read_rows<SampleRow>(file, "broken"), Error);
}

TEST_CASE("a column that came later may stand before others of its table") {
  const TemporaryFolder folder;
  const std::string path = folder / "old.h5";
  const CellResult cell = sample_cell("a");
  auto columns = columns_of(std::vector{cell.summary});
  std::erase_if(columns, [](const h5::Column& c) { return c.name == "workload" || c.name == "ablated"; });
  const auto held = h5::lock();
  write_sealed(path, [&](const h5::File& file) { file.write_table("summary", columns); });
  const auto rows = read_rows<SummaryRow>(open_sealed(path), "summary");
  REQUIRE(rows.size() == 1);
  SummaryRow wanted = cell.summary;
  wanted.workload.clear(), wanted.ablated.clear();
  CHECK(spelled(rows) == spelled(std::vector{wanted}));
}

TEST_CASE("a traced cell of an earlier version, whose questions stand beside its trace, is read") {
  const TemporaryFolder folder;
  const std::string path = folder / "old.h5";
  CellResult cell = sample_cell("a");
  for (SampleRow& sample : cell.samples) sample.id.clear();  // of a later version
  const auto write = [&](std::vector<std::int64_t> shape) {
    write_sealed(path, [&](const h5::File& file) {
      write_info(file, sample_info());
      write_summary_rows(file, {cell.summary});
      const h5::Location at = file.create_group("cells/a");
      auto columns = columns_of(cell.samples);
      while (columns.back().name != "preemptions") columns.pop_back();
      at.write_table("samples", columns);
      at.write("trace/questions", std::vector<std::int32_t>{0, 0, 0, 0, 1, 1}, shape, "");
      at.set_attribute("trace/questions", "pages", std::int64_t{12});
    });
  };
  write({2, 3});
  const CellResult got = read_cell(path, "a");
  CHECK(spelled(got.samples) == spelled(cell.samples));
  CHECK(got.trace.pages == 12);
  CHECK(got.trace.tokens.empty());
  write({3, 2});
  CHECK_THROWS_WITH(read_cell(path, "a"), Catch::Contains("got trace/questions of 3 by 2, wanted 2 by 3"));
}

TEST_CASE("text that is not UTF-8 is made so") {
  const TemporaryFolder dir;
  CellResult cell = sample_cell("a");
  const auto stored = [&](const std::string& text) {
    cell.samples[0].output = text;
    cell.samples[0].stop = text;
    return read_cell(write_part(dir / "o.h5", cell, sample_info()), "a").samples[0].output;
  };
  const std::string r = "\xef\xbf\xbd";
  CHECK(stored(std::string("a\0b", 3)) == "a" + r + "b");
  CHECK(stored("\xff\xc3") == r + r);                  // never a lead; a lead at the end
  CHECK(stored("\xc0\xaf") == r + r);                  // overlong
  CHECK(stored("\xe0\x80\x80") == r + r + r);          // overlong
  CHECK(stored("\xed\xa0\x80") == r + r + r);          // surrogate
  CHECK(stored("\xf4\x90\x80\x80") == r + r + r + r);  // beyond U+10FFFF
  CHECK(stored("\xf0\x9f\x99") == r + r + r);          // cut emoji
  CHECK(stored("\xf4\x8f\xbf\xbf\xed\x9f\xbf\xe0\xa0\x80") == "\xf4\x8f\xbf\xbf\xed\x9f\xbf\xe0\xa0\x80");
}

TEST_CASE("pieces that do not fit together are refused before anything is written") {
  const TemporaryFolder dir;
  const auto refused = [&](auto change) {
    CellResult cell = sample_cell("a");
    change(cell);
    CHECK_THROWS_AS(write_part(dir / "o.h5", cell, sample_info()), Error);
    CHECK(!fs::exists(dir / "o.h5.parts"));
  };
  refused([](CellResult& c) { c.id = c.summary.cell = "../a"; });
  refused([](CellResult& c) { c.id = c.summary.cell = ""; });
  refused([](CellResult& c) { c.summary.cell = "b"; });
  refused([](CellResult& c) { c.token_offsets = {0, 5}; });
  refused([](CellResult& c) { c.token_offsets = {0, 3, 4}; });
  refused([](CellResult& c) { c.step_parts.pop_back(); });
  refused([](CellResult& c) { c.fidelity.mass.pop_back(); });
  refused([](CellResult& c) { c.fidelity.layers = 0; });
  refused([](CellResult& c) { c.fidelity.offsets = {0, 1, 4}; });
  refused([](CellResult& c) { c.trace.kept_offsets.back() = 7; });
  refused([](CellResult& c) { c.trace.kv_heads = 3; });
  refused([](CellResult& c) { c.trace.events[1].count = 2; });
  refused([](CellResult& c) { c.trace.tokens.pop_back(); });
  refused([](CellResult& c) { c.trace.token_offsets.resize(4); });
  refused([](CellResult& c) { c.trace.token_offsets.clear(); });
  refused([](CellResult& c) { std::swap(c.trace.token_offsets[1], c.trace.token_offsets[5]); });
  refused([](CellResult& c) { c.trace.token_offsets.front() = 1; });
}

TEST_CASE("finished cells and results newer than OUT") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  CHECK(finished(out).cells.empty());
  CHECK_THROWS_AS(read_summary(out), Error);
  write_part(out, sample_cell("a"), sample_info());
  write_part(out, sample_cell("b"), sample_info());
  CHECK(ids_of(read_summary(out)) == Ids{"a", "b"});  // without OUT the parts are read
  rebuild(out, sample_info(), {"b"});                 // a belongs to an earlier experiment
  fs::last_write_time(out, fs::file_time_type::clock::now() - std::chrono::hours(1));
  fs::last_write_time(part_path(out, "a"), fs::file_time_type::clock::now() - std::chrono::hours(2));
  fs::last_write_time(part_path(out, "b"), fs::file_time_type::clock::now() - std::chrono::hours(2));
  CHECK(ids_of(read_summary(out)) == Ids{"b"});
  write_part(out, sample_cell("c"), sample_info());
  CellResult again = sample_cell("b");
  again.summary.score = 0.75;
  write_part(out, again, sample_info());
  const Summary newer = read_summary(out);
  CHECK(ids_of(newer) == Ids{"b", "c"});
  CHECK(newer.rows[0].score == 0.75);
  CHECK(finished(out).cells.size() == 3);
  CHECK(finished(out).cells.at("c").policy == "snapkv");
}

TEST_CASE("OUT is newer than its parts, and a part newer than OUT, whatever the clock says") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  write_part(out, sample_cell("a"), sample_info());
  write_part(out, sample_cell("b"), sample_info());
  fs::last_write_time(part_path(out, "b"), fs::file_time_type::clock::now() + std::chrono::hours(1));
  rebuild(out, sample_info(), {"a"});  // an experiment without b
  CHECK(ids_of(read_summary(out)) == Ids{"a"});
  write_part(out, sample_cell("c"), sample_info());
  CHECK(ids_of(read_summary(out)) == Ids{"a", "c"});
}

TEST_CASE("cells of OUT whose parts were deleted are finished and stay") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  write_part(out, sample_cell("a"), sample_info());
  write_part(out, sample_cell("b", 1), sample_info());
  rebuild(out, sample_info(), {"a", "b"});
  fs::remove_all(parts_folder(out));
  CHECK(finished(out).cells.size() == 2);  // nothing runs again
  rebuild(out, sample_info(), {"a"});      // an experiment without b
  CHECK(ids_of(read_summary(out)) == Ids{"a"});
  check_equal(read_cell(part_path(out, "b"), "b"), sample_cell("b", 1));

  // One part is damaged, but its copy in OUT is whole.
  fs::resize_file(part_path(out, "a"), 1000);
  const Finished again = finished(out);
  CHECK(again.cells.size() == 2);
  REQUIRE(again.warnings.size() == 1);
  CHECK_THAT(again.warnings[0], Catch::Contains("takes its place"));
  check_equal(read_cell(part_path(out, "a"), "a"), sample_cell("a"));

  // OUT's copy of b does not replace a newer part of b.
  rebuild(out, sample_info(), {"a", "b"});
  fs::remove_all(parts_folder(out));
  write_part(out, sample_cell("b", 2), sample_info());
  CHECK(finished(out).cells.size() == 2);
  check_equal(read_cell(part_path(out, "b"), "b"), sample_cell("b", 2));
}

TEST_CASE("a part that was renamed is no result of the cell that it is named after") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5", renamed = part_path(out, "b");
  write_part(out, sample_cell("a"), sample_info());
  fs::copy_file(part_path(out, "a"), renamed);
  const Summary summary = read_summary(out);
  CHECK(ids_of(summary) == Ids{"a"});
  REQUIRE(summary.warnings.size() == 1);
  CHECK_THAT(summary.warnings[0], Catch::Contains("wanted one row for cell b"));
  CHECK(rebuild(out, sample_info(), {"a", "b"}).size() == 1);
  CHECK(ids_of(read_summary(out)) == Ids{"a"});
  const Finished left = finished(out);
  CHECK(left.cells.count("a") == 1);
  CHECK(left.cells.count("b") == 0);
  CHECK(left.warnings.size() == 1);
  CHECK(!fs::exists(renamed));  // set aside: the cell runs again, and its part's name is free
}

TEST_CASE("an empty experiment has an empty OUT") {
  const TemporaryFolder dir;
  rebuild(dir / "o.h5", sample_info(), {});
  CHECK(read_summary(dir / "o.h5").rows.empty());
}

TEST_CASE("damaged parts are set aside and a damaged OUT is read from its parts") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  write_part(out, sample_cell("a"), sample_info());
  const std::string good = bytes_of(write_part(out, sample_cell("b"), sample_info()));
  rebuild(out, sample_info(), {"a", "b"});
  const std::string whole = bytes_of(out), part = part_path(out, "b");
  std::mt19937 random(1);
  const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  const auto damage = [&](std::string bytes, int kind) {
    if (kind == 0) return bytes.substr(0, below(bytes.size()));
    if (kind == 1) return bytes + "x";
    for (int flips = kind; flips > 1; --flips) {
      // Leaves out the zero padding of the seal, which nobody reads.
      const std::size_t at = below(bytes.size() - 512 + 64);
      bytes[at < 64 ? 15 + at % 40 : at + 448] ^= static_cast<char>(1u << below(8));
    }
    return bytes;
  };
  rebuild(out, sample_info(), {"a"});  // no copy of b
  for (int round = 0; round < 100; ++round) {
    write_bytes(part, damage(good, round % 5));
    const bool changed = bytes_of(part) != good;
    CHECK(read_summary(out).rows.size() == (changed ? 1 : 2));
    CHECK(rebuild(dir / "other.h5", sample_info(), {}).empty());
    const Finished left = finished(out);
    CHECK(left.cells.count("a") == 1);
    CHECK(left.cells.count("b") == (changed ? 0 : 1));
    CHECK(left.warnings.size() == (changed ? 1 : 0));
    CHECK(fs::exists(part) == !changed);
  }
  write_bytes(part, good.substr(0, good.size() / 2));
  CHECK(rebuild(out, sample_info(), {"a", "b"}).size() == 1);
  CHECK(ids_of(read_summary(out)).front() == "a");
  write_bytes(part, good);
  for (int round = 0; round < 100; ++round) {
    write_bytes(out, damage(whole, round % 5));
    if (bytes_of(out) == whole) continue;
    const Summary summary = read_summary(out);
    CHECK(summary.rows.size() == 2);
    CHECK(summary.warnings.size() == 1);
    CHECK_THROWS_AS(read_cell(out, "a"), Error);
  }
  fs::remove_all(parts_folder(out));
  CHECK_THROWS_AS(read_summary(out), Error);
  write_bytes(out, "not HDF5");
  CHECK_THROWS_AS(read_summary(out), Error);
  CHECK_THROWS_AS(read_summary(dir / ""), Error);
}

TEST_CASE("a part of several MiB comes back, and a changed byte at its end is seen") {
  const TemporaryFolder dir;
  CellResult cell = sample_cell("a");
  cell.step_ms.resize(700'000);
  std::iota(cell.step_ms.begin(), cell.step_ms.end(), 0.f);
  cell.step_device_ms.clear(), cell.step_parts.clear(), cell.parts.clear();
  const std::string part = write_part(dir / "o.h5", cell, sample_info());
  std::string bytes = bytes_of(part);
  REQUIRE(bytes.size() > (2u << 20));
  CHECK(read_cell(part, "a").step_ms == cell.step_ms);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_bytes(part, bytes);
  CHECK_THROWS_WITH(read_cell(part, "a"), Catch::Contains("wanted an unchanged file"));
}

TEST_CASE("the row of a new part is read without the bytes of its arrays") {
  const TemporaryFolder dir;
  CellResult cell = sample_cell("a");
  cell.step_ms.assign(700'000, 1.25f);
  cell.step_device_ms.clear(), cell.step_parts.clear(), cell.parts.clear();
  const std::string part = write_part(dir / "o.h5", cell, sample_info());
  std::string bytes = bytes_of(part);
  const float value = 1.25f;
  const std::string three = std::string(reinterpret_cast<const char*>(&value), 4) +
                            std::string(reinterpret_cast<const char*>(&value), 4) +
                            std::string(reinterpret_cast<const char*>(&value), 4);
  const std::size_t at = bytes.find(three);
  REQUIRE(at != bytes.npos);
  bytes[at] = static_cast<char>(bytes[at] ^ 1);
  write_bytes(part, bytes);
  CHECK_THROWS_WITH(read_cell(part, "a"), Catch::Contains("wanted an unchanged file"));
  CHECK(read_new_part(dir / "o.h5", "a").context_tokens == cell.summary.context_tokens);
  write_bytes(part, bytes.substr(0, bytes.size() - 1));
  CHECK_THROWS_WITH(read_new_part(dir / "o.h5", "a"), Catch::Contains("bytes, wanted"));
}

TEST_CASE("a sealed file of another layout is an error, not a crash") {
  const TemporaryFolder dir;
  const auto held = h5::lock();
  const std::string path = dir / "a.h5";
  const auto refused = [&](auto fill) {
    write_sealed(path, fill);
    CHECK_THROWS_AS(read_cell(path, "a"), Error);
    CHECK_THROWS_AS(read_summary(path), Error);
  };
  const auto summary = [](const h5::File& f) {
    f.write_table("summary", columns_of(std::vector{sample_cell("a").summary}));
  };
  refused([](const h5::File&) {});
  refused([&](const h5::File& f) { summary(f); });  // no schema version
  refused([&](const h5::File& f) { f.set_attribute(".", "schema_version", std::int64_t{2}), summary(f); });
  refused([&](const h5::File& f) { f.set_attribute(".", "schema_version", std::string("1")), summary(f); });
  refused([](const h5::File& f) {
    f.set_attribute(".", "schema_version", std::int64_t{1});
    f.write("summary", std::vector<float>{1, 2}, {2}, "");
  });
  refused([](const h5::File& f) {
    f.set_attribute(".", "schema_version", std::int64_t{1});
    auto columns = columns_of(std::vector{sample_cell("a").summary});
    columns.pop_back();
    f.write_table("summary", columns);
  });
  refused([](const h5::File& f) {
    f.set_attribute(".", "schema_version", std::int64_t{1});
    auto columns = columns_of(std::vector{sample_cell("a").summary});
    columns[0].type = h5::ColumnType::i64;  // `cell` becomes a number
    columns[0].i64 = {1};
    f.write_table("summary", columns);
  });
  const auto cell_refused = [&](auto fill) {
    write_sealed(path, [&](const h5::File& f) {
      f.set_attribute(".", "schema_version", std::int64_t{1});
      summary(f);
      fill(f.create_group("cells/a"));
    });
    CHECK_THROWS_AS(read_cell(path, "a"), Error);
  };
  cell_refused([](const h5::Location& c) { c.write("token_ms", std::vector<float>{1, 2}, {1, 2}, "ms"); });
  cell_refused([](const h5::Location& c) { c.write("token_ms", std::vector<float>{1, 2}, {2}, "ms"); });  // no offsets
  cell_refused([](const h5::Location& c) { c.write("token_ms", std::vector<std::int32_t>{1, 2}, {2}, "ms"); });
  cell_refused([](const h5::Location& c) { c.create_group("samples"); });
  cell_refused([](const h5::Location& c) { c.write("step_parts", std::vector<float>{1, 2}, {1, 2}, "ms"); });
  cell_refused([](const h5::Location& c) {
    c.write("trace/kept_offsets", std::vector<std::int64_t>{0, 9}, {1, 1, 1, 2}, "");
    c.write("trace/kept", std::vector<std::int32_t>{1}, {1}, "");
  });
  cell_refused([](const h5::Location& c) {
    auto events = columns_of(sample_cell("a").trace.events);
    events[4].text[0] = "jump";
    c.write("trace/selected", std::vector<std::int32_t>{1, 2, 3}, {3}, "");
    c.write_table("trace/events", events);
  });
}

TEST_CASE("a failed write leaves the old file and no temporary one") {
  const TemporaryFolder dir;
  const std::string path = dir / "a.h5";
  write_sealed(path, [](const h5::File& f) { f.set_attribute(".", "version", std::int64_t{1}); });
  const std::string before = bytes_of(path);
  const auto fill = [](const h5::File& f) {
    f.create_group("half");
    throw Error(Errc::internal, "stop");
  };
  CHECK_THROWS_AS(write_sealed(path, fill), Error);
  CHECK(bytes_of(path) == before);
  CHECK(std::distance(fs::directory_iterator(dir / ""), fs::directory_iterator()) == 1);
  CHECK_NOTHROW(write_sealed(dir / "new/folder/a.h5", [](const h5::File&) {}));
  CHECK_THROWS_AS(write_sealed(path + "/a.h5", [](const h5::File&) {}), Error);
}

TEST_CASE("kill -9 at any moment loses no finished part") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  std::mt19937 random(20);
  std::set<std::string> all;
  for (int round = 0; round < 20; ++round) {
    int report[2];
    REQUIRE(pipe(report) == 0);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      // Names a part once write_part has returned, and rebuilds OUT now and then, as a run does.
      close(report[0]);
      Ids ids(all.begin(), all.end());
      for (int n = 0;; ++n) {
        ids.push_back("r" + std::to_string(round) + "-" + std::to_string(n));
        try {
          write_part(out, sample_cell(ids.back(), n), sample_info());
          const std::string line = ids.back() + "\n";
          if (write(report[1], line.data(), line.size()) < 0) _exit(1);
          if (n % 3 == 0) rebuild(out, sample_info(), ids);
        } catch (const Error&) {
          _exit(2);
        }
      }
    }
    close(report[1]);
    std::string names;
    char buffer[4096];
    const auto more = [&] {
      const ssize_t n = read(report[0], buffer, sizeof buffer);
      if (n > 0) names.append(buffer, static_cast<std::size_t>(n));
      return n > 0;
    };
    more();  // waits for the first part, however busy the machine is
    std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution<int>(0, 40000)(random)));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    REQUIRE(WIFSIGNALED(status));
    while (more()) {
    }
    close(report[0]);
    std::istringstream lines(names);
    for (std::string line; std::getline(lines, line);) all.insert(line);

    const Finished left = finished(out);
    CHECK(left.warnings.empty());
    for (const std::string& id : all) CHECK(left.cells.count(id) == 1);
    for (const auto& [id, row] : left.cells) all.insert(id);  // parts renamed just before the kill
    for (const auto& entry : fs::directory_iterator(parts_folder(out))) CHECK(entry.path().extension() == ".h5");
    CHECK(read_summary(out).warnings.empty());
  }
  REQUIRE(all.size() >= 20);
  const Ids ids(all.begin(), all.end());
  CHECK(rebuild(out, sample_info(), ids).empty());
  CHECK(ids_of(read_summary(out)) == ids);
}
