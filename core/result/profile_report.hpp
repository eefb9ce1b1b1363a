// Profile files as pictures and tables of heads.
#pragma once
#include <string>
#include <vector>

#include "result/profile_file.hpp"
#include "result/report.hpp"

namespace kvlab::results {

// An array of zeros and ones over layers and heads is a set of heads. The words after the last ", one of " of the unit
// of a [layer, head] array name the classes 0, 1, 2, ...; their first letters differ. All functions refuse Format::csv
// with Errc::config. LaTeX has numbers in place of shades and bars.

// |a and b| / |a|, for two sets of heads of one shape; NaN where a is empty.
double shared_heads(const ProfileArray& a, const ProfileArray& b);

// A table of quantiles of each array's values. Where a profiler wrote a set, its other arrays follow as pictures, in
// which the set's heads are told apart: maps of [layer, head] arrays, and curves of [layer, head, entry] arrays. A
// curve has a bar for each entry, counted from 1: the mean over the set's heads, and over the others. The words after
// the last ", by " of the array's unit name its axis. Classes of [layer, head] are drawn as letters and counted.
// Without a set, arrays whose unit has ", by " are drawn, too: bars of a [layer] array, a curve of the mean over all
// heads, and of [layer, head, row, column] shares a map of their mean.
std::string profile_report(const ProfileFile& profile, Format format);

// The array `name` as a map with a row per layer and a column per head: a shade between the array's smallest and
// largest number, then the numbers. Errc::config where no profiler wrote a [layer, head] array of this name.
std::string head_map(const ProfileFile& profile, const std::string& name, Format format);

// For each set that all files have, a matrix of |A and B| / |A|, with A of the row's file and B of the column's. Its
// last column is the share that B would have by chance: |B| / heads, the mean over the other files. A map counts the
// files that have each head. Errc::config for files of different models, or without such a set.
std::string head_overlap(const std::vector<std::string>& paths, Format format);

}  // namespace kvlab::results
