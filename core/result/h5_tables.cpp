#include <algorithm>
#include <cstring>
#include <kvlab/error.hpp>

#include "result/h5_detail.hpp"
#include "result/h5_text.hpp"

namespace kvlab::h5 {

using namespace detail;

std::size_t Column::rows() const {
  switch (type) {
    case ColumnType::i32: return i32.size();
    case ColumnType::i64: return i64.size();
    case ColumnType::f64: return f64.size();
    case ColumnType::text:
    case ColumnType::label: return text.size();
  }
  return 0;
}

namespace {

// One member of a compound row. Memory and file have the same layout: kvlab runs on little-endian machines only.
struct Member {
  Handle type;
  std::size_t offset = 0, size = 0;
};

Handle copy_type(hid_t type, const std::string& file) { return own(H5Tcopy(type), H5Tclose, "copy a type", file); }

Handle number_type(ColumnType type, const std::string& file) {
  return copy_type(type == ColumnType::f64   ? H5T_IEEE_F64LE
                   : type == ColumnType::i64 ? H5T_STD_I64LE
                                             : H5T_STD_I32LE,
                   file);
}

bool is_text(ColumnType type) { return type == ColumnType::text || type == ColumnType::label; }

Handle compound(const std::vector<Column>& columns, const std::vector<Member>& members, std::size_t size,
                const std::string& file) {
  Handle type = own(H5Tcreate(H5T_COMPOUND, size), H5Tclose, "make a table type", file);
  for (std::size_t c = 0; c < columns.size(); ++c)
    check(H5Tinsert(type.get(), columns[c].name.c_str(), members[c].offset, members[c].type.get()), "make a table type",
          file, columns[c].name);
  return type;
}

void put_value(const Column& column, const std::vector<std::string>& text, std::size_t row, char* at) {
  switch (column.type) {
    case ColumnType::i32: std::memcpy(at, &column.i32[row], 4); break;
    case ColumnType::i64: std::memcpy(at, &column.i64[row], 8); break;
    case ColumnType::f64: std::memcpy(at, &column.f64[row], 8); break;
    case ColumnType::text: {
      const char* pointer = text[row].c_str();
      std::memcpy(at, &pointer, sizeof pointer);
      break;
    }
    case ColumnType::label: std::memcpy(at, text[row].data(), text[row].size()); break;
  }
}

}  // namespace

void Location::write_table(const std::string& name, const std::vector<Column>& columns) const {
  const std::size_t rows = columns.empty() ? 0 : columns.front().rows();
  std::vector<std::vector<std::string>> texts(columns.size());
  std::vector<Member> members(columns.size());
  std::vector<std::string> units;
  std::size_t stride = 0;
  for (std::size_t c = 0; c < columns.size(); ++c) {
    const Column& column = columns[c];
    if (column.rows() != rows)
      throw Error(Errc::internal, "got columns of different lengths, wanted one length", file_ + ": " + name);
    std::size_t width = 1;
    for (const std::string& t : column.text) {
      texts[c].push_back(valid_utf8(t));
      width = std::max(width, texts[c].back().size());
    }
    Member& m = members[c];
    m.offset = stride;
    m.type = is_text(column.type)
                 ? text_type(column.type == ColumnType::text ? H5T_VARIABLE : width, H5T_CSET_UTF8, file_)
                 : number_type(column.type, file_);
    m.size = H5Tget_size(m.type.get());
    stride += m.size;
    units.push_back(column.unit);
  }
  std::vector<char> buffer(rows * stride);
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < columns.size(); ++c)
      put_value(columns[c], texts[c], r, buffer.data() + r * stride + members[c].offset);
  const Handle type = compound(columns, members, stride, file_);
  const Handle space = simple_space({static_cast<std::int64_t>(rows)}, file_, name);
  put_dataset(handle_.get(), name, type.get(), type.get(), space.get(), rows ? buffer.data() : nullptr, file_);
  set_attribute(name, "units", units);
}

