#include "result/h5.hpp"

#include <hdf5.h>

#include <algorithm>
#include <cstring>
#include <kvlab/error.hpp>
#include <utility>

#include "result/h5_text.hpp"

namespace kvlab::h5 {
namespace {

static_assert(std::is_same_v<hid_t, Handle::Id> && std::is_same_v<herr_t, int>);

void quiet() { H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr); }

// What HDF5 says about its last failure, innermost first.
std::string reason() {
  std::string text;
  const auto take = [](unsigned, const H5E_error2_t* e, void* out) -> herr_t {
    auto& s = *static_cast<std::string*>(out);
    if (s.empty() && e->desc) s = e->desc;
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take, &text);
  return text.empty() ? "no reason given" : text;
}

[[noreturn]] void fail(const std::string& message, const std::string& file, const std::string& object = {}) {
  throw Error(Errc::result_file, message, object.empty() ? file : file + ": " + object);
}

Handle own(hid_t id, herr_t (*close)(hid_t), const char* what, const std::string& file,
           const std::string& object = {}) {
  if (id < 0) fail(std::string("got an HDF5 failure (") + reason() + "), wanted to " + what, file, object);
  return Handle(id, close);
}

void check(herr_t status, const char* what, const std::string& file, const std::string& object = {}) {
  if (status < 0) fail(std::string("got an HDF5 failure (") + reason() + "), wanted to " + what, file, object);
}

Handle text_type(std::size_t size, H5T_cset_t cset, const std::string& file) {
  Handle type = own(H5Tcopy(H5T_C_S1), H5Tclose, "make a string type", file);
  check(H5Tset_size(type.get(), size), "size a string type", file);
  check(H5Tset_cset(type.get(), cset), "set a string type's encoding", file);
  if (size != H5T_VARIABLE) check(H5Tset_strpad(type.get(), H5T_STR_NULLPAD), "pad a string type", file);
  return type;
}

Handle make_parents(const std::string& file) {
  Handle links = own(H5Pcreate(H5P_LINK_CREATE), H5Pclose, "make a property list", file);
  check(H5Pset_create_intermediate_group(links.get(), 1), "set a property", file);
  return links;
}

Handle simple_space(const std::vector<std::int64_t>& shape, const std::string& file, const std::string& object) {
  std::vector<hsize_t> extent;
  for (std::int64_t n : shape) {
    if (n < 0) fail("got a negative extent, wanted 0 or more", file, object);
    extent.push_back(static_cast<hsize_t>(n));
  }
  return own(H5Screate_simple(static_cast<int>(extent.size()), extent.data(), nullptr), H5Sclose, "make a data space",
             file, object);
}

void put_attribute(hid_t at, const std::string& object, const std::string& name, hid_t type, hid_t space,
                   const void* data, const std::string& file) {
  const Handle attribute =
      own(H5Acreate_by_name(at, object.c_str(), name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
          H5Aclose, "create an attribute", file, name);
  if (data) check(H5Awrite(attribute.get(), type, data), "write an attribute", file, name);
}

void put_dataset(hid_t at, const std::string& name, hid_t file_type, hid_t memory_type, hid_t space, const void* data,
                 const std::string& file) {
  const Handle links = make_parents(file);
  const Handle set = own(H5Dcreate2(at, name.c_str(), file_type, space, links.get(), H5P_DEFAULT, H5P_DEFAULT),
                         H5Dclose, "create a dataset", file, name);
  if (data) check(H5Dwrite(set.get(), memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), "write a dataset", file, name);
}

hsize_t file_size(hid_t object, const std::string& file) {
  const Handle id = own(H5Iget_file_id(object), H5Fclose, "find an object's file", file);
  hsize_t bytes = 0;
  check(H5Fget_filesize(id.get(), &bytes), "read the file's size", file);
  return bytes;
}

// A dataset that is open for reading, its extent checked against what its file can hold.
struct Dataset {
  Handle set, type;
  std::vector<std::int64_t> shape;
  std::size_t count = 1;

  Dataset(hid_t at, const std::string& name, std::size_t rank, const std::string& file) {
    set = own(H5Dopen2(at, name.c_str(), H5P_DEFAULT), H5Dclose, "open a dataset", file, name);
    type = own(H5Dget_type(set.get()), H5Tclose, "read a dataset's type", file, name);
    const Handle space = own(H5Dget_space(set.get()), H5Sclose, "read a dataset's extent", file, name);
    const int got = H5Sget_simple_extent_ndims(space.get());
    if (got < 0 || static_cast<std::size_t>(got) != rank)
      fail("got " + std::to_string(got) + " dimensions, wanted " + std::to_string(rank), file, name);
    std::vector<hsize_t> extent(rank);
    if (rank) check(H5Sget_simple_extent_dims(space.get(), extent.data(), nullptr), "read an extent", file, name);
    const hsize_t bytes = file_size(set.get(), file);
    const std::size_t element = std::max<std::size_t>(H5Tget_size(type.get()), 1);
    for (hsize_t n : extent) {
      if (n != 0 && count > bytes / element / n)
        fail("got an extent that needs more than the file's " + std::to_string(bytes) + " bytes", file, name);
      count *= static_cast<std::size_t>(n);
      shape.push_back(static_cast<std::int64_t>(n));
    }
  }
};

template <class T>
std::vector<T> read_array(hid_t at, const std::string& name, std::size_t rank, std::vector<std::int64_t>* shape,
                          H5T_class_t wanted, hid_t memory_type, const std::string& file) {
  const Dataset data(at, name, rank, file);
  if (H5Tget_class(data.type.get()) != wanted)
    fail(std::string("got another element type, wanted ") + (wanted == H5T_FLOAT ? "floats" : "integers"), file, name);
  std::vector<T> out(data.count);
  if (data.count)
    check(H5Dread(data.set.get(), memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, out.data()), "read a dataset", file,
          name);
  if (shape) *shape = data.shape;
  return out;
}

// Frees what HDF5 allocated for variable-length text, whatever happens while it is copied out.
struct Reclaim {
  hid_t type, space;
  void* data;
  ~Reclaim() { H5Dvlen_reclaim(type, space, H5P_DEFAULT, data); }
};

}  // namespace

std::unique_lock<std::recursive_mutex> lock() {
  static std::recursive_mutex mutex;
  std::unique_lock<std::recursive_mutex> held(mutex);
  quiet();
  return held;
}

Handle::Handle(Handle&& other) noexcept
    : id_(std::exchange(other.id_, -1)), close_(std::exchange(other.close_, nullptr)) {}

Handle& Handle::operator=(Handle&& other) noexcept {
  if (this != &other) {
    reset();
    id_ = std::exchange(other.id_, -1);
    close_ = std::exchange(other.close_, nullptr);
  }
  return *this;
}

Handle::~Handle() { reset(); }

void Handle::reset() {
  if (id_ >= 0 && close_) close_(id_);
  id_ = -1;
}

Handle::Id Handle::release() { return std::exchange(id_, -1); }

Location Location::group(const std::string& path) const {
  return Location(own(H5Gopen2(handle_.get(), path.c_str(), H5P_DEFAULT), H5Gclose, "open a group", file_, path),
                  file_);
}

Location Location::create_group(const std::string& path) const {
  const Handle links = make_parents(file_);
  return Location(own(H5Gcreate2(handle_.get(), path.c_str(), links.get(), H5P_DEFAULT, H5P_DEFAULT), H5Gclose,
                      "create a group", file_, path),
                  file_);
}

bool Location::has(const std::string& path) const {
  for (std::size_t end = 0; end < path.size();) {
    end = std::min(path.find('/', end + 1), path.size());
    if (H5Lexists(handle_.get(), path.substr(0, end).c_str(), H5P_DEFAULT) <= 0) return false;
  }
  return true;
}

std::vector<std::string> Location::children(const std::string& path) const {
  const Location at = group(path);
  std::vector<std::string> names;
  const auto take = [](hid_t, const char* name, const H5L_info_t*, void* out) -> herr_t {
    try {
      static_cast<std::vector<std::string>*>(out)->emplace_back(name);
      return 0;
    } catch (...) {
      return -1;
    }
  };
  check(H5Literate(at.handle_.get(), H5_INDEX_NAME, H5_ITER_INC, nullptr, take, &names), "list a group", file_, path);
  return names;
}

template <class T>
void Location::write_array(const std::string& name, const std::vector<T>& values,
                           const std::vector<std::int64_t>& shape, const std::string& unit, Handle::Id file_type,
                           Handle::Id memory_type) const {
  std::int64_t count = 1;
  for (std::int64_t n : shape) count *= n;
  if (count < 0 || static_cast<std::size_t>(count) != values.size())
    throw Error(Errc::internal, "got " + std::to_string(values.size()) + " values, wanted " + std::to_string(count),
                file_ + ": " + name);
  const Handle space = simple_space(shape, file_, name);
  put_dataset(handle_.get(), name, file_type, memory_type, space.get(), values.empty() ? nullptr : values.data(),
              file_);
  set_attribute(name, "units", unit);
}

void Location::write(const std::string& name, const std::vector<float>& values, const std::vector<std::int64_t>& shape,
                     const std::string& unit) const {
  write_array(name, values, shape, unit, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT);
}

void Location::write(const std::string& name, const std::vector<std::int32_t>& values,
                     const std::vector<std::int64_t>& shape, const std::string& unit) const {
  write_array(name, values, shape, unit, H5T_STD_I32LE, H5T_NATIVE_INT32);
}

void Location::write(const std::string& name, const std::vector<std::int64_t>& values,
                     const std::vector<std::int64_t>& shape, const std::string& unit) const {
  write_array(name, values, shape, unit, H5T_STD_I64LE, H5T_NATIVE_INT64);
}

std::size_t Location::rank(const std::string& name) const {
  const Handle set = own(H5Dopen2(handle_.get(), name.c_str(), H5P_DEFAULT), H5Dclose, "open a dataset", file_, name);
  const Handle space = own(H5Dget_space(set.get()), H5Sclose, "read a dataset's extent", file_, name);
  const int dimensions = H5Sget_simple_extent_ndims(space.get());
  if (dimensions < 0) fail("got no simple extent", file_, name);
  return static_cast<std::size_t>(dimensions);
}

std::vector<float> Location::read_f32(const std::string& name, std::size_t rank,
                                      std::vector<std::int64_t>* shape) const {
  return read_array<float>(handle_.get(), name, rank, shape, H5T_FLOAT, H5T_NATIVE_FLOAT, file_);
}

std::vector<std::int32_t> Location::read_i32(const std::string& name, std::size_t rank,
                                             std::vector<std::int64_t>* shape) const {
  return read_array<std::int32_t>(handle_.get(), name, rank, shape, H5T_INTEGER, H5T_NATIVE_INT32, file_);
}

std::vector<std::int64_t> Location::read_i64(const std::string& name, std::size_t rank,
                                             std::vector<std::int64_t>* shape) const {
  return read_array<std::int64_t>(handle_.get(), name, rank, shape, H5T_INTEGER, H5T_NATIVE_INT64, file_);
}

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

// One member of a compound row. The same in memory and in the file: kvlab runs on little-endian machines only.
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

void Location::set_attribute(const std::string& object, const std::string& name, const std::string& value) const {
  const Handle type = text_type(H5T_VARIABLE, H5T_CSET_UTF8, file_);
  const Handle space = own(H5Screate(H5S_SCALAR), H5Sclose, "make a data space", file_, name);
  const std::string text = valid_utf8(value);
  const char* pointer = text.c_str();
  put_attribute(handle_.get(), object, name, type.get(), space.get(), &pointer, file_);
}

void Location::set_attribute(const std::string& object, const std::string& name, std::int64_t value) const {
  const Handle space = own(H5Screate(H5S_SCALAR), H5Sclose, "make a data space", file_, name);
  put_attribute(handle_.get(), object, name, H5T_NATIVE_INT64, space.get(), &value, file_);
}

void Location::set_attribute(const std::string& object, const std::string& name,
                             const std::vector<std::string>& values) const {
  const Handle type = text_type(H5T_VARIABLE, H5T_CSET_UTF8, file_);
  const Handle space = simple_space({static_cast<std::int64_t>(values.size())}, file_, name);
  std::vector<std::string> texts;
  for (const std::string& v : values) texts.push_back(valid_utf8(v));
  std::vector<const char*> pointers;
  for (const std::string& t : texts) pointers.push_back(t.c_str());
  put_attribute(handle_.get(), object, name, type.get(), space.get(), pointers.empty() ? nullptr : pointers.data(),
                file_);
}

std::vector<std::string> Location::texts_attribute(const std::string& object, const std::string& name) const {
  const Handle attribute = own(H5Aopen_by_name(handle_.get(), object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT),
                               H5Aclose, "open an attribute", file_, name);
  const Handle stored = own(H5Aget_type(attribute.get()), H5Tclose, "read an attribute's type", file_, name);
  if (H5Tget_class(stored.get()) != H5T_STRING || H5Tis_variable_str(stored.get()) <= 0)
    fail("got an attribute of another type, wanted variable-length text", file_, name);
  const Handle space = own(H5Aget_space(attribute.get()), H5Sclose, "read an attribute's extent", file_, name);
  const hssize_t count = H5Sget_simple_extent_npoints(space.get());
  // A dense attribute of text holds 16 bytes per element in a file that is there.
  const hsize_t bytes = file_size(attribute.get(), file_);
  if (count < 0 || static_cast<hsize_t>(count) > bytes / 16) fail("got an attribute larger than its file", file_, name);
  const Handle type = text_type(H5T_VARIABLE, H5Tget_cset(stored.get()), file_);
  std::vector<char*> pointers(static_cast<std::size_t>(count), nullptr);
  const Reclaim reclaim{type.get(), space.get(), pointers.data()};
  if (count) check(H5Aread(attribute.get(), type.get(), pointers.data()), "read an attribute", file_, name);
  std::vector<std::string> texts;
  for (const char* p : pointers) texts.emplace_back(p ? p : "");
  return texts;
}

std::string Location::text_attribute(const std::string& object, const std::string& name) const {
  const auto texts = texts_attribute(object, name);
  if (texts.size() != 1) fail("got " + std::to_string(texts.size()) + " texts, wanted one", file_, name);
  return texts.front();
}

std::int64_t Location::integer_attribute(const std::string& object, const std::string& name) const {
  const Handle attribute = own(H5Aopen_by_name(handle_.get(), object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT),
                               H5Aclose, "open an attribute", file_, name);
  const Handle stored = own(H5Aget_type(attribute.get()), H5Tclose, "read an attribute's type", file_, name);
  const Handle space = own(H5Aget_space(attribute.get()), H5Sclose, "read an attribute's extent", file_, name);
  if (H5Tget_class(stored.get()) != H5T_INTEGER || H5Sget_simple_extent_npoints(space.get()) != 1)
    fail("got an attribute of another type, wanted one integer", file_, name);
  std::int64_t value = 0;
  check(H5Aread(attribute.get(), H5T_NATIVE_INT64, &value), "read an attribute", file_, name);
  return value;
}

void Location::copy_to(const std::string& path, const Location& target, const std::string& target_path) const {
  const Handle links = make_parents(target.file_);
  check(H5Ocopy(handle_.get(), path.c_str(), target.handle_.get(), target_path.c_str(), H5P_DEFAULT, links.get()),
        "copy a group", file_, path);
}

namespace {

Handle access_list(const std::string& path) {
  Handle access = own(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "make a property list", path);
  // SEMI: closing a file while one of its objects is open is an error, not a file that stays open unseen.
  check(H5Pset_fclose_degree(access.get(), H5F_CLOSE_SEMI), "set a property", path);
  // Files are written once under a temporary name, and network file systems refuse locks.
  check(H5Pset_file_locking(access.get(), false, true), "set a property", path);
  return access;
}

}  // namespace

File File::create(const std::string& path, std::size_t user_block) {
  quiet();
  const Handle access = access_list(path);
  const Handle creation = own(H5Pcreate(H5P_FILE_CREATE), H5Pclose, "make a property list", path);
  check(H5Pset_userblock(creation.get(), user_block), "set the user block", path);
  return File(
      own(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation.get(), access.get()), H5Fclose, "create the file", path),
      path);
}

File File::open(const std::string& path) {
  quiet();
  const Handle access = access_list(path);
  return File(own(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), H5Fclose, "open an HDF5 file", path), path);
}

void File::close() { check(H5Fclose(handle_.release()), "write and close the file", file_); }

}  // namespace kvlab::h5
