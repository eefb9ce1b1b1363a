#include "plugin/callback.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>

#include "base/stop.hpp"
#include "base/stream_memory.hpp"
#include "base/text.hpp"

namespace kvlab {
namespace {

// Signal handlers read these, also on a thread of an op that the callback called.
std::atomic<const char*> current_plugin{nullptr}, current_callback{nullptr};

std::atomic<pid_t> watched_process{0};  // kvlab's; a plugin's own child processes may end as they like
std::atomic<int> teller{-1};

constexpr int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
struct sigaction before[std::size(crashes)];

bool inside() { return current_plugin.load() && watched_process == getpid(); }

// Safe in a signal handler: no memory, no locks.
void tell(const char* ended_by, int signal = 0) {
  char line[1024] = "";
  std::size_t n = 0;
  const auto put = [&](const char* text) {
    while (*text && n + 1 < sizeof line) line[n++] = *text++;
  };
  put(current_plugin), put(", "), put(current_callback), put("(): got "), put(ended_by);
  if (signal > 0) {
    const char digits[] = {static_cast<char>('0' + signal / 10), static_cast<char>('0' + signal % 10), '\0'};
    put(digits + (signal < 10));
  }
  put(", wanted the callback to return\n");
  const int to = teller < 0 ? STDERR_FILENO : teller.load();
  const char* kind = teller < 0 ? "error: " : "!";
  if (write(to, kind, std::strlen(kind)) >= 0 && write(to, line, n) >= 0) return;
}

void at_exit() {
  if (!inside()) return;
  std::fflush(stdout);
  tell("a call of exit()");
  syscall(SYS_exit_group, 1);
}

void crashed(int signal) {
  if (inside()) tell("signal ", signal);
  for (std::size_t i = 0; i < std::size(crashes); ++i)
    if (crashes[i] == signal) sigaction(signal, &before[i], nullptr);
  raise(signal);  // the handler from before gets it when this one returns
}

}  // namespace

Recorded::Recorded(const char* plugin, const char* callback) noexcept
    : plugin_(current_plugin.load(std::memory_order_relaxed)),
      callback_(current_callback.load(std::memory_order_relaxed)) {
  current_callback.store(callback, std::memory_order_relaxed);
  current_plugin.store(plugin, std::memory_order_release);
}

Recorded::~Recorded() {
  current_plugin.store(plugin_, std::memory_order_relaxed);
  current_callback.store(callback_, std::memory_order_relaxed);
}

Callee::Callee(const std::string& name, const std::filesystem::path& library)
    : name_(printable(library.empty() ? name : "plugin " + name + " (" + library.string() + ")")) {}

std::string Callee::where(const char* callback) const { return name_ + ", " + callback + "()"; }

void Callee::refuse(const char* callback, const std::string& message) const {
  throw Error(Errc::plugin, message, where(callback));
}

void Callee::rethrow(const char* callback) const {
  const auto got = [&](const std::string& what) {
    refuse(callback, "got an exception (" + one_line(what) + "), wanted none");
  };
  try {
    throw;
  } catch (const stop::Interrupted&) {
    throw;
  } catch (const Error& e) {
    // A data file's error with its record is for the user, whichever plugin read it.
    if (e.code() == Errc::data && !e.where().empty()) throw Error(e.code(), one_line(e.message()), one_line(e.where()));
    const std::string place = e.where().empty() ? where(callback) : where(callback) + ": " + one_line(e.where());
    throw Error(e.code() == Errc::internal ? Errc::plugin : e.code(), one_line(e.message()), place);
  } catch (const std::bad_alloc& e) {
    throw NoRoom(where(callback) + ": got no memory (" + one_line(e.what()) + "), wanted more");
  } catch (const std::exception& e) {
    got(e.what());
  } catch (...) {
    refuse(callback, "got something thrown that is no std::exception, wanted kvlab::Error");
  }
  std::abort();  // not reached
}

void name_callback_at_end(int descriptor) {
  teller = descriptor;
  if (watched_process.exchange(getpid()) != 0) return;
  std::atexit(at_exit);
  std::at_quick_exit(at_exit);
  // The handler needs a stack of its own, since a stack overflow leaves it no room.
  static char stack[64 << 10];
  stack_t other{};
  other.ss_sp = stack;
  other.ss_size = sizeof stack;
  sigaltstack(&other, nullptr);
  for (std::size_t i = 0; i < std::size(crashes); ++i) {
    struct sigaction action {};
    action.sa_handler = crashed;
    action.sa_flags = SA_ONSTACK;
    sigaction(crashes[i], &action, &before[i]);
  }
}

}  // namespace kvlab

// _exit runs no handler, so kvlab defines its own, which plugins find before the C library's. Without it, a plugin's
// _exit would look like the end of a finished run.
extern "C" {
void _exit(int code) {  // declared as one that does not return
  if (kvlab::inside()) {
    kvlab::tell("a call of _exit()");
    code = 1;
  }
  for (;;) syscall(SYS_exit_group, code);
}

void _Exit(int code) noexcept { _exit(code); }
}
