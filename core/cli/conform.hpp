// `kvlab conform`: the conformance suite on one plugin library.
#pragma once
#include <string>

namespace kvlab {

struct ConformOptions {
  std::string library;
  std::string part;  // checks the promises whose names contain it; empty = all
  std::string backend = "auto";
  bool list = false;  // names the promises and checks none
};

// Prints a line for each promise: pass, FAIL with the cause, or skip with the reason. The suite is a program of its
// own: libexec/kvlab/conform of an installation or a bundle, bin/test_contract of a build. Returns 0 if nothing failed,
// else 1. Errc::plugin for a library that does not load, Errc::config without the suite.
int conform(const ConformOptions& options);

}  // namespace kvlab
