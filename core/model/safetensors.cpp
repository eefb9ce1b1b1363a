#include "model/safetensors.hpp"

#include <fmt/format.h>

#include <optional>

#include "model/json.hpp"

namespace kvlab {
namespace {

constexpr std::uint64_t max_elements = std::uint64_t{1} << 48;

std::optional<StoredType> stored_type(const std::string& dtype) {
  if (dtype == "F32") return StoredType::f32;
  if (dtype == "F16") return StoredType::f16;
  if (dtype == "BF16") return StoredType::bf16;
  return {};
}

std::vector<std::int64_t> read_shape(const JsonReader& entry, std::uint64_t& elements) {
  std::vector<std::int64_t> shape;
  elements = 1;
  const Json& dims = entry.array("shape");
  if (dims.size() > 8) entry.refuse("shape", fmt::format("{} dimensions", dims.size()), "at most 8");
  for (const Json& dim : dims) {
    if (!dim.is_number_unsigned()) entry.refuse("shape", dim.dump(), "sizes");
    const auto size = dim.get<std::uint64_t>();
    if (size < 1 || size > max_elements / elements)
      entry.refuse("shape", std::to_string(size), "a tensor of 1 to 2^48 elements");
    elements *= size;
    shape.push_back(static_cast<std::int64_t>(size));
  }
  if (shape.empty()) shape.push_back(1);
  return shape;
}

using Range = std::pair<std::uint64_t, std::uint64_t>;  // of bytes, from the first byte of data

Range read_range(const JsonReader& entry, std::uint64_t room) {
  const Json& offsets = entry.array("data_offsets");
  if (offsets.size() != 2 || !offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned())
    entry.refuse("data_offsets", offsets.dump(), "[begin, end]");
  const Range range{offsets[0].get<std::uint64_t>(), offsets[1].get<std::uint64_t>()};
  if (range.first > range.second || range.second > room)
    entry.refuse("data_offsets", fmt::format("[{}, {}] of {}", range.first, range.second, room),
                 "bytes inside the file");
  return range;
}

// The format forbids holes and overlaps, which damaged and crafted files have.
void check_tiling(const std::multimap<Range, std::string>& ranges, std::uint64_t room, const std::string& where) {
  std::uint64_t end = 0;
  std::string before = "the header";
  for (const auto& [range, name] : ranges) {
    if (range.first != end)
      throw Error(Errc::model,
                  fmt::format("got data from byte {}, wanted it from byte {}, where {} ends", range.first, end, before),
                  where + ": " + name);
    end = range.second;
    before = "'" + name + "'";
  }
  if (end != room)
    throw Error(Errc::model, fmt::format("got {} bytes after the last tensor, wanted the end of the file", room - end),
                where);
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path), where_(path.string()) {
  ByteCursor cursor(file_.bytes(), where_);
  const auto length = cursor.take<std::uint64_t>("the header's length");
  const auto* begin = reinterpret_cast<const char*>(cursor.skip(length, "the header"));
  const std::byte* data = file_.bytes().data() + cursor.at();
  const std::uint64_t room = cursor.left();
  const Json header = parse_json({begin, static_cast<std::size_t>(length)}, where_, Errc::model);
  if (!header.is_object())
    throw Error(Errc::model, fmt::format("got {}, wanted an object", header.type_name()), where_);
  std::multimap<Range, std::string> ranges;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    const JsonReader entry(value, where_ + ": " + name, Errc::model);
    const std::string dtype = entry.text("dtype");
    const auto type = stored_type(dtype);
    if (!type && (name.ends_with(".weight") || name.ends_with(".bias")))
      throw Error(Errc::unsupported, fmt::format("got dtype {}, wanted F32, F16 or BF16", dtype), entry.where("dtype"));
    const Range range = read_range(entry, room);
    ranges.emplace(range, name);
    if (!type) continue;
    StoredTensor tensor;
    tensor.type = *type;
    std::uint64_t elements = 0;
    tensor.shape = read_shape(entry, elements);
    const std::uint64_t bytes = elements * static_cast<std::uint64_t>(block_of(*type).bytes);
    if (range.second - range.first != bytes)
      entry.refuse("data_offsets", fmt::format("[{}, {}]", range.first, range.second), fmt::format("{} bytes", bytes));
    tensor.data = data + range.first;
    tensors_.emplace(name, std::move(tensor));
  }
  check_tiling(ranges, room, where_);
}

}  // namespace kvlab
