// What a test says that cannot run here.
#pragma once
#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <kvlab/confined.hpp>
#include <kvlab/error.hpp>
#include <string>

namespace kvlab::test {

// Prints the case's name and the reason, and adds them to the file that KVLAB_SKIPPED names: ctest shows no output of a
// program that passes.
inline void say_skipped(const std::string& reason) {
  const std::string text = "skipped: " + Catch::getResultCapture().getCurrentTestName() + ": " + reason;
  WARN(text);
  if (const char* file = std::getenv("KVLAB_SKIPPED")) std::ofstream(file, std::ios::app) << text + "\n";
}

// Whether this machine confines programs. Where it does not, the case is skipped.
inline bool confines() {
  try {
    run_confined({.words = {"true"}});
    return true;
  } catch (const Error& error) {
    if (error.code() != Errc::unsupported) throw;
    say_skipped(error.what());
    return false;
  }
}

}  // namespace kvlab::test
