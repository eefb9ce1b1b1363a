// Reads a part file. After an even first byte the rest is the file itself: it is a good part, or its seal must refuse
// it before HDF5 reads it. After an odd first byte the rest describes a sealed, well-formed HDF5 file of another
// layout: pieces are missing or have other types, lengths and values. The reader must refuse or read it.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <kvlab/error.hpp>
#include <string>

#include "result/h5.hpp"
#include "result/report.hpp"
#include "result/rows.hpp"
#include "result/sealed.hpp"

using namespace kvlab;
using namespace kvlab::results;

namespace {

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  bool left() const { return at_ < size_; }
  std::uint8_t next() { return left() ? data_[at_++] : 0; }
  std::string text() {
    std::string out(next() % 8, ' ');
    for (char& c : out) c = static_cast<char>(next());
    return out;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_, at_ = 0;
};

// The table of the schema with a few columns dropped, retyped or changed in their values.
template <class Row>
void put_table(Bytes& in, const h5::Location& at, const std::string& name) {
  const std::size_t rows = in.next() % 4;
  auto columns = columns_of(std::vector<Row>(rows));
  for (int change = in.next() % 4; change > 0 && !columns.empty(); --change) {
    const std::size_t c = in.next() % columns.size();
    h5::Column& column = columns[c];
    switch (in.next() % 4) {
      case 0: columns.erase(columns.begin() + static_cast<std::ptrdiff_t>(c)); break;
      case 1:
        column.type = static_cast<h5::ColumnType>(in.next() % 5);
        column.i32.assign(rows, in.next());
        column.i64.assign(rows, in.next());
        column.f64.assign(rows, in.next());
        column.text.assign(rows, in.text());
        break;
      case 2:
        for (std::string& t : column.text) t = in.text();
        break;
      default:
        for (std::int64_t& v : column.i64) v = static_cast<std::int8_t>(in.next());
    }
  }
  if (!columns.empty()) at.write_table(name, columns);
}

void put_array(Bytes& in, const h5::Location& at, const std::string& name) {
  std::vector<std::int64_t> shape(in.next() % 5);
  std::size_t count = 1;
  for (std::int64_t& n : shape) count *= static_cast<std::size_t>(n = in.next() % 4);
  switch (in.next() % 3) {
    case 0: at.write(name, std::vector<float>(count, in.next()), shape, ""); break;
    case 1: at.write(name, std::vector<std::int32_t>(count, in.next()), shape, ""); break;
    default: {
      std::vector<std::int64_t> values(count);
      for (std::int64_t& v : values) v = static_cast<std::int8_t>(in.next());
      at.write(name, values, shape, in.text());
    }
  }
}

void put_file(Bytes& in, const h5::File& file) {
  const std::uint8_t root = in.next();
  if (root % 16 != 0) file.set_attribute(".", "schema_version", std::int64_t{1});
  if (root % 16 != 1) file.set_attribute(".", "threads", std::int64_t{root});
  for (const char* name :
       {"kvlab_version", "git_commit", "created_utc", "command", "experiment_yaml", "host", "cpu", "gpu", "backend"})
    if (root % 16 != 2) file.set_attribute(".", name, in.text());
  SummaryRow row;
  row.cell = "a";
  row.params = in.text();
  row.policy = in.text();
  row.context_tokens = in.next();
  row.fired = static_cast<std::int8_t>(in.next());
  if (root % 16 == 3)
    put_table<SummaryRow>(in, file, "summary");
  else
    file.write_table("summary", columns_of(std::vector{row}));
  const h5::Location at = file.create_group("cells/a");
  constexpr const char* arrays[] = {"token_ms",        "token_offsets",        "step_ms",
                                    "step_parts",      "fidelity/kl",          "fidelity/top1",
                                    "fidelity/mass",   "fidelity/page_recall", "fidelity/output_error",
                                    "trace/kept",      "trace/kept_offsets",   "trace/selected",
                                    "trace/questions", "trace/tokens",         "trace/token_offsets"};
  for (int pieces = 0; in.left() && pieces < 16; ++pieces) {
    const std::size_t piece = in.next() % (std::size(arrays) + 3);
    const std::string name = piece < std::size(arrays)        ? arrays[piece]
                             : piece == std::size(arrays)     ? "samples"
                             : piece == std::size(arrays) + 1 ? "ledger"
                                                              : "trace/events";
    if (at.has(name)) continue;
    if (piece < std::size(arrays))
      put_array(in, at, name);
    else if (name == "samples")
      put_table<SampleRow>(in, at, name);
    else if (name == "ledger")
      put_table<LedgerRow>(in, at, name);
    else
      put_table<TraceEvent>(in, at, name);
    if (name == "step_parts" && in.next() % 2)
      at.set_attribute(name, "parts", std::vector<std::string>(in.next() % 4, "p"));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  static const std::string folder = [] {
    const std::filesystem::path memory = "/dev/shm";  // a disk syncs each file
    std::string name =
        ((exists(memory) ? memory : std::filesystem::temp_directory_path()) / "kvlab_fuzz_XXXXXX").string();
    if (!mkdtemp(name.data())) std::abort();
    return name;
  }();
  const std::string path = folder + "/a.h5";
  const auto held = h5::lock();
  if (data[0] % 2 == 0) {
    std::ofstream(path, std::ios::binary | std::ios::trunc)
        .write(reinterpret_cast<const char*>(data + 1), static_cast<std::streamsize>(size - 1));
  } else {
    std::filesystem::remove(path);  // write_sealed() replaces no file that kvlab did not write
    Bytes in(data + 1, size - 1);
    write_sealed(path, [&](const h5::File& file) { put_file(in, file); });
  }
  try {
    read_cell(path, "a");
  } catch (const Error&) {
  }
  try {
    const Summary summary = read_summary(path);
    for (Format format : {Format::table, Format::md, Format::csv, Format::latex}) report(summary, format);
  } catch (const Error&) {
  }
  return 0;
}
