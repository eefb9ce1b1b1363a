// GGUF v2 and v3: metadata keys and tensors. Everything is checked against the file's size when it is opened; after
// that no access can leave the mapping. Each byte of data belongs to one tensor or pads one.
// https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/mapped_file.hpp"
#include "model/stored_tensor.hpp"

namespace kvlab {

class GgufFile {
 public:
  explicit GgufFile(const std::filesystem::path& path);

  // Metadata. Absent keys are empty optionals; a key of another kind than asked for is Errc::model. Views live as long
  // as the file.
  bool has(std::string_view key) const { return values_.find(key) != values_.end(); }
  std::optional<std::int64_t> integer(std::string_view key) const;  // any integer type that fits i64
  std::optional<double> number(std::string_view key) const;         // any integer or float type
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string_view> text(std::string_view key) const;
  std::vector<std::string_view> texts(std::string_view key) const;  // absent = empty
  std::vector<std::int64_t> integers(std::string_view key) const;
  std::vector<float> floats(std::string_view key) const;

  // Shapes are row-major; GGUF files hold the reverse.
  const std::map<std::string, StoredTensor, std::less<>>& tensors() const { return tensors_; }
  const std::string& where() const { return where_; }

 private:
  enum class Type : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
  struct Value {
    Type type;  // of the elements, for an array
    bool array = false;
    std::uint64_t count = 1;  // elements
    std::size_t begin = 0;    // of the first element, in the file
  };

  static std::size_t size_of(Type type);
  void place_tensors(const std::vector<std::uint64_t>& offsets, const std::vector<std::string>& order,
                     std::size_t header_end);
  void read_value(ByteCursor& cursor, const std::string& key);
  void read_tensor(ByteCursor& cursor, std::vector<std::uint64_t>& offsets, std::vector<std::string>& order);
  const Value* find(std::string_view key, bool array) const;
  std::int64_t integer_at(const Value& value, std::uint64_t index, std::string_view key) const;
  double number_at(const Value& value, std::uint64_t index, std::string_view key) const;
  [[noreturn]] void refuse(std::string_view key, const std::string& got, const std::string& wanted) const;

  MappedFile file_;
  std::string where_;
  std::map<std::string, Value, std::less<>> values_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
};

}  // namespace kvlab
