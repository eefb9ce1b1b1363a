// Codes of K and V by tools/goldens/codecs.py: core/test/golden/codecs.json.
#pragma once
#include <kvlab/kv.hpp>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/golden.hpp"

namespace kvlab::test {

template <class T>
std::vector<T> from_hex(const std::string& text) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
  std::vector<T> out(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

// A side of a page of `tokens` and `channels`.
struct GoldenCodes {
  std::string name;
  CodecSide side;
  int tokens = 0, channels = 0;
  std::vector<std::uint8_t> codes;         // [token, channel]
  std::vector<std::uint16_t> scale, zero;  // of each group, f16; zero may be empty

  std::size_t group(int t, int d) const {
    const bool by_channel = side.axis == CodeAxis::channel;
    const int all = by_channel ? tokens : channels, size = side.group ? side.group : all, along = by_channel ? t : d;
    return static_cast<std::size_t>((by_channel ? d : t) * (all / size) + along / size);
  }
};

struct CodecsGolden {
  nlohmann::json json = nlohmann::json::parse(std::ifstream(golden("codecs.json")));
  int tokens = json.at("tokens"), channels = json.at("channels");
  std::vector<float> x = from_hex<float>(json.at("x"));

  const float* row(int t) const { return x.data() + static_cast<std::ptrdiff_t>(t) * channels; }
  GoldenCodes codes(const nlohmann::json& of, CodecSide side) const {
    return {of.value("name", ""),
            side,
            tokens,
            channels,
            from_hex<std::uint8_t>(of.at("codes")),
            from_hex<std::uint16_t>(of.at("scale")),
            from_hex<std::uint16_t>(of.value("zero", ""))};
  }
  std::vector<GoldenCodes> sides() const {
    std::vector<GoldenCodes> out;
    for (const auto& of : json.at("sides")) {
      CodecSide s;
      s.bits = of.at("bits");
      s.kind = of.at("kind") == "e4m3"         ? CodeKind::e4m3
               : of.at("kind") == "whole_zero" ? CodeKind::whole_zero
                                               : CodeKind::integer;
      s.axis = of.at("axis") == "channel" ? CodeAxis::channel : CodeAxis::token;
      s.group = of.at("group");
      out.push_back(codes(of, s));
    }
    return out;
  }
};

}  // namespace kvlab::test
