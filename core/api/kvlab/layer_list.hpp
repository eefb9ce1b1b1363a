// A parameter that names layers.
#pragma once
#include <charconv>
#include <string>
#include <vector>

#include "kvlab/error.hpp"
#include "kvlab/params.hpp"

namespace kvlab {

// The layers of a parameter such as "0,16": ascending numbers from 0 on, each once. White space in front of a number
// does not count. "" = none. Errc::config for any other text.
inline std::vector<int> layer_list(const Params& p, const char* name) {
  const std::string text = p.get<std::string>(name);
  std::vector<int> layers;
  for (const char *at = text.data(), *const end = at + text.size(); at != end;) {
    while (at != end && *at == ' ') ++at;
    int layer = -1;
    const auto read = std::from_chars(at, end, layer);
    const bool last = read.ptr == end;
    if (read.ec != std::errc() || layer <= (layers.empty() ? -1 : layers.back()) ||
        !(last || (*read.ptr == ',' && read.ptr + 1 != end)))
      throw Error(Errc::config, std::string("got ") + name + " '" + text +
                                    "', wanted layers from 0 on in ascending order, such as '0,16'");
    layers.push_back(layer);
    at = last ? end : read.ptr + 1;
  }
  return layers;
}

}  // namespace kvlab
