// Tests find their files in the checkout and its build, or in the folder of a bundle with --tests (KVLAB_TEST_ROOT).
// The bundle's folder may lie on another machine. Only catch_main.cpp knows the checkout's path, so compiler caches
// serve every checkout.
#pragma once
#include <filesystem>

namespace kvlab::test {

std::filesystem::path source_root();
std::filesystem::path build_root();
std::filesystem::path plugin_folder();

}  // namespace kvlab::test
