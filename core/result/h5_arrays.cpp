#include <kvlab/error.hpp>

#include "result/h5_detail.hpp"

namespace kvlab::h5 {

using namespace detail;

namespace {

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

}  // namespace

template <class T>
void Location::write_array(const std::string& name, const std::vector<T>& values,
                           const std::vector<std::int64_t>& shape, const std::string& unit, Handle::Id file_type,
                           Handle::Id memory_type, const Handle& layout) const {
  std::int64_t count = 1;
  for (std::int64_t n : shape) count *= n;
  if (count < 0 || static_cast<std::size_t>(count) != values.size())
    throw Error(Errc::internal, "got " + std::to_string(values.size()) + " values, wanted " + std::to_string(count),
                file_ + ": " + name);
  const Handle space = simple_space(shape, file_, name);
  put_dataset(handle_.get(), name, file_type, memory_type, space.get(), values.empty() ? nullptr : values.data(), file_,
              layout);
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

namespace {

// Properties of a dataset with a block for each index of its first dimension.
Handle blocks(const std::vector<std::int64_t>& shape, bool deflated, const std::string& file, const std::string& name) {
  Handle layout = own(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "make a property list", file);
  std::vector<hsize_t> block(shape.begin(), shape.end());
  for (const hsize_t n : block)
    if (n == 0) return layout;
  block.at(0) = 1;
  check(H5Pset_chunk(layout.get(), static_cast<int>(block.size()), block.data()), "set a block's size", file, name);
  if (!deflated) return layout;
  check(H5Pset_shuffle(layout.get()), "set a filter", file, name);
  check(H5Pset_deflate(layout.get(), 1), "set a filter", file, name);
  return layout;
}

}  // namespace

void Location::write_blocks(const std::string& name, const std::vector<float>& values,
                            const std::vector<std::int64_t>& shape, const std::string& unit) const {
  write_array(name, values, shape, unit, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, blocks(shape, false, file_, name));
}

void Location::write_blocks(const std::string& name, const std::vector<std::uint16_t>& values,
                            const std::vector<std::int64_t>& shape, const std::string& unit) const {
  write_array(name, values, shape, unit, H5T_STD_U16LE, H5T_NATIVE_UINT16, blocks(shape, true, file_, name));
}

std::size_t Location::rank(const std::string& name) const {
  const Handle set = own(H5Dopen2(handle_.get(), name.c_str(), H5P_DEFAULT), H5Dclose, "open a dataset", file_, name);
  const Handle space = own(H5Dget_space(set.get()), H5Sclose, "read a dataset's extent", file_, name);
  const int dimensions = H5Sget_simple_extent_ndims(space.get());
  if (dimensions < 0) fail("got no simple extent", file_, name);
  return static_cast<std::size_t>(dimensions);
}

std::vector<std::int64_t> Location::extent(const std::string& name) const {
  const std::size_t dimensions = rank(name);
  return Dataset(handle_.get(), name, dimensions, file_).shape;
}

std::vector<float> Location::read_f32(const std::string& name, std::size_t rank,
                                      std::vector<std::int64_t>* shape) const {
  return read_array<float>(handle_.get(), name, rank, shape, H5T_FLOAT, H5T_NATIVE_FLOAT, file_);
}

std::vector<std::int32_t> Location::read_i32(const std::string& name, std::size_t rank,
                                             std::vector<std::int64_t>* shape) const {
  return read_array<std::int32_t>(handle_.get(), name, rank, shape, H5T_INTEGER, H5T_NATIVE_INT32, file_);
}

std::vector<std::uint16_t> Location::read_u16(const std::string& name, std::size_t rank,
                                              std::vector<std::int64_t>* shape) const {
  return read_array<std::uint16_t>(handle_.get(), name, rank, shape, H5T_INTEGER, H5T_NATIVE_UINT16, file_);
}

std::vector<std::int64_t> Location::read_i64(const std::string& name, std::size_t rank,
                                             std::vector<std::int64_t>* shape) const {
  return read_array<std::int64_t>(handle_.get(), name, rank, shape, H5T_INTEGER, H5T_NATIVE_INT64, file_);
}

}  // namespace kvlab::h5
