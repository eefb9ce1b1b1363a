#include "model/gguf.hpp"

#include <fmt/format.h>

#include <kvlab/error.hpp>
#include <limits>

namespace kvlab {
namespace {

constexpr std::uint64_t max_elements = std::uint64_t{1} << 48;  // of a tensor: keeps all byte counts far from overflow

std::optional<StoredType> stored_type(std::uint32_t ggml) {
  switch (ggml) {
    case 0: return StoredType::f32;
    case 1: return StoredType::f16;
    case 2: return StoredType::q4_0;
    case 3: return StoredType::q4_1;
    case 6: return StoredType::q5_0;
    case 7: return StoredType::q5_1;
    case 8: return StoredType::q8_0;
    case 12: return StoredType::q4_k;
    case 13: return StoredType::q5_k;
    case 14: return StoredType::q6_k;
    case 30: return StoredType::bf16;
    default: return {};
  }
}

template <class T>
T load(std::span<const std::byte> bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

}  // namespace

GgufFile::GgufFile(const std::filesystem::path& path) : file_(path), where_(path.string()) {
  ByteCursor cursor(file_.bytes(), where_);
  const auto magic = cursor.take<std::uint32_t>("the magic number");
  if (magic != 0x46554747u) refuse("magic", fmt::format("{:#010x}", magic), "'GGUF' (0x46554747)");
  const auto version = cursor.take<std::uint32_t>("the version");
  if (version != 2 && version != 3) refuse("version", fmt::format("GGUF version {}", version), "2 or 3, little-endian");
  const auto tensor_count = cursor.take<std::uint64_t>("the tensor count");
  const auto value_count = cursor.take<std::uint64_t>("the metadata count");
  // The smallest entries: 13 bytes for an empty key with a one-byte value, 32 for a nameless tensor of one dimension.
  if (value_count > cursor.left() / 13)
    refuse("metadata", fmt::format("{} keys", value_count), "no more than fit in the file");
  if (tensor_count > cursor.left() / 32)
    refuse("tensors", fmt::format("{} tensors", tensor_count), "no more than fit in the file");

  for (std::uint64_t i = 0; i < value_count; ++i) {
    std::string key(cursor.take_string("a metadata key"));
    if (has(key)) refuse(key, "the key twice", "it once");
    read_value(cursor, key);
  }
  std::vector<std::uint64_t> offsets;
  std::vector<std::string> order;
  for (std::uint64_t i = 0; i < tensor_count; ++i) read_tensor(cursor, offsets, order);

  place_tensors(offsets, order, cursor.at());
}

// ggml writes tensors one after the other in the header's order, each padded to the alignment. The last one's padding
// may be missing.
void GgufFile::place_tensors(const std::vector<std::uint64_t>& offsets, const std::vector<std::string>& order,
                             std::size_t header_end) {
  const std::int64_t alignment = integer("general.alignment").value_or(32);
  if (alignment < 1 || alignment > (1 << 20)) refuse("general.alignment", std::to_string(alignment), "1 to 1048576");
  const auto align = static_cast<std::uint64_t>(alignment);
  const auto padded = [&](std::uint64_t bytes) { return (bytes + align - 1) / align * align; };
  const std::uint64_t file_size = file_.bytes().size(), data_begin = padded(header_end);
  const std::uint64_t room = file_size > data_begin ? file_size - data_begin : 0;
  std::uint64_t end = 0;  // of the tensor before
  for (std::size_t i = 0; i < order.size(); ++i) {
    StoredTensor& tensor = tensors_.find(order[i])->second;
    const BlockShape block = block_of(tensor.type);
    const std::uint64_t bytes =
        static_cast<std::uint64_t>(tensor.rows() * tensor.columns() / block.elements) * block.bytes;
    if (offsets[i] > room || bytes > room - offsets[i])
      refuse(order[i], fmt::format("{} bytes at offset {} of {}", bytes, offsets[i], room), "data inside the file");
    if (offsets[i] != padded(end))
      refuse(order[i], fmt::format("offset {}", offsets[i]),
             fmt::format("{}, where the tensor before it ends", padded(end)));
    end = offsets[i] + bytes;
    tensor.data = file_.bytes().data() + data_begin + offsets[i];
  }
  if (room > padded(end))
    refuse("tensors", fmt::format("{} bytes after the last tensor", room - padded(end)), "the end of the file");
}

std::size_t GgufFile::size_of(Type type) {
  switch (type) {
    case Type::u8:
    case Type::i8:
    case Type::boolean: return 1;
    case Type::u16:
    case Type::i16: return 2;
    case Type::u32:
    case Type::i32:
    case Type::f32: return 4;
    case Type::u64:
    case Type::i64:
    case Type::f64: return 8;
    case Type::string:
    case Type::array: break;
  }
  return 0;
}

void GgufFile::read_value(ByteCursor& cursor, const std::string& key) {
  const auto read_type = [&] {
    const auto type = cursor.take<std::uint32_t>("a value type");
    if (type > static_cast<std::uint32_t>(Type::f64)) refuse(key, fmt::format("value type {}", type), "0 to 12");
    return static_cast<Type>(type);
  };
  Value value{read_type()};
  if (value.type == Type::array) {
    value.array = true;
    value.type = read_type();
    if (value.type == Type::array) refuse(key, "an array of arrays", "an array of plain values");
    value.count = cursor.take<std::uint64_t>("an array length");
  }
  value.begin = cursor.at();
  if (value.type == Type::string) {
    for (std::uint64_t i = 0; i < value.count; ++i) cursor.take_string(key.c_str());  // each takes 8 bytes at least
  } else {
    const std::size_t size = size_of(value.type);
    if (value.count > cursor.left() / size)
      refuse(key, fmt::format("{} elements", value.count), "no more than fit in the file");
    cursor.skip(value.count * size, key.c_str());
  }
  values_.emplace(key, value);
}

void GgufFile::read_tensor(ByteCursor& cursor, std::vector<std::uint64_t>& offsets, std::vector<std::string>& order) {
  std::string name(cursor.take_string("a tensor name"));
  const auto dimensions = cursor.take<std::uint32_t>("a tensor's dimensions");
  if (dimensions < 1 || dimensions > 4) refuse(name, fmt::format("{} dimensions", dimensions), "1 to 4");
  StoredTensor tensor;
  std::uint64_t elements = 1;
  for (std::uint32_t d = 0; d < dimensions; ++d) {
    const auto size = cursor.take<std::uint64_t>("a dimension");
    if (size < 1 || size > max_elements / elements)
      refuse(name, fmt::format("dimension {}", size), "a tensor of 1 to 2^48 elements");
    elements *= size;
    tensor.shape.insert(tensor.shape.begin(), static_cast<std::int64_t>(size));
  }
  const auto ggml_type = cursor.take<std::uint32_t>("a tensor type");
  const auto type = stored_type(ggml_type);
  if (!type)
    refuse(name, fmt::format("GGML type {}", ggml_type),
           "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K");
  tensor.type = *type;
  if (tensor.columns() % block_of(*type).elements != 0)
    refuse(name, fmt::format("rows of {}", tensor.columns()),
           fmt::format("a multiple of {} for {}", block_of(*type).elements, name_of(*type)));
  offsets.push_back(cursor.take<std::uint64_t>("a tensor offset"));
  if (!tensors_.emplace(name, std::move(tensor)).second) refuse(name, "the tensor twice", "it once");
  order.push_back(std::move(name));
}

const GgufFile::Value* GgufFile::find(std::string_view key, bool array) const {
  const auto it = values_.find(key);
  if (it == values_.end()) return nullptr;
  if (it->second.array != array) refuse(key, array ? "one value" : "an array", array ? "an array" : "one value");
  return &it->second;
}

std::int64_t GgufFile::integer_at(const Value& value, std::uint64_t index, std::string_view key) const {
  const auto bytes = file_.bytes();
  const std::size_t at = value.begin + index * size_of(value.type);
  switch (value.type) {
    case Type::u8: return load<std::uint8_t>(bytes, at);
    case Type::i8: return load<std::int8_t>(bytes, at);
    case Type::u16: return load<std::uint16_t>(bytes, at);
    case Type::i16: return load<std::int16_t>(bytes, at);
    case Type::u32: return load<std::uint32_t>(bytes, at);
    case Type::i32: return load<std::int32_t>(bytes, at);
    case Type::i64: return load<std::int64_t>(bytes, at);
    case Type::u64: {
      const auto v = load<std::uint64_t>(bytes, at);
      if (v > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        refuse(key, std::to_string(v), "less than 2^63");
      return static_cast<std::int64_t>(v);
    }
    default: refuse(key, fmt::format("value type {}", static_cast<int>(value.type)), "an integer");
  }
}

double GgufFile::number_at(const Value& value, std::uint64_t index, std::string_view key) const {
  const std::size_t at = value.begin + index * size_of(value.type);
  if (value.type == Type::f32) return load<float>(file_.bytes(), at);
  if (value.type == Type::f64) return load<double>(file_.bytes(), at);
  return static_cast<double>(integer_at(value, index, key));
}

std::optional<std::int64_t> GgufFile::integer(std::string_view key) const {
  const Value* value = find(key, false);
  if (value == nullptr) return {};
  return integer_at(*value, 0, key);
}

std::optional<double> GgufFile::number(std::string_view key) const {
  const Value* value = find(key, false);
  if (value == nullptr) return {};
  return number_at(*value, 0, key);
}

std::optional<bool> GgufFile::boolean(std::string_view key) const {
  const Value* value = find(key, false);
  if (value == nullptr) return {};
  if (value->type != Type::boolean) refuse(key, "another type", "a boolean");
  return load<std::uint8_t>(file_.bytes(), value->begin) != 0;
}

std::optional<std::string_view> GgufFile::text(std::string_view key) const {
  const Value* value = find(key, false);
  if (value == nullptr) return {};
  if (value->type != Type::string) refuse(key, "another type", "a string");
  return file_.text().substr(value->begin + 8, load<std::uint64_t>(file_.bytes(), value->begin));
}

std::vector<std::string_view> GgufFile::texts(std::string_view key) const {
  std::vector<std::string_view> out;
  const Value* value = find(key, true);
  if (value == nullptr) return out;
  if (value->type != Type::string) refuse(key, "an array of another type", "an array of strings");
  out.reserve(value->count);
  std::size_t at = value->begin;
  for (std::uint64_t i = 0; i < value->count; ++i) {
    const auto length = load<std::uint64_t>(file_.bytes(), at);
    out.push_back(file_.text().substr(at + 8, length));
    at += 8 + length;
  }
  return out;
}

std::vector<std::int64_t> GgufFile::integers(std::string_view key) const {
  std::vector<std::int64_t> out;
  const Value* value = find(key, true);
  if (value == nullptr) return out;
  if (value->type == Type::string) refuse(key, "an array of strings", "an array of integers");
  out.reserve(value->count);
  for (std::uint64_t i = 0; i < value->count; ++i) out.push_back(integer_at(*value, i, key));
  return out;
}

std::vector<float> GgufFile::floats(std::string_view key) const {
  std::vector<float> out;
  const Value* value = find(key, true);
  if (value == nullptr) return out;
  if (value->type == Type::string) refuse(key, "an array of strings", "an array of numbers");
  out.reserve(value->count);
  for (std::uint64_t i = 0; i < value->count; ++i) out.push_back(static_cast<float>(number_at(*value, i, key)));
  return out;
}

void GgufFile::refuse(std::string_view key, const std::string& got, const std::string& wanted) const {
  throw Error(Errc::model, "got " + got + ", wanted " + wanted, where_ + ": " + std::string(key));
}

}  // namespace kvlab
