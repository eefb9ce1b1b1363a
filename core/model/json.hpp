// Reads foreign JSON: parses it with a bounded depth and names the key in errors.
#pragma once
#include <cstdint>
#include <kvlab/error.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace kvlab {

using Json = nlohmann::json;

// where: the file. Errors have the given code.
Json parse_json(std::string_view text, const std::string& where, Errc code);

// Reads the members of an object; errors name the file and the key. Absent and null are the same: "not there".
class JsonReader {
 public:
  JsonReader(const Json& object, std::string where, Errc code);  // refuses any value but an object

  bool has(const char* key) const { return find(key) != nullptr; }
  const Json* find(const char* key) const;  // null: not there
  std::int64_t integer(const char* key, std::optional<std::int64_t> otherwise = {}) const;
  int size(const char* key, std::optional<int> otherwise = {}) const;  // an integer from 0 to 2^31 - 1
  double number(const char* key, std::optional<double> otherwise = {}) const;
  bool boolean(const char* key, bool otherwise) const;
  std::string text(const char* key, std::optional<std::string> otherwise = {}) const;
  JsonReader object(const char* key) const;
  const Json& array(const char* key) const;

  std::string where(const char* key) const { return where_ + ": " + key; }
  [[noreturn]] void refuse(const char* key, const std::string& got, const std::string& wanted) const;

 private:
  const Json& need(const char* key, const char* wanted) const;

  const Json* object_;
  std::string where_;
  Errc code_;
};

}  // namespace kvlab
