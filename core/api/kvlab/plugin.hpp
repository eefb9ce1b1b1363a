// Registration of a plugin library. Its last line names what it offers:
//   KVLAB_PLUGIN(kvlab::scorer<Knorm>("knorm", "keeps keys with a small L2 norm").param("sink", 4, 0, kvlab::any,
//   "..."))
// Several registrations, separated by commas, may share one library. A class is built from `const kvlab::Params&` or
// from nothing. An exception of its constructor reaches the user as an error message.
#pragma once
#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvlab/abi.hpp"
#include "kvlab/error.hpp"
#include "kvlab/metric.hpp"
#include "kvlab/note.hpp"
#include "kvlab/ops.hpp"
#include "kvlab/params.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/profiler.hpp"
#include "kvlab/roles.hpp"
#include "kvlab/stages.hpp"
#include "kvlab/task.hpp"

#define KVLAB_EXPORT __attribute__((visibility("default")))

namespace kvlab {

// The Role of an interface class.
template <class Interface>
inline constexpr Role role_of = [] {
  if constexpr (std::is_same_v<Interface, Policy>) return Role::policy;
  if constexpr (std::is_same_v<Interface, Scorer>) return Role::scorer;
  if constexpr (std::is_same_v<Interface, Selector>) return Role::selector;
  if constexpr (std::is_same_v<Interface, Budget>) return Role::budget;
  if constexpr (std::is_same_v<Interface, Codec>) return Role::codec;
  if constexpr (std::is_same_v<Interface, Profiler>) return Role::profiler;
  if constexpr (std::is_same_v<Interface, Task>) return Role::task;
  if constexpr (std::is_same_v<Interface, AnswerMetric>) return Role::metric;
  if constexpr (std::is_same_v<Interface, Pruner>) return Role::pruner;
  if constexpr (std::is_same_v<Interface, Rescorer>) return Role::rescorer;
}();

namespace detail {

inline void copy_text(char* to, std::size_t cap, const char* from) noexcept {
  if (cap == 0) return;
  const std::size_t n = std::min(cap - 1, std::strlen(from));
  std::memcpy(to, from, n);
  to[n] = '\0';
}

// Returns body(), or null with the exception's text in err.
template <class Body>
auto guarded(char* err, std::size_t cap, Body body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (const std::exception& e) {
    copy_text(err, cap, e.what());
  } catch (...) {
    copy_text(err, cap, "got an exception that is no std::exception");
  }
  return nullptr;
}

template <class Interface, class T>
void* create(const Params* params, char* err, std::size_t cap) noexcept {
  return guarded(err, cap, [&]() -> void* {
    if constexpr (std::is_constructible_v<T, const Params&>)
      return static_cast<Interface*>(new T(*params));
    else
      return static_cast<Interface*>(new T());
  });
}

template <class Interface>
void destroy(void* object) noexcept {
  delete static_cast<Interface*>(object);
}

}  // namespace detail

// One registration under construction. It keeps the bytes of its note, so it copies every text.
class Registration {
 public:
  // A number with its inclusive range; kvlab::any = no limit.
  template <class T>
  constexpr Registration& param(std::string_view name, const T& value, double low, double high, std::string_view help) {
    static_assert(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>, "only numbers have a range");
    return add(name, value, low, high, help);
  }
  // bool, text, an enum with kvlab::Choices, or a number without limits.
  template <class T>
  constexpr Registration& param(std::string_view name, const T& value, std::string_view help) {
    return add(name, value, -any, any, help);
  }
  // A part of the method that `ablate` may switch off: a bool parameter that is on by default.
  constexpr Registration& component(std::string_view name, std::string_view help) {
    return add(name, true, -any, any, help, true);
  }
  // The version of the method's implementation. The default is the kvlab version that the library was built with.
  constexpr Registration& version(std::string_view text) {
    version_.clear();
    detail::put_text(version_, text);
    return *this;
  }

  template <class Interface, class T>
  static constexpr Registration of(std::string_view name, std::string_view help) {
    static_assert(std::is_base_of_v<Interface, T>, "the class must derive (publicly) from the role's class");
    static_assert(std::is_constructible_v<T, const Params&> || std::is_default_constructible_v<T>,
                  "the class must be constructible from const kvlab::Params& or from nothing");
    Registration r;
    r.role_ = role_of<Interface>;
    detail::put_text(r.name_, name);
    detail::put_text(r.version_, KVLAB_VERSION);
    detail::put_text(r.help_, help);
    r.create_ = &detail::create<Interface, T>;
    r.destroy_ = &detail::destroy<Interface>;
    return r;
  }

  template <class Out>
  constexpr void put(Out& out) const {
    detail::put_number(out, static_cast<std::uint64_t>(role_), 4);
    for (const NoteBytes* text : {&name_, &version_, &help_}) detail::put_bytes(out, *text);
    detail::put_number(out, param_count_, 4);
    detail::put_bytes(out, params_);
  }

  RoleDeclaration declaration() const {
    NoteBytes bytes;
    put(bytes);
    return NoteReader({bytes.data(), bytes.size()}).role();
  }

  // The registration as the ABI shows it, with pointers into `declared`, the result of declaration().
  kvlab_role view(const RoleDeclaration& declared) const {
    return {declared.name.c_str(),
            declared.role,
            declared.version.c_str(),
            declared.help.c_str(),
            declared.params.data(),
            declared.params.size(),
            create_,
            destroy_};
  }

 private:
  template <class T>
  constexpr Registration& add(std::string_view name, const T& value, double low, double high, std::string_view help,
                              bool component = false) {
    detail::put_param(params_, name, value, low, high, help, component);
    ++param_count_;
    return *this;
  }

