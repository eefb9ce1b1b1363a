// The way into a plugin's code. While a callback runs it is on record, so that whatever ends it, an exception, exit()
// or a signal, names plugin, file and callback.
#pragma once
#include <kvlab/error.hpp>

#include <filesystem>
#include <string>
#include <utility>

namespace kvlab {

// Puts a callback on record for its lifetime. They nest: a task asks for tokens, the host answers.
class Recorded {
 public:
  Recorded(const char* plugin, const char* callback) noexcept;
  ~Recorded();
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

 private:
  const char *plugin_, *callback_;  // what was on record before
};

// A plugin for messages.
class Callee {
 public:
  // library: empty for what the host itself offers.
  Callee(const std::string& name, const std::filesystem::path& library);

  // body(). What it throws reaches the caller as an Error that names plugin and callback; its text is printable.
  // Errors keep their code, but what an op calls a bug of kvlab (Errc::internal) is the plugin's. No memory is NoRoom.
  template <class Body>
  decltype(auto) call(const char* callback, Body&& body) const {
    const Recorded here(name_.c_str(), callback);
    try {
      return std::forward<Body>(body)();
    } catch (...) {
      rethrow(callback);
    }
  }

  // Errc::plugin for a value that a callback must not give.
  [[noreturn]] void refuse(const char* callback, const std::string& message) const;

  // "plugin snapkv (/path/libsnapkv.so), score()"
  std::string where(const char* callback) const;

 private:
  [[noreturn]] void rethrow(const char* callback) const;

  std::string name_;
};

// From here on a process that ends inside a callback says so first: exit() and _exit() with the code 1, signals that
// mean a crash (SEGV, BUS, FPE, ILL, ABRT) before they end it. descriptor: takes the line
// in place of stderr, behind a `!`; -1 = none.
void name_callback_at_end(int descriptor = -1);

}  // namespace kvlab
