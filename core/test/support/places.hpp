// Where tests find what they read: the checkout and its build, or the folder of a bundle with --tests
// (KVLAB_TEST_ROOT), which may lie on another machine. One source knows the checkout's path (catch_main.cpp), so that
// compiler caches serve every checkout.
#pragma once
#include <filesystem>

namespace kvlab::test {

std::filesystem::path source_root();
std::filesystem::path build_root();
std::filesystem::path plugin_folder();

}  // namespace kvlab::test
