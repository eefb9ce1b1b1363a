// Files that are either complete or not there, and that are known to be undamaged before HDF5 parses them.
// A sealed file begins with a 512-byte HDF5 user block: "kvlab sealed 1\nbytes N\nsum HEX\n", zero padded; N and HEX
// cover everything after the block. Every HDF5 reader skips it.
#pragma once
#include <functional>
#include <string>

#include "result/h5.hpp"

namespace kvlab::results {

// Calls fill on a new HDF5 file of a temporary name, seals it, and gives it its name (fsync, rename, fsync of the
// folder, which is made if it is not there). Whatever was at `path` is replaced at once or, on an Error, stays.
void write_sealed(const std::string& path, const std::function<void(const h5::File&)>& fill);

// Errc::io if the file cannot be read; Errc::result_file if it is cut, changed or not sealed.
h5::File open_sealed(const std::string& path);

// Computes the seal of `path`, which has a user block, and writes it. (write_sealed does; tests and fuzz targets do
// too.)
void seal(const std::string& path);

// Removes temporary files in `folder` of processes of this host that no longer exist.
void remove_abandoned(const std::string& folder);

}  // namespace kvlab::results
