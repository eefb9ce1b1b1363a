// The note of a plugin library: an ELF note (owner "kvlab", type 1) with the registrations of KVLAB_PLUGIN. kvlab reads
// it without running the library. The compiler writes its bytes, and the library's roles at run time are read from the
// same bytes. Numbers are little-endian:
//   note       u32 abi, u32 size of kvlab_plugin, text build, then u8 1 and the roles, or u8 0 if a registration is not
//              a constant expression, because the compiler does not know the roles then
//   roles      u32 count, and each: u32 role, text name, text version, text help, u32 parameters, the parameters
//   parameter  text name, u8 kind, u8 component, value (boolean: u8, integer: i64, real: f64, else text), f64 low,
//              f64 high, u32 choices, the choices' texts, text help
//   text       u32 bytes, the bytes
// The first three fields never move. The rest changes with KVLAB_ABI only.
#pragma once
#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvlab/abi.hpp"
#include "kvlab/error.hpp"
#include "kvlab/params.hpp"

namespace kvlab {

// One role of a note.
struct RoleDeclaration {
  Role role = Role::policy;
  std::string name, version, help;
  std::vector<ParamSpec> params;
};

using NoteBytes = std::vector<char>;  // GCC 12 does not move std::string in constant expressions

namespace detail {

// `out` takes bytes through push_back.
template <class Out>
constexpr void put_number(Out& out, std::uint64_t x, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(static_cast<unsigned char>(x >> (8 * i))));
}
template <class Out>
constexpr void put_text(Out& out, std::string_view text) {
  put_number(out, text.size(), 4);
  for (const char c : text) out.push_back(c);
}
template <class Out>
constexpr void put_bytes(Out& out, const NoteBytes& more) {
  for (const char c : more) out.push_back(c);
}

// T: bool, an enum with Choices<T>, an integer, a real, or text.
template <class T>
constexpr void put_param(NoteBytes& out, std::string_view name, const T& value, double low, double high,
                         std::string_view help, bool component) {
  constexpr ParamKind kind = std::is_same_v<T, bool>       ? ParamKind::boolean
                             : std::is_enum_v<T>           ? ParamKind::choice
                             : std::is_integral_v<T>       ? ParamKind::integer
                             : std::is_floating_point_v<T> ? ParamKind::real
                                                           : ParamKind::text;
  put_text(out, name);
  put_number(out, static_cast<std::uint64_t>(kind), 1);
  put_number(out, component, 1);
  NoteBytes choices;
  std::uint64_t count = 0;
  if constexpr (kind == ParamKind::boolean) {
    put_number(out, value, 1);
  } else if constexpr (kind == ParamKind::integer) {
    put_number(out, static_cast<std::uint64_t>(static_cast<std::int64_t>(value)), 8);
  } else if constexpr (kind == ParamKind::real) {
    put_number(out, std::bit_cast<std::uint64_t>(static_cast<double>(value)), 8);
  } else if constexpr (kind == ParamKind::text) {
    put_text(out, value);
  } else {
    std::string_view word;
    for (const auto& [v, text] : Choices<T>::all) {
      if (v == value) word = text;
      put_text(choices, text);
      ++count;
    }
    put_text(out, word);
  }
  put_number(out, std::bit_cast<std::uint64_t>(low), 8);
  put_number(out, std::bit_cast<std::uint64_t>(high), 8);
  put_number(out, count, 4);
  put_bytes(out, choices);
  put_text(out, help);
}

}  // namespace detail

// Reads a note. Throws Errc::plugin for bytes that the functions above cannot have written.
class NoteReader {
 public:
  explicit NoteReader(std::string_view bytes) : rest_(bytes) {}

  std::uint32_t u32() { return static_cast<std::uint32_t>(number(4)); }
  bool flag() { return number(1) != 0; }
  std::string text() { return std::string(take(u32())); }
  RoleDeclaration role() {
    RoleDeclaration d;
    const std::uint32_t role = u32();
    if (role >= role_count) refuse("a role that is none");
    d.role = static_cast<Role>(role);
    d.name = text(), d.version = text(), d.help = text();
    for (std::uint32_t n = u32(); n > 0; --n) d.params.push_back(param());
    return d;
  }
  ParamSpec param() {
    ParamSpec p;
    p.name = text();
    const std::uint64_t kind = number(1);
    if (kind > static_cast<std::uint64_t>(ParamKind::choice)) refuse("a parameter of no kind");
    p.kind = static_cast<ParamKind>(kind);
    p.component = flag();
    switch (p.kind) {
      case ParamKind::boolean: p.value = flag(); break;
      case ParamKind::integer: p.value = static_cast<std::int64_t>(number(8)); break;
      case ParamKind::real: p.value = real(); break;
      default: p.value = text();
    }
    p.low = real(), p.high = real();
    for (std::uint32_t n = u32(); n > 0; --n) p.choices.push_back(text());
    p.help = text();
    return p;
  }

 private:
  [[noreturn]] static void refuse(const char* what) {
    throw Error(Errc::plugin, std::string("got a kvlab note with ") + what + ", wanted that of KVLAB_PLUGIN(...)");
  }
  std::string_view take(std::size_t bytes) {
    if (bytes > rest_.size()) refuse("an entry that is cut short");
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }
  std::uint64_t number(int bytes) {
    std::uint64_t x = 0;
    int at = 0;
    for (const char c : take(static_cast<std::size_t>(bytes)))
      x |= std::uint64_t{static_cast<unsigned char>(c)} << (8 * at++);
    return x;
  }
  double real() { return std::bit_cast<double>(number(8)); }

  std::string_view rest_;
};

// Declares a parameter that belongs to no library.
template <class T>
ParamSpec make_param(std::string_view name, const T& value, double low, double high, std::string_view help) {
  NoteBytes bytes;
  detail::put_param(bytes, name, value, low, high, help, false);
  return NoteReader({bytes.data(), bytes.size()}).param();
}

}  // namespace kvlab
