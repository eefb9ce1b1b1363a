// Registration of a plugin library. Its last line names what it offers:
//   KVLAB_PLUGIN(kvlab::scorer<Knorm>("knorm", "keeps keys with a small L2 norm").param("sink", 4, 0, kvlab::any,
//   "..."))
// Several registrations, separated by commas, may share one library. A class is built from `const kvlab::Params&` or
// from nothing; what its constructor throws reaches the user as an error message.
#pragma once
#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvlab/abi.hpp"
#include "kvlab/error.hpp"
#include "kvlab/ops.hpp"
#include "kvlab/params.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/profiler.hpp"
#include "kvlab/roles.hpp"
#include "kvlab/task.hpp"

#define KVLAB_EXPORT __attribute__((visibility("default")))

namespace kvlab {

// The Role that an interface class answers to.
template <class Interface>
inline constexpr Role role_of = [] {
  if constexpr (std::is_same_v<Interface, Policy>) return Role::policy;
  if constexpr (std::is_same_v<Interface, Scorer>) return Role::scorer;
  if constexpr (std::is_same_v<Interface, Selector>) return Role::selector;
  if constexpr (std::is_same_v<Interface, Budget>) return Role::budget;
  if constexpr (std::is_same_v<Interface, Codec>) return Role::codec;
  if constexpr (std::is_same_v<Interface, Profiler>) return Role::profiler;
  if constexpr (std::is_same_v<Interface, Task>) return Role::task;
}();

namespace detail {

inline void copy_text(char* to, std::size_t cap, const char* from) noexcept {
  if (cap == 0) return;
  const std::size_t n = std::min(cap - 1, std::strlen(from));
  std::memcpy(to, from, n);
  to[n] = '\0';
}

// body(), or null and its exception's text in err.
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

// One registration under construction.
class Registration {
 public:
  // A number with its inclusive range; kvlab::any = no limit.
  template <class T>
  Registration& param(std::string name, T value, double low, double high, std::string help) {
    static_assert(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>, "only numbers have a range");
    params_.push_back(make_param(std::move(name), value, low, high, std::move(help)));
    return *this;
  }
  // bool, text, an enum with kvlab::Choices, or a number without limits.
  template <class T>
  Registration& param(std::string name, T value, std::string help) {
    params_.push_back(make_param(std::move(name), value, -any, any, std::move(help)));
    return *this;
  }
  // A part of the method that `ablate` may switch off: a bool parameter that is on by default.
  Registration& component(std::string name, std::string help) {
    params_.push_back(make_param(std::move(name), true, -any, any, std::move(help)));
    params_.back().component = true;
    return *this;
  }
  // Version of the method's implementation; without it, the kvlab version that the library was built with.
  Registration& version(std::string text) {
    version_ = std::move(text);
    return *this;
  }

  // The registration as the ABI shows it: pointers into this object.
  kvlab_role view() const {
    return {name_.c_str(), role_, version_.c_str(), help_.c_str(), params_.data(), params_.size(), create_, destroy_};
  }

  template <class Interface, class T>
  static Registration of(std::string name, std::string help) {
    static_assert(std::is_base_of_v<Interface, T>, "the class must derive (publicly) from the role's class");
    static_assert(std::is_constructible_v<T, const Params&> || std::is_default_constructible_v<T>,
                  "the class must be constructible from const kvlab::Params& or from nothing");
    Registration r;
    r.name_ = std::move(name);
    r.help_ = std::move(help);
    r.role_ = role_of<Interface>;
    r.create_ = &detail::create<Interface, T>;
    r.destroy_ = &detail::destroy<Interface>;
    return r;
  }

 private:
  std::string name_, help_, version_ = KVLAB_VERSION;
  Role role_ = Role::policy;
  std::vector<ParamSpec> params_;
  void* (*create_)(const Params*, char*, std::size_t) = nullptr;
  void (*destroy_)(void*) = nullptr;
};

template <class T>
Registration policy(std::string name, std::string help) {
  return Registration::of<Policy, T>(std::move(name), std::move(help));
}
template <class T>
Registration scorer(std::string name, std::string help) {
  return Registration::of<Scorer, T>(std::move(name), std::move(help));
}
template <class T>
Registration selector(std::string name, std::string help) {
  return Registration::of<Selector, T>(std::move(name), std::move(help));
}
template <class T>
Registration budget(std::string name, std::string help) {
  return Registration::of<Budget, T>(std::move(name), std::move(help));
}
template <class T>
Registration codec(std::string name, std::string help) {
  return Registration::of<Codec, T>(std::move(name), std::move(help));
}
template <class T>
Registration profiler(std::string name, std::string help) {
  return Registration::of<Profiler, T>(std::move(name), std::move(help));
}
template <class T>
Registration task(std::string name, std::string help) {
  return Registration::of<Task, T>(std::move(name), std::move(help));
}

namespace detail {

struct Published {
  explicit Published(std::vector<Registration> list) : registrations(std::move(list)) {
    for (const Registration& r : registrations) roles.push_back(r.view());
  }
  std::vector<Registration> registrations;
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

}  // namespace detail
}  // namespace kvlab

#define KVLAB_PLUGIN(...)                                                                                             \
  namespace {                                                                                                         \
  const kvlab_role* kvlab_plugin_roles(std::size_t* count, char* err, std::size_t cap) {                              \
    return kvlab::detail::publish([] { return std::vector<kvlab::Registration>{__VA_ARGS__}; }, count, err, cap);     \
  }                                                                                                                   \
  constexpr kvlab_plugin kvlab_plugin_description{KVLAB_ABI, sizeof(kvlab_plugin), KVLAB_BUILD, &kvlab_plugin_roles}; \
  }                                                                                                                   \
  extern "C" KVLAB_EXPORT const kvlab_plugin* kvlab_plugin_entry() { return &kvlab_plugin_description; }
