// Profile files as pictures and tables of heads.
#pragma once
#include <string>
#include <vector>

#include "result/profile_file.hpp"

namespace kvlab::results {

// The array `name` as a map with a row per layer and a column per head: a shade between the array's smallest and
// largest number, then the numbers. LaTeX has the numbers alone. Errc::config where no profiler wrote a [layer, head]
// array of this name.
std::string head_map(const ProfileFile& profile, const std::string& name, Format format);

// An array of zeros and ones is a set of heads. A matrix for each set that all files have: |A and B| / |A|, with A of
// the row's file and B of the column's. Errc::config for files of different models, or without such a set.
std::string head_overlap(const std::vector<std::string>& paths, Format format);

}  // namespace kvlab::results
