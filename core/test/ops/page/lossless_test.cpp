#include "ops/page/lossless.hpp"

#include <catch2/catch.hpp>
#include <cstring>
#include <kvlab/error.hpp>
#include <vector>

#include "base/half.hpp"
#include "ops/page/paged.hpp"

using namespace kvlab;

namespace {

struct OnePage {
  PageLayout layout = ops::make_layout(DType::bf16, {}, 16, 16, 0);
  std::vector<std::byte> raw = std::vector<std::byte>(static_cast<std::size_t>(layout.bytes)), packed = raw, back = raw;
  std::int32_t frame = 0, bytes[2] = {};

  ops::LosslessPages from(const std::vector<std::byte>& source, std::vector<std::byte>& target) {
    return {layout, 1, source.data(), &frame, target.data(), &frame, bytes};
  }
  void fill(std::int64_t at, const std::vector<float>& x) {
    for (std::size_t i = 0; i < 256; ++i) {
      const bf16 number(x[i % x.size()]);
      std::memcpy(raw.data() + at + static_cast<std::int64_t>(2 * i), &number.bits, 2);
    }
  }
};

}  // namespace

// Exponents as stored: 1 has 127, 2 has 128, 64 has 133, and 128 has 134.
TEST_CASE("lossless: a side by hand") {
  OnePage page;
  page.fill(page.layout.k, {1, -2, 64, 1.5f, 1, 1, 1, 1});
  page.fill(page.layout.v, {1, 128, 64, 0, 1, 1, 1, 1});
  ops::lossless_pack(page.from(page.raw, page.packed), Stream::cpu());
  // 16 + 256 + 96 without exceptions. The values have 64 of them: 0, and 128 or 1.
  CHECK(page.bytes[0] == 368);
  CHECK(page.bytes[1] == 16 + 256 + 96 + 64);
  const auto byte = [&](std::int64_t at) { return static_cast<int>(page.packed[static_cast<std::size_t>(at)]); };
  CHECK(byte(page.layout.k) == 127);                           // the base
  CHECK(byte(page.layout.k + 4) == 0);                         // exceptions
  CHECK(byte(page.layout.k + 16) == 0);                        // 1
  CHECK(byte(page.layout.k + 17) == 128);                      // -2
  CHECK(byte(page.layout.k + 19) == 64);                       // 1.5
  CHECK(byte(page.layout.k + 16 + 256) == (1 << 2 | 2 << 4));  // distances 0, 1, 6, 0
  CHECK(byte(page.layout.k + 16 + 256 + 64) == 1 << 2);        // the high bit of 6
  CHECK(byte(page.layout.v) == 127);
  CHECK(byte(page.layout.v + 4) == 64);
  CHECK(byte(page.layout.v + 16 + 256 + 96) == 134);
  CHECK(byte(page.layout.v + 16 + 256 + 96 + 1) == 0);
  ops::lossless_unpack(page.from(page.packed, page.back), Stream::cpu());
  CHECK(page.back == page.raw);
}

TEST_CASE("lossless: layouts that are refused") {
  OnePage page;
  const auto refuses = [&](const PageLayout& layout) {
    ops::LosslessPages a = page.from(page.raw, page.packed);
    a.layout = layout;
    CHECK_THROWS_AS(ops::lossless_pack(a, Stream::cpu()), Error);
    CHECK_THROWS_AS(ops::lossless_unpack(a, Stream::cpu()), Error);
  };
  refuses(ops::make_layout(DType::f16, {}, 16, 16, 0));
  refuses(ops::make_layout(DType::bf16, {{8}, {}}, 16, 16, 0));
  refuses(ops::make_layout(DType::bf16, {}, 16, 24, 0));
}
