#include "store/codec_name.hpp"

namespace kvlab {
namespace {

std::string side_name(const CodecSide& side, DType dtype) {
  if (!side.bits) return std::to_string(8 * size_of(dtype));
  std::string name = side.kind == CodeKind::e4m3 ? "fp8" : std::to_string(side.bits);
  if (side.kind == CodeKind::whole_zero) name += "z";
  if (side.grouped()) name += side.axis == CodeAxis::channel ? "c" : "t";
  if (side.group) name += std::to_string(side.group);
  return name;
}

}  // namespace

std::string codec_name(const CodecSpec& codec, DType dtype) {
  if (codec.packs) return std::string(name_of(dtype)) + " packed";
  if (!codec.k.bits && !codec.v.bits) return name_of(dtype);
  return "k" + side_name(codec.k, dtype) + "v" + side_name(codec.v, dtype);
}

}  // namespace kvlab
