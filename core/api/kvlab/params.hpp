// Parameters of a plugin: declared once (name, type, default, range or choices, one line of help); defaults,
// validation, `kvlab describe`, the editor schema and `ablate` all come from that declaration.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "kvlab/error.hpp"

namespace kvlab {

// Words of an enumeration as YAML spells them; specialise it next to the enum:
//   template <> struct Choices<Pool> { static constexpr std::pair<Pool, const char*> all[] = {{Pool::max, "max"}, ...};
//   };
template <class E>
struct Choices;

using ParamValue = std::variant<bool, std::int64_t, double, std::string>;  // a choice is its word

enum class ParamKind : std::uint8_t { boolean, integer, real, text, choice };

inline constexpr double any = std::numeric_limits<double>::infinity();  // "no upper limit" in a declaration

struct ParamSpec {
  std::string name;
  ParamKind kind = ParamKind::boolean;
  ParamValue value;                  // the default
  double low = -any, high = any;     // inclusive range of integer and real
  std::vector<std::string> choices;  // words of a choice
  std::string help;                  // one line
  bool component = false;            // `ablate: {plugin: [name]}` may switch it off; a boolean that is on by default
};

// Resolved parameters of one plugin instance: every declared name has a value of its declared kind, already validated.
class Params {
 public:
  Params() = default;
  explicit Params(std::map<std::string, ParamValue, std::less<>> values) : values_(std::move(values)) {}

  // T: bool, an integer, float or double, std::string, or an enum with Choices<T>. Errc::plugin if the name was never
  // declared.
  template <class T>
  T get(std::string_view name) const {
    const auto it = values_.find(name);
    if (it == values_.end())
      throw Error(Errc::plugin, "got a request for parameter '" + std::string(name) + "', wanted a declared one");
    const ParamValue& v = it->second;
    if constexpr (std::is_same_v<T, bool>) {
      return as<bool>(v, name);
    } else if constexpr (std::is_enum_v<T>) {
      const std::string& word = as<std::string>(v, name);
      for (const auto& [value, text] : Choices<T>::all)
        if (word == text) return value;
      throw Error(Errc::plugin, "got '" + word + "', wanted a choice of '" + std::string(name) + "'");
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(as<std::int64_t>(v, name));
    } else if constexpr (std::is_floating_point_v<T>) {
      if (const auto* i = std::get_if<std::int64_t>(&v)) return static_cast<T>(*i);
      return static_cast<T>(as<double>(v, name));
    } else {
      static_assert(std::is_same_v<T, std::string>, "parameters are bool, integers, reals, strings and enums");
      return as<std::string>(v, name);
    }
  }

  bool has(std::string_view name) const { return values_.find(name) != values_.end(); }
  const std::map<std::string, ParamValue, std::less<>>& values() const { return values_; }

 private:
  template <class T>
  static const T& as(const ParamValue& v, std::string_view name) {
    if (const T* p = std::get_if<T>(&v)) return *p;
    throw Error(Errc::plugin,
                "got parameter '" + std::string(name) + "' read as another type than it was declared with");
  }

  std::map<std::string, ParamValue, std::less<>> values_;
};

}  // namespace kvlab
