// Names of codecs in result files.
#pragma once
#include <kvlab/kv.hpp>

#include <string>

namespace kvlab {

// "bf16" for pages in the run's dtype, and "bf16 packed". Else K and V one after the other: "k8v4", "k16v8",
// "kfp8vfp8". Sides that share scales otherwise than token by token name their groups: "k4c32v4t32" has scales of 32
// tokens for each channel of a key, and of 32 channels for each value. "c" alone shares them over a page.
std::string codec_name(const CodecSpec& codec, DType dtype);

}  // namespace kvlab
