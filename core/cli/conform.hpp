// `kvlab conform`: the conformance suite on one plugin library.
#pragma once
#include <string>

namespace kvlab {

struct ConformOptions {
  std::string library;
  std::string part;  // checks the promises whose names contain it; empty = all
  std::string backend = "auto";
  bool list = false;     // names the promises and checks none
  bool verbose = false;  // also names the promises that are skipped
};

// Prints a line for each promise that applies, pass or FAIL with the cause, and one for each reason to skip others. The
// suite is a program of its own: libexec/kvlab/conform of an installation or a bundle, bin/test_contract of a build.
// Returns 0 if nothing failed, else 1. Errc::plugin for a library that does not load, Errc::config without the suite
// and for a part of no promise's name.
int conform(const ConformOptions& options);

}  // namespace kvlab
