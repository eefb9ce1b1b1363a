#include "result/h5_detail.hpp"

#include <algorithm>
#include <kvlab/error.hpp>

namespace kvlab::h5::detail {
namespace {

// HDF5's innermost description of its last failure.
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

}  // namespace

void quiet() {
  // Owners close their files. At exit HDF5 would also close those that were given up (File::abandon).
  static const herr_t once = H5dont_atexit();
  static_cast<void>(once);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

[[noreturn]] void fail(const std::string& message, const std::string& file, const std::string& object) {
  throw Error(Errc::result_file, message, object.empty() ? file : file + ": " + object);
}

Handle own(hid_t id, herr_t (*close)(hid_t), const char* what, const std::string& file, const std::string& object) {
  if (id < 0) fail(std::string("got an HDF5 failure (") + reason() + "), wanted to " + what, file, object);
  return Handle(id, close);
}

void check(herr_t status, const char* what, const std::string& file, const std::string& object) {
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

void put_dataset(hid_t at, const std::string& name, hid_t file_type, hid_t memory_type, hid_t space, const void* data,
                 const std::string& file, const Handle& layout) {
  const Handle links = make_parents(file);
  const hid_t properties = layout.get() < 0 ? H5P_DEFAULT : layout.get();
  const Handle set = own(H5Dcreate2(at, name.c_str(), file_type, space, links.get(), properties, H5P_DEFAULT), H5Dclose,
                         "create a dataset", file, name);
  if (data) check(H5Dwrite(set.get(), memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), "write a dataset", file, name);
}

hsize_t file_size(hid_t object, const std::string& file) {
  const Handle id = own(H5Iget_file_id(object), H5Fclose, "find an object's file", file);
  hsize_t bytes = 0;
  check(H5Fget_filesize(id.get(), &bytes), "read the file's size", file);
  return bytes;
}

Dataset::Dataset(hid_t at, const std::string& name, std::size_t rank, const std::string& file) {
  set = own(H5Dopen2(at, name.c_str(), H5P_DEFAULT), H5Dclose, "open a dataset", file, name);
  type = own(H5Dget_type(set.get()), H5Tclose, "read a dataset's type", file, name);
  const Handle space = own(H5Dget_space(set.get()), H5Sclose, "read a dataset's extent", file, name);
  const int got = H5Sget_simple_extent_ndims(space.get());
  if (got < 0 || static_cast<std::size_t>(got) != rank)
    fail("got " + std::to_string(got) + " dimensions, wanted " + std::to_string(rank), file, name);
  std::vector<hsize_t> extent(rank);
  if (rank) check(H5Sget_simple_extent_dims(space.get(), extent.data(), nullptr), "read an extent", file, name);
  const Handle layout = own(H5Dget_create_plist(set.get()), H5Pclose, "read a property list", file, name);
  const hsize_t most_deflated = 1032;  // bytes that a byte of deflate can stand for
  const hsize_t bytes = file_size(set.get(), file) * (H5Pget_nfilters(layout.get()) > 0 ? most_deflated : 1);
  const std::size_t element = std::max<std::size_t>(H5Tget_size(type.get()), 1);
  for (hsize_t n : extent) {
    if (n != 0 && count > bytes / element / n)
      fail("got an extent that needs more than the file's " + std::to_string(bytes) + " bytes", file, name);
    count *= static_cast<std::size_t>(n);
    shape.push_back(static_cast<std::int64_t>(n));
  }
}

}  // namespace kvlab::h5::detail
