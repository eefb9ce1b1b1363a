// Libraries that are looked up at run time, because a machine may do without them.
#pragma once
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>

namespace kvlab {

struct LibraryState {
  bool there = false;
  bool off = false;  // turned off by its variable
  std::string text;  // "cuDNN 9.14.0", or why it is not used
};

// Opens the library whose path the environment variable holds ("off": none), else the first of `names` that the loader
// finds. If none opens, it returns null and state.text says why.
inline void* open_library(const char* variable, std::initializer_list<std::string> names, LibraryState& state) {
  const char* chosen = std::getenv(variable);
  if (chosen && std::strcmp(chosen, "off") == 0) {
    state.off = true;
    state.text = std::string("turned off by ") + variable;
    return nullptr;
  }
  std::string why;
  const auto open = [&why](const char* name) {
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) why += (why.empty() ? "" : "; ") + std::string(dlerror());
    return library;
  };
  if (chosen && *chosen) {
    if (void* library = open(chosen)) return library;
  } else {
    for (const std::string& name : names)
      if (void* library = open(name.c_str())) return library;
  }
  state.text = "not found: " + why + " (" + variable + "=PATH names another)";
  return nullptr;
}

}  // namespace kvlab
