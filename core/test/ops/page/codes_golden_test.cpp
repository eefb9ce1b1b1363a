// Codes against an independent numpy version (tools/goldens/codecs.py), bit by bit.
#include <catch2/catch.hpp>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/half.hpp"
#include "ops/page/codes.hpp"
#include "ops/page/paged.hpp"
#include "support/golden.hpp"

using namespace kvlab;

namespace {

template <class T>
std::vector<T> from_hex(const std::string& text) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
  std::vector<T> out(bytes.size() / sizeof(T));
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

struct Golden {
  nlohmann::json json = nlohmann::json::parse(std::ifstream(test::golden("codecs.json")));
  int tokens = json.at("tokens"), channels = json.at("channels");
  std::vector<float> x = from_hex<float>(json.at("x"));
  std::vector<std::byte> exact;  // a page with these numbers as K and as V
  PageLayout layout;

  Golden() {
    layout = ops::make_layout(DType::f32, {}, tokens, channels, 0);
    exact.resize(static_cast<std::size_t>(layout.bytes));
    for (int t = 0; t < tokens; ++t) ops::write_token(exact.data(), layout, t, row(t), row(t), t);
  }
  const float* row(int t) const { return x.data() + static_cast<std::ptrdiff_t>(t) * channels; }
};

struct Expected {
  std::vector<std::uint8_t> codes;
  std::vector<std::uint16_t> scale, zero;
};

void compare(const std::vector<std::byte>& frame, const PageLayout& l, const Expected& e) {
  for (const bool key : {true, false})
    for (int t = 0; t < l.page_size; ++t)
      for (int d = 0; d < l.head_dim; ++d) {
        INFO((key ? "K of token " : "V of token ") << t << ", channel " << d);
        const auto i = static_cast<std::size_t>(t * l.head_dim + d);
        std::uint16_t meta[2];
        std::memcpy(meta, frame.data() + ops::meta_offset(l, key, t, d), 4);
        REQUIRE(ops::code_at(ops::side_of(l, key), frame.data() + ops::row_offset(l, key, t), d) == e.codes[i]);
        REQUIRE(meta[0] == e.scale[i]);
        if (!e.zero.empty()) REQUIRE(meta[1] == e.zero[i]);
      }
}

CodecSide side(const nlohmann::json& of) {
  CodecSide s;
  s.bits = of.at("bits");
  s.kind = of.at("kind") == "e4m3" ? CodeKind::e4m3 : CodeKind::integer;
  s.axis = of.at("axis") == "channel" ? CodeAxis::channel : CodeAxis::token;
  s.group = of.at("group");
  return s;
}

}  // namespace

TEST_CASE("codes are those of numpy, bit by bit") {
  const Golden golden;
  for (const auto& of : golden.json.at("sides")) {
    INFO("codes " << of.at("name"));
    const CodecSide s = side(of);
    const PageLayout l = ops::make_layout(DType::f32, {s, s}, golden.tokens, golden.channels, 0);
    const Expected expected{from_hex<std::uint8_t>(of.at("codes")), from_hex<std::uint16_t>(of.at("scale")),
                            from_hex<std::uint16_t>(of.at("zero"))};
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
    compare(lowered, low, {from_hex<std::uint8_t>(of.at("codes")), from_hex<std::uint16_t>(of.at("scale")), {}});
  }
}