  Role role_ = Role::policy;
  NoteBytes name_, version_, help_, params_;  // as in the note
  std::uint32_t param_count_ = 0;
  void* (*create_)(const Params*, char*, std::size_t) = nullptr;
  void (*destroy_)(void*) = nullptr;
};

template <class T>
constexpr Registration policy(std::string_view name, std::string_view help) {
  return Registration::of<Policy, T>(name, help);
}
template <class T>
constexpr Registration scorer(std::string_view name, std::string_view help) {
  return Registration::of<Scorer, T>(name, help);
}
template <class T>
constexpr Registration selector(std::string_view name, std::string_view help) {
  return Registration::of<Selector, T>(name, help);
}
template <class T>
constexpr Registration budget(std::string_view name, std::string_view help) {
  return Registration::of<Budget, T>(name, help);
}
template <class T>
constexpr Registration codec(std::string_view name, std::string_view help) {
  return Registration::of<Codec, T>(name, help);
}
template <class T>
constexpr Registration profiler(std::string_view name, std::string_view help) {
  return Registration::of<Profiler, T>(name, help);
}
template <class T>
constexpr Registration task(std::string_view name, std::string_view help) {
  return Registration::of<Task, T>(name, help);
}
template <class T>
constexpr Registration metric(std::string_view name, std::string_view help) {
  return Registration::of<AnswerMetric, T>(name, help);
}
template <class T>
constexpr Registration pruner(std::string_view name, std::string_view help) {
  return Registration::of<Pruner, T>(name, help);
}
template <class T>
constexpr Registration rescorer(std::string_view name, std::string_view help) {
  return Registration::of<Rescorer, T>(name, help);
}

namespace detail {

struct Published {
  explicit Published(const std::vector<Registration>& list) {
    for (const Registration& r : list) declared.push_back(r.declaration());
    for (std::size_t i = 0; i < list.size(); ++i) roles.push_back(list[i].view(declared[i]));
  }
  std::vector<RoleDeclaration> declared;
  std::vector<kvlab_role> roles;
};

// Builds the library's list on the first call. `Make` is a type of its own in each library.
template <class Make>
const kvlab_role* publish(Make make, std::size_t* count, char* err, std::size_t cap) noexcept {
  return guarded(err, cap, [&]() -> const kvlab_role* {
    static const Published published(make());
    *count = published.roles.size();
    return published.roles.data();
  });
}

// An ELF note, filled through push_back.
template <std::size_t size>
struct Note {
  std::uint32_t name_bytes = 6, bytes = 0, type = 1;
  char name[8] = "kvlab";
  char content[size] = {};
  constexpr void push_back(char c) { content[bytes++] = c; }
};

struct NoteSize {
  std::size_t bytes = 0;
  constexpr void push_back(char) { ++bytes; }
};

template <class Out>
constexpr void put_head(Out& out, std::uint32_t abi, std::size_t size, std::string_view build) {
  put_number(out, abi, 4);
  put_number(out, size, 4);
  put_text(out, build);
}

// `Make` returns the registrations.
template <class Make>
struct NoteWithRoles {
  template <class Out>
  constexpr void put(Out& out) const {
    put_head(out, KVLAB_ABI, sizeof(kvlab_plugin), KVLAB_BUILD);
    put_number(out, 1, 1);
    const std::vector<Registration> list = Make{}();
    put_number(out, list.size(), 4);
    for (const Registration& r : list) r.put(out);
  }
};

struct NoteWithoutRoles {
  template <class Out>
  constexpr void put(Out& out) const {
    put_head(out, KVLAB_ABI, sizeof(kvlab_plugin), KVLAB_BUILD);
    put_number(out, 0, 1);
  }
};

template <class Content>
constexpr std::size_t note_size() {
  NoteSize size;
  Content{}.put(size);
  return size.bytes;
}

template <class Content>
constexpr auto note_of() {
  Note<note_size<Content>()> note;
  Content{}.put(note);
  return note;
}

// The note has no roles if `Make` is not a constant expression.
template <class Make>
constexpr auto note_of_registrations(Make) {
  if constexpr (requires { typename std::integral_constant<std::size_t, note_size<NoteWithRoles<Make>>()>; })
    return note_of<NoteWithRoles<Make>>();
  else
    return note_of<NoteWithoutRoles>();
}

}  // namespace detail
}  // namespace kvlab

// Without alignas(4), the compiler gives larger objects an alignment that ELF notes must not have.
#define KVLAB_NOTE_ [[gnu::used, gnu::section(".note.kvlab")]] alignas(4) constexpr auto kvlab_plugin_note

#define KVLAB_PLUGIN(...)                                                                                             \
  namespace {                                                                                                         \
  constexpr auto kvlab_plugin_registrations = [] { return std::vector<kvlab::Registration>{__VA_ARGS__}; };           \
  KVLAB_NOTE_ = kvlab::detail::note_of_registrations(kvlab_plugin_registrations);                                     \
  const kvlab_role* kvlab_plugin_roles(std::size_t* count, char* err, std::size_t cap) {                              \
    return kvlab::detail::publish(kvlab_plugin_registrations, count, err, cap);                                       \
  }                                                                                                                   \
  constexpr kvlab_plugin kvlab_plugin_description{KVLAB_ABI, sizeof(kvlab_plugin), KVLAB_BUILD, &kvlab_plugin_roles}; \
  }                                                                                                                   \
  extern "C" KVLAB_EXPORT const kvlab_plugin* kvlab_plugin_entry() { return &kvlab_plugin_description; }