std::set<std::string> Location::columns_of(const std::string& name) const {
  const Dataset data(handle_.get(), name, 1, file_);
  std::set<std::string> out;
  if (H5Tget_class(data.type.get()) != H5T_COMPOUND) return out;
  for (int i = 0; i < H5Tget_nmembers(data.type.get()); ++i) {
    char* const column = H5Tget_member_name(data.type.get(), static_cast<unsigned>(i));
    if (!column) fail("a column's name could not be read", file_, name);
    out.insert(column);
    H5free_memory(column);
  }
  return out;
}

void Location::read_table(const std::string& name, std::vector<Column>& columns) const {
  const Dataset data(handle_.get(), name, 1, file_);
  if (H5Tget_class(data.type.get()) != H5T_COMPOUND) fail("got an array, wanted a table", file_, name);
  std::vector<Member> members(columns.size());
  std::vector<bool> variable(columns.size());
  std::size_t stride = 0;
  for (std::size_t c = 0; c < columns.size(); ++c) {
    const Column& column = columns[c];
    Member& m = members[c];
    const int index = H5Tget_member_index(data.type.get(), column.name.c_str());
    if (index < 0) fail("got no column '" + column.name + "'", file_, name);
    const auto i = static_cast<unsigned>(index);
    const H5T_class_t got = H5Tget_member_class(data.type.get(), i);
    const bool text = is_text(column.type);
    const H5T_class_t wanted = text ? H5T_STRING : column.type == ColumnType::f64 ? H5T_FLOAT : H5T_INTEGER;
    if (got != wanted) fail("got column '" + column.name + "' of another type", file_, name);
    if (text) {
      const Handle stored = own(H5Tget_member_type(data.type.get(), i), H5Tclose, "read a column's type", file_, name);
      variable[c] = H5Tis_variable_str(stored.get()) > 0;
      m.type = text_type(variable[c] ? H5T_VARIABLE : H5Tget_size(stored.get()), H5Tget_cset(stored.get()), file_);
    } else {
      m.type = number_type(column.type, file_);
    }
    m.offset = stride;
    m.size = H5Tget_size(m.type.get());
    stride += m.size;
  }
  const Handle memory_type = compound(columns, members, stride, file_);
  const Handle space = simple_space({static_cast<std::int64_t>(data.count)}, file_, name);
  std::vector<char> buffer(data.count * stride);
  const Reclaim reclaim{memory_type.get(), space.get(), buffer.data()};
  if (data.count)
    check(H5Dread(data.set.get(), memory_type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, buffer.data()), "read a table",
          file_, name);
  for (std::size_t c = 0; c < columns.size(); ++c) {
    Column& column = columns[c];
    const auto each = [&](auto take) {
      for (std::size_t r = 0; r < data.count; ++r) take(r, buffer.data() + r * stride + members[c].offset);
    };
    switch (column.type) {
      case ColumnType::i32:
        column.i32.resize(data.count);
        each([&](std::size_t r, const char* at) { std::memcpy(&column.i32[r], at, 4); });
        break;
      case ColumnType::i64:
        column.i64.resize(data.count);
        each([&](std::size_t r, const char* at) { std::memcpy(&column.i64[r], at, 8); });
        break;
      case ColumnType::f64:
        column.f64.resize(data.count);
        each([&](std::size_t r, const char* at) { std::memcpy(&column.f64[r], at, 8); });
        break;
      case ColumnType::text:
      case ColumnType::label:
        column.text.assign(data.count, {});
        each([&](std::size_t r, const char* at) {
          if (variable[c]) {
            const char* pointer;
            std::memcpy(&pointer, at, sizeof pointer);
            if (pointer) column.text[r] = pointer;
          } else {
            column.text[r].assign(at, strnlen(at, members[c].size));
          }
        });
        break;
    }
  }
}

}  // namespace kvlab::h5
