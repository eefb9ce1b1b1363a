// Calls into a plugin's code. A callback is on record while it runs. An exception, exit() or a signal that ends it is
// therefore reported with plugin, file and callback.
#pragma once
#include <kvlab/error.hpp>

#include <filesystem>
#include <string>
#include <utility>

namespace kvlab {

// Puts a callback on record for the object's lifetime. Records nest.
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
  // library: empty for a role that the host itself offers.
  Callee(const std::string& name, const std::filesystem::path& library);

  // Returns body(). Its exceptions reach the caller as an Error that names plugin and callback, in printable text.
  // Errors keep their code, but Errc::internal becomes Errc::plugin: an op blames kvlab for the plugin's mistake.
  // std::bad_alloc becomes NoRoom.
  template <class Body>
  decltype(auto) call(const char* callback, Body&& body) const {
    const Recorded here(name_.c_str(), callback);
    try {
      return std::forward<Body>(body)();
    } catch (...) {
      rethrow(callback);
    }
  }

  // Throws Errc::plugin for a value that a callback must not return.
  [[noreturn]] void refuse(const char* callback, const std::string& message) const;

  // "plugin snapkv (/path/libsnapkv.so), score()"
  std::string where(const char* callback) const;

 private:
  [[noreturn]] void rethrow(const char* callback) const;

  std::string name_;
};

// From here on a process that ends inside a callback first says so in a line. exit() and _exit() then end it with the
// code 1, and a crash (SEGV, BUS, FPE, ILL, ABRT) by its signal. descriptor: takes the line, behind a `!`, in place of
// stderr; -1 = none.
void name_callback_at_end(int descriptor = -1);

}  // namespace kvlab
