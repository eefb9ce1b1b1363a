// Codes against an independent numpy version (tools/goldens/codecs.py), bit by bit.
#include <catch2/catch.hpp>
#include <cstring>

#include "base/half.hpp"
#include "ops/page/codes.hpp"
#include "ops/page/paged.hpp"
#include "support/codecs_golden.hpp"

using namespace kvlab;

namespace {

struct Golden : test::CodecsGolden {
  std::vector<std::byte> exact;  // a page with these numbers as K and as V
  PageLayout layout;

  Golden() {
    layout = ops::make_layout(DType::f32, {}, tokens, channels, 0);
    exact.resize(static_cast<std::size_t>(layout.bytes));
    for (int t = 0; t < tokens; ++t) ops::write_token(exact.data(), layout, t, row(t), row(t), t);
  }
};

void compare(const std::vector<std::byte>& frame, const PageLayout& l, const test::GoldenCodes& e) {
  for (const bool key : {true, false})
    for (int t = 0; t < l.page_size; ++t)
      for (int d = 0; d < l.head_dim; ++d) {
        INFO((key ? "K of token " : "V of token ") << t << ", channel " << d);
        const auto i = static_cast<std::size_t>(t * l.head_dim + d);
        std::uint16_t meta[2];
        std::memcpy(meta, frame.data() + ops::meta_offset(l, key, t, d), 4);
        REQUIRE(ops::code_at(ops::side_of(l, key), frame.data() + ops::row_offset(l, key, t), d) == e.codes[i]);
        const std::size_t group = e.group(t, d);
        REQUIRE(meta[0] == e.scale[group]);
        if (!e.zero.empty()) REQUIRE(meta[1] == e.zero[group]);
      }
}

}  // namespace

TEST_CASE("codes are those of numpy, bit by bit") {
  const Golden golden;
  for (const test::GoldenCodes& expected : golden.sides()) {
    INFO("codes " << expected.name);
    const CodecSide s = expected.side;
    const PageLayout l = ops::make_layout(DType::f32, {s, s}, golden.tokens, golden.channels, 0);
    std::vector<std::byte> frame(static_cast<std::size_t>(l.bytes), std::byte{0xEE});
    ops::copy_page(golden.exact.data(), golden.layout, frame.data(), l);
    compare(frame, l, expected);
    if (s.axis == CodeAxis::channel) continue;  // such pages are made as a whole
    frame.assign(frame.size(), std::byte{0xEE});
    for (int t = 0; t < golden.tokens; ++t) ops::write_token(frame.data(), l, t, golden.row(t), golden.row(t), t);
    compare(frame, l, expected);
  }
}

TEST_CASE("codes of fewer bits are those of numpy, bit by bit") {
  const Golden golden;
  for (const auto& of : golden.json.at("lowered")) {
    const auto from = of.at("from").get<std::uint8_t>(), to = of.at("to").get<std::uint8_t>();
    INFO("from " << int{from} << " bits to " << int{to});
    const PageLayout high = ops::make_layout(DType::f32, {{from}, {from}}, golden.tokens, golden.channels, 0);
    const PageLayout low = ops::make_layout(DType::f32, {{to}, {to}}, golden.tokens, golden.channels, 0);
    std::vector<std::byte> codes(static_cast<std::size_t>(high.bytes)), lowered(static_cast<std::size_t>(low.bytes));
    ops::copy_page(golden.exact.data(), golden.layout, codes.data(), high);
    ops::copy_page(codes.data(), high, lowered.data(), low);
    compare(lowered, low, golden.codes(of, {to}));
  }
}
