// Reading the golden files of tools/goldens (formats in its README).
#pragma once
#include <kvlab/error.hpp>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "test/support/places.hpp"

namespace kvlab::test {

inline std::filesystem::path golden(const std::string& name) { return source_root() / "core/test/golden" / name; }

class GoldenFile {
 public:
  GoldenFile(const std::filesystem::path& path, const char* magic) {
    std::ifstream in(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(in), {});
    if (bytes_.size() < 8 || bytes_.compare(0, 8, magic) != 0)
      throw Error(Errc::data, std::string("got no ") + magic + " file; tools/goldens/README.md says how to make it",
                  path.string());
    at_ = 8;
  }
  template <class T>
  T get() {
    return many<T>(1)[0];
  }
  template <class T>
  std::vector<T> many(std::size_t n) {
    if (bytes_.size() - at_ < n * sizeof(T)) throw Error(Errc::data, "golden file is cut");
    std::vector<T> out(n);
    std::memcpy(out.data(), bytes_.data() + at_, n * sizeof(T));
    at_ += n * sizeof(T);
    return out;
  }

 private:
  std::string bytes_;
  std::size_t at_ = 0;
};

}  // namespace kvlab::test
