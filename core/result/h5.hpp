// A small RAII layer over the HDF5 C API. Errors are Error(Errc::result_file, ..., file name + object); HDF5's own
// error printing is off. HDF5 is not assumed to be thread-safe: hold lock() around every use of this header.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab::h5 {

std::unique_lock<std::recursive_mutex> lock();

// One HDF5 identifier and the call that closes it.
class Handle {
 public:
  using Id = std::int64_t;
  using Close = int (*)(Id);
  Handle() = default;
  Handle(Id id, Close close) : id_(id), close_(close) {}
  Handle(Handle&& other) noexcept;
  Handle& operator=(Handle&& other) noexcept;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle();
  Id get() const { return id_; }
  Id release();  // the caller closes it

 private:
  void reset();
  Id id_ = -1;
  Close close_ = nullptr;
};

enum class ColumnType : std::uint8_t {
  i32,
  i64,
  f64,
  text,   // variable-length UTF-8
  label,  // UTF-8 of the width of the longest, null padded: for the few short words of a long table
};

// One column of a compound table in memory; exactly the vector of its type is used.
struct Column {
  std::string name;
  ColumnType type = ColumnType::i64;
  std::string unit;  // "" = none
  std::vector<std::int32_t> i32;
  std::vector<std::int64_t> i64;
  std::vector<double> f64;
  std::vector<std::string> text;

  std::size_t rows() const;
};

// A file or a group. Copies of a Location are not allowed; a group keeps its file open.
class Location {
 public:
  const std::string& file() const { return file_; }

  Location group(const std::string& path) const;                     // opens; Errc::result_file if it is not there
  Location create_group(const std::string& path) const;              // also the groups above it
  bool has(const std::string& path) const;                           // every link on the way exists
  std::vector<std::string> children(const std::string& path) const;  // ascending names

  void write(const std::string& name, const std::vector<float>& values, const std::vector<std::int64_t>& shape,
             const std::string& unit) const;
  void write(const std::string& name, const std::vector<std::int32_t>& values, const std::vector<std::int64_t>& shape,
             const std::string& unit) const;
  void write(const std::string& name, const std::vector<std::int64_t>& values, const std::vector<std::int64_t>& shape,
             const std::string& unit) const;
  // The same with a block of the file for each index of the first dimension. 16-bit numbers are shuffled and deflated.
  void write_blocks(const std::string& name, const std::vector<float>& values, const std::vector<std::int64_t>& shape,
                    const std::string& unit) const;
  void write_blocks(const std::string& name, const std::vector<std::uint16_t>& values,
                    const std::vector<std::int64_t>& shape, const std::string& unit) const;
  std::size_t rank(const std::string& name) const;                  // dimensions of a dataset
  std::vector<std::int64_t> extent(const std::string& name) const;  // of a dataset
  // shape, if given, receives the extent. Errc::result_file if the element class or the rank differs, or if the file is
  // too small for the extent.
  std::vector<float> read_f32(const std::string& name, std::size_t rank,
                              std::vector<std::int64_t>* shape = nullptr) const;
  std::vector<std::int32_t> read_i32(const std::string& name, std::size_t rank,
                                     std::vector<std::int64_t>* shape = nullptr) const;
  std::vector<std::int64_t> read_i64(const std::string& name, std::size_t rank,
                                     std::vector<std::int64_t>* shape = nullptr) const;

  std::vector<std::uint16_t> read_u16(const std::string& name, std::size_t rank,
                                      std::vector<std::int64_t>* shape = nullptr) const;

  // Columns of equal length. Units become the attribute `units`, one string per column.
  void write_table(const std::string& name, const std::vector<Column>& columns) const;
  std::set<std::string> columns_of(const std::string& name) const;  // names of a table's columns
  // Fills the given columns (name and type set) by name; a missing column or another type class is an error.
  void read_table(const std::string& name, std::vector<Column>& columns) const;

  // object: a path below this location, "." for itself.
  void set_attribute(const std::string& object, const std::string& name, const std::string& value) const;
  void set_attribute(const std::string& object, const std::string& name, std::int64_t value) const;
  void set_attribute(const std::string& object, const std::string& name, const std::vector<std::string>& values) const;
  bool has_attribute(const std::string& object, const std::string& name) const;
  std::string text_attribute(const std::string& object, const std::string& name) const;
  std::int64_t integer_attribute(const std::string& object, const std::string& name) const;
  std::vector<std::string> texts_attribute(const std::string& object, const std::string& name) const;

  // Copies an object and everything below it, byte for byte where HDF5 can (H5Ocopy).
  void copy_to(const std::string& path, const Location& target, const std::string& target_path) const;

 private:
  template <class T>
  void write_array(const std::string& name, const std::vector<T>& values, const std::vector<std::int64_t>& shape,
                   const std::string& unit, Handle::Id file_type, Handle::Id memory_type,
                   const Handle& layout = {}) const;

 protected:
  Location(Handle handle, std::string file) : handle_(std::move(handle)), file_(std::move(file)) {}
  Handle handle_;
  std::string file_;
};

class File : public Location {
 public:
  // Makes a file in memory, with `user_block` zero bytes in front (0, or a power of two from 512). Errors call it
  // `name`. HDF5 crashes when a disk is full, so it writes to none.
  static File create(const std::string& name, std::size_t user_block = 0);
  static File open(const std::string& path);  // read only

  // The bytes of a new file, user block included. The view lives until the file is written to or destroyed.
  std::string_view bytes() const;
  // Gives up a new file that an error left half written: HDF5 may crash when it closes one. Its memory is lost.
  void abandon();

 private:
  using Location::Location;
};

}  // namespace kvlab::h5
