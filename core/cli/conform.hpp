// `kvlab conform`: the conformance suite on one plugin library.
#pragma once
#include <string>

namespace kvlab {

struct ConformOptions {
  std::string library;
  std::string part;  // of the names of the promises that are looked at; empty = all
  std::string backend = "auto";
  bool list = false;  // name the promises, look at none
};

// A line for each promise on the standard output: pass, FAIL with the cause, or skip with the reason. The suite is a
// program of its own beside this one, libexec/kvlab/conform of an installation or a bundle, bin/test_contract of a
// build. Returns 0 when nothing failed, else 1. Errc::plugin for a library that does not load, Errc::config without the
// suite.
int conform(const ConformOptions& options);

}  // namespace kvlab
