#include "model/json.hpp"

#include <fmt/format.h>

#include <limits>

namespace kvlab {

Json parse_json(std::string_view text, const std::string& where, Errc code) {
  constexpr int max_depth = 64;
  const auto bounded = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > max_depth)
      throw Error(code, fmt::format("got JSON more than {} levels deep, wanted less", max_depth), where);
    return true;
  };
  try {
    return Json::parse(text, bounded);
  } catch (const Json::exception& e) {
    throw Error(code, fmt::format("got text that is no JSON ({}), wanted a JSON document", e.what()), where);
  }
}

JsonReader::JsonReader(const Json& object, std::string where, Errc code)
    : object_(&object), where_(std::move(where)), code_(code) {
  if (!object.is_object()) throw Error(code_, fmt::format("got {}, wanted an object", object.type_name()), where_);
}

const Json* JsonReader::find(const char* key) const {
  const auto it = object_->find(key);
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

const Json& JsonReader::need(const char* key, const char* wanted) const {
  const Json* value = find(key);
  if (value == nullptr) refuse(key, "no such key", wanted);
  return *value;
}

std::int64_t JsonReader::integer(const char* key, std::optional<std::int64_t> otherwise) const {
  if (otherwise && !has(key)) return *otherwise;
  const Json& value = need(key, "an integer");
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<std::uint64_t>() > most))
    refuse(key, value.type_name(), "an integer");
  return value.get<std::int64_t>();
}

int JsonReader::size(const char* key, std::optional<int> otherwise) const {
  const std::int64_t value = integer(key, otherwise);
  if (value < 0 || value > std::numeric_limits<int>::max()) refuse(key, std::to_string(value), "0 to 2147483647");
  return static_cast<int>(value);
}

double JsonReader::number(const char* key, std::optional<double> otherwise) const {
  if (otherwise && !has(key)) return *otherwise;
  const Json& value = need(key, "a number");
  if (!value.is_number()) refuse(key, value.type_name(), "a number");
  return value.get<double>();
}

bool JsonReader::boolean(const char* key, bool otherwise) const {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) refuse(key, value->type_name(), "true or false");
  return value->get<bool>();
}

std::string JsonReader::text(const char* key, std::optional<std::string> otherwise) const {
  if (otherwise && !has(key)) return *otherwise;
  const Json& value = need(key, "a string");
  if (!value.is_string()) refuse(key, value.type_name(), "a string");
  return value.get<std::string>();
}

JsonReader JsonReader::object(const char* key) const { return {need(key, "an object"), where(key), code_}; }

const Json& JsonReader::array(const char* key) const {
  const Json& value = need(key, "an array");
  if (!value.is_array()) refuse(key, value.type_name(), "an array");
  return value;
}

void JsonReader::refuse(const char* key, const std::string& got, const std::string& wanted) const {
  throw Error(code_, "got " + got + ", wanted " + wanted, where(key));
}

}  // namespace kvlab
