// Work that ops on CUDA have put off, because an op that comes soon may do it in a launch of its own. It waits only
// within a PutOffScope of the thread. Every call of the CUDA library (only_on_cuda), copy or wait of the thread runs it
// first, in order, unless the next op has done it.
#pragma once

namespace kvlab {

using PutOffWork = void (*)();

namespace detail {
struct PutOff {
  static constexpr int most = 4;
  PutOffWork work[most] = {};
  int count = 0, scopes = 0;
  bool joins = false;
};
extern thread_local PutOff put_off;
}  // namespace detail

inline bool may_put_off() { return detail::put_off.scopes > 0 && detail::put_off.count < detail::PutOff::most; }
// Whether a choice may wait together with those of other layers, so that one launch makes all of them.
inline bool may_join_put_off() { return detail::put_off.joins; }
inline void put_off(PutOffWork work) { detail::put_off.work[detail::put_off.count++] = work; }
inline bool is_put_off(PutOffWork work) {
  for (int i = 0; i < detail::put_off.count; ++i)
    if (detail::put_off.work[i] == work) return true;
  return false;
}
// An op has done all the work itself, or nobody wants it any more.
inline void drop_put_off() { detail::put_off.count = 0; }
void run_all_put_off();
inline void run_put_off() {
  if (detail::put_off.count > 0) run_all_put_off();
}

// Nothing runs in its life. At its end all waits again, unless it was dropped.
class PutOffKept {
 public:
  PutOffKept() : kept_(detail::put_off) { drop_put_off(); }
  ~PutOffKept() { detail::put_off.count = kept_.count; }
  void drop() { kept_.count = 0; }
  PutOffKept(const PutOffKept&) = delete;
  PutOffKept& operator=(const PutOffKept&) = delete;

 private:
  detail::PutOff kept_;
};

// Its end drops what still waits: of a step that an exception ends.
class PutOffScope {
 public:
  explicit PutOffScope(bool joins = false) : joined_(detail::put_off.joins) {
    ++detail::put_off.scopes;
    detail::put_off.joins = joins;
  }
  ~PutOffScope() {
    --detail::put_off.scopes;
    detail::put_off.joins = joined_;
    drop_put_off();
  }
  PutOffScope(const PutOffScope&) = delete;
  PutOffScope& operator=(const PutOffScope&) = delete;

 private:
  bool joined_;
};

}  // namespace kvlab
