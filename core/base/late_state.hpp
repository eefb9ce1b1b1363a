// Token state that a decode step has yet to write, because attention left numbers for it. Whatever reads token state or
// moves tokens calls write_late_state() first. It finds such numbers only within a LateStateScope of the thread.
#pragma once

namespace kvlab {

class LateState {
 public:
  virtual void write_late() = 0;  // writes all that waits

 protected:
  ~LateState() = default;
};

namespace detail {
extern thread_local LateState* late_state;
}  // namespace detail

inline void write_late_state() {
  if (detail::late_state) detail::late_state->write_late();
}

class LateStateScope {
 public:
  explicit LateStateScope(LateState& of) : outer_(detail::late_state) { detail::late_state = &of; }
  ~LateStateScope() { detail::late_state = outer_; }
  LateStateScope(const LateStateScope&) = delete;
  LateStateScope& operator=(const LateStateScope&) = delete;

 private:
  LateState* outer_;
};

}  // namespace kvlab
