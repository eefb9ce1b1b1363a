// The weights of numbers, from a NumPy file.
#pragma once
#include <kvlab/error.hpp>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace kvquant {

// [layer, 0 = keys | 1 = values, token, channel], or without tokens where all tokens have the same.
struct Weights {
  std::vector<std::int64_t> extent;
  std::vector<float> values;

  bool of_tokens() const { return extent.size() == 4; }
  float at(std::size_t layer, int side, std::size_t token, std::size_t channel) const {
    const auto size = [&](std::size_t i) { return static_cast<std::size_t>(extent[i]); };
    std::size_t row = layer * 2 + static_cast<std::size_t>(side);
    if (of_tokens()) row = row * size(2) + token;
    return values[row * size(extent.size() - 1) + channel];
  }

  // An array of little-endian f32 in the order of C, as numpy.save writes it.
  static Weights read(const std::string& path) {
    const auto refuse = [&](const std::string& what) { throw kvlab::Error(kvlab::Errc::data, what, path); };
    std::ifstream in(path, std::ios::binary);
    if (!in) refuse("got no weights there, wanted a file");
    const std::string all{std::istreambuf_iterator<char>(in), {}};
    constexpr std::size_t fixed = 10;
    const auto byte = [&](std::size_t i) { return static_cast<std::size_t>(static_cast<unsigned char>(all[i])); };
    if (all.size() < fixed || all.compare(0, 6, "\x93NUMPY") != 0 || all[6] != 1)
      refuse("got another kind of file, wanted one of numpy.save, version 1");
    const std::size_t begin = fixed + byte(8) + 256 * byte(9);
    if (all.size() < begin) refuse("got a header that ends early, wanted one of numpy.save");
    const std::string header = all.substr(fixed, begin - fixed);
    if (header.find("'descr': '<f4'") == std::string::npos ||
        header.find("'fortran_order': False") == std::string::npos)
      refuse("got numbers of another type or order, wanted float32 in the order of C");
    Weights w;
    std::int64_t count = 1;
    const std::size_t open = header.find("'shape': ("), close = header.find(')', open);
    if (open == std::string::npos || close == std::string::npos) refuse("got no shape, wanted one in the header");
    std::string digits;
    for (std::size_t i = open + 10; i <= close; ++i) {
      if (header[i] >= '0' && header[i] <= '9' && digits.size() < 9) {
        digits += header[i];
      } else if (!digits.empty()) {
        w.extent.push_back(std::stoll(digits));
        count =
            w.extent.back() > 0 && count <= (std::int64_t{1} << 40) / w.extent.back() ? count * w.extent.back() : -1;
        digits.clear();
        if (count < 0) break;
      }
    }
    if (count < 0 || all.size() - begin != static_cast<std::size_t>(count) * sizeof(float))
      refuse("got " + std::to_string(all.size() - begin) + " bytes of numbers, wanted those of the header's shape");
    w.values.resize(static_cast<std::size_t>(count));
    std::memcpy(w.values.data(), all.data() + begin, w.values.size() * sizeof(float));
    for (const float x : w.values)
      if (!(x >= 0 && x <= 3e38f)) refuse("got the weight " + std::to_string(x) + ", wanted finite ones, at least 0");
    return w;
  }
};

}  // namespace kvquant
