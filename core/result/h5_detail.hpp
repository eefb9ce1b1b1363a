// Shared by the sources of h5.hpp; no other file includes it.
#pragma once
#include <hdf5.h>

#include <string>
#include <type_traits>
#include <vector>

#include "result/h5.hpp"

namespace kvlab::h5::detail {

static_assert(std::is_same_v<hid_t, Handle::Id> && std::is_same_v<herr_t, int>);

void quiet();  // HDF5 prints nothing

[[noreturn]] void fail(const std::string& message, const std::string& file, const std::string& object = {});
// Throw an Error with HDF5's reason for an id or a status below 0.
Handle own(hid_t id, herr_t (*close)(hid_t), const char* what, const std::string& file, const std::string& object = {});
void check(herr_t status, const char* what, const std::string& file, const std::string& object = {});

Handle text_type(std::size_t size, H5T_cset_t cset, const std::string& file);
Handle make_parents(const std::string& file);  // properties of a link that make the groups above it
Handle simple_space(const std::vector<std::int64_t>& shape, const std::string& file, const std::string& object);
void put_dataset(hid_t at, const std::string& name, hid_t file_type, hid_t memory_type, hid_t space, const void* data,
                 const std::string& file, const Handle& layout = {});  // layout: of a new dataset; empty = the default
hsize_t file_size(hid_t object, const std::string& file);

// A dataset that is open for reading. Its constructor checks that the file is large enough for its extent.
struct Dataset {
  Handle set, type;
  std::vector<std::int64_t> shape;
  std::size_t count = 1;

  Dataset(hid_t at, const std::string& name, std::size_t rank, const std::string& file);
};

// Frees the variable-length text that HDF5 allocated, even if copying it out throws.
struct Reclaim {
  hid_t type, space;
  void* data;
  ~Reclaim() { H5Dvlen_reclaim(type, space, H5P_DEFAULT, data); }
};

}  // namespace kvlab::h5::detail
