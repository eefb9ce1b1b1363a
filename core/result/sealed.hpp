// Files that are either complete or not there. They are checked for damage before HDF5 parses them.
// A sealed file begins with a 512-byte HDF5 user block: "kvlab sealed 1\nbytes N\nsum HEX\n", zero padded; N and HEX
// cover everything after the block. Every HDF5 reader skips it.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "result/h5.hpp"

namespace kvlab::results {

// Who wrote a file, by its first bytes. A file of ours that was cut, even to nothing, is ours.
enum class Origin : std::uint8_t { absent, ours, foreign };
Origin origin_of(const std::string& path);  // foreign: also if it is no regular file or cannot be read

// Calls fill on a new HDF5 file in memory, seals it, and writes it to the disk (base/new_file.hpp). Makes the folder if
// it is missing. A file at `path` is replaced at once or, on an Error, stays. Errc::io if the disk does not take it;
// Errc::result_file if `path` is a file that kvlab did not write. Memory: the size of the file.
void write_sealed(const std::string& path, const std::function<void(const h5::File&)>& fill);

// at_length sees a cut file and no other damage, but it reads no more than HDF5 does.
enum class Look : std::uint8_t { at_all_bytes, at_length };

// Errc::io if the file cannot be read; Errc::result_file if it is cut, changed or not sealed.
h5::File open_sealed(const std::string& path, Look look = Look::at_all_bytes);

}  // namespace kvlab::results
