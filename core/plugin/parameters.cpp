#include "plugin/parameters.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/text.hpp"

namespace kvlab {
namespace {

std::string wanted(const ParamSpec& spec) {
  if (spec.kind == ParamKind::choice) return "one of " + range_text(spec);
  const std::string range = range_text(spec);
  std::string text;
  switch (spec.kind) {
    case ParamKind::boolean: return "true or false";
    case ParamKind::integer: text = "an integer"; break;
    case ParamKind::real: text = "a number"; break;
    default: return "text";
  }
  if (range.empty()) return text;
  return text + (range.find(" to ") != std::string::npos ? " from " : " of ") + range;
}

// Plugins keep their integers as int, so an integer that is declared without an upper limit has that of int.
double highest(const ParamSpec& spec) {
  return spec.kind == ParamKind::integer && spec.high == any ? std::numeric_limits<int>::max() : spec.high;
}

bool fits(const ParamSpec& spec, const ParamValue& value) {
  switch (spec.kind) {
    case ParamKind::boolean: return std::holds_alternative<bool>(value);
    case ParamKind::text: return std::holds_alternative<std::string>(value);
    case ParamKind::choice: {
      const auto* word = std::get_if<std::string>(&value);
      return word && std::find(spec.choices.begin(), spec.choices.end(), *word) != spec.choices.end();
    }
    case ParamKind::integer: {
      const auto* i = std::get_if<std::int64_t>(&value);
      return i && static_cast<double>(*i) >= spec.low && static_cast<double>(*i) <= highest(spec);
    }
    case ParamKind::real: {
      double x;
      if (const auto* i = std::get_if<std::int64_t>(&value))
        x = static_cast<double>(*i);
      else if (const auto* d = std::get_if<double>(&value))
        x = *d;
      else
        return false;
      return std::isfinite(x) && x >= spec.low && x <= spec.high;
    }
  }
  return false;
}

}  // namespace

const char* name_of(ParamKind kind) {
  switch (kind) {
    case ParamKind::boolean: return "boolean";
    case ParamKind::integer: return "integer";
    case ParamKind::real: return "real";
    case ParamKind::text: return "text";
    case ParamKind::choice: return "choice";
  }
  return "?";
}

std::string to_text(const ParamValue& value) {
  if (const auto* b = std::get_if<bool>(&value)) return *b ? "true" : "false";
  if (const auto* i = std::get_if<std::int64_t>(&value)) return std::to_string(*i);
  if (const auto* d = std::get_if<double>(&value)) return fmt::format("{}", *d);
  const std::string& text = std::get<std::string>(value);
  return text.empty() ? "\"\"" : text;
}

std::string range_text(const ParamSpec& spec) {
  if (spec.kind == ParamKind::choice) return join(spec.choices, " | ");
  if (spec.kind != ParamKind::integer && spec.kind != ParamKind::real) return "";
  const auto number = [](double x) { return fmt::format("{:.15g}", x); };
  if (spec.low == -any && spec.high == any) return "";
  if (spec.high == any) return "at least " + number(spec.low);
  if (spec.low == -any) return "at most " + number(spec.high);
  return number(spec.low) + " to " + number(spec.high);
}

std::optional<std::string> check(const ParamSpec& spec, const ParamValue& value) {
  if (fits(spec, value)) return std::nullopt;
  const auto* word = std::get_if<std::string>(&value);
  const auto* integer = std::get_if<std::int64_t>(&value);
  if (integer && spec.kind == ParamKind::integer && static_cast<double>(*integer) > highest(spec) && spec.high == any)
    return fmt::format("got {}, wanted at most {:.0f}", *integer, highest(spec));
  std::string message = "got " + (word ? "'" + *word + "'" : to_text(value)) + ", wanted " + wanted(spec);
  if (word && spec.kind == ParamKind::choice) message += did_you_mean(*word, spec.choices);
  return message;
}

const ParamSpec* find_param(const PluginInfo& plugin, std::string_view name) {
  for (const ParamSpec& spec : plugin.params)
    if (spec.name == name) return &spec;
  return nullptr;
}

std::string unknown_parameter(const PluginInfo& plugin, const std::string& name) {
  if (plugin.params.empty()) return "got parameter '" + name + "', wanted none: " + plugin.name + " has no parameters";
  std::vector<std::string> known;
  for (const ParamSpec& spec : plugin.params) known.push_back(spec.name);
  return "got parameter '" + name + "', wanted one of " + plugin.name + "'s: " + join(known) +
         did_you_mean(name, known);
}

Params resolve(const PluginInfo& plugin, const std::map<std::string, ParamValue>& given) {
  std::map<std::string, ParamValue, std::less<>> values;
  for (const ParamSpec& spec : plugin.params) values[spec.name] = spec.value;
  for (const auto& [name, value] : given) {
    const ParamSpec* spec = find_param(plugin, name);
    if (!spec) throw Error(Errc::config, unknown_parameter(plugin, name), plugin.name + "." + name);
    if (const auto wrong = check(*spec, value)) throw Error(Errc::config, *wrong, plugin.name + "." + name);
    const auto* integer = std::get_if<std::int64_t>(&value);
    if (spec->kind == ParamKind::real && integer)
      values[name] = static_cast<double>(*integer);
    else
      values[name] = value;
  }
  return Params(std::move(values));
}

}  // namespace kvlab
