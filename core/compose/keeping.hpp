// A wrapper of a policy that promises KeepsTokens. Core relies on it, so an edit that breaks the promise is
// Errc::plugin.
#pragma once
#include <kvlab/error.hpp>

#include "compose/forwarding.hpp"

namespace kvlab {

class KeepingPolicy : public ForwardingPolicy {
 public:
  using ForwardingPolicy::ForwardingPolicy;
  void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
    ForwardingPolicy::prefill(kv, edits, s);
    check(edits);
  }
  void finish_prompt(const LayerKv& kv, Edits& edits, Stream s) override {
    ForwardingPolicy::finish_prompt(kv, edits, s);
    check(edits);
  }
  void select(const LayerStep& step, Edits& edits, Stream s) override {
    ForwardingPolicy::select(step, edits, s);
    check(edits);
  }
  void observe(const LayerStep& step, Edits& edits, Stream s) override {
    ForwardingPolicy::observe(step, edits, s);
    check(edits);
  }
  void finish_step(const Step& step, Edits& edits, Stream s) override {
    ForwardingPolicy::finish_step(step, edits, s);
    check(edits);
  }

 private:
  static void check(const Edits& edits) {
    for (const Edit& e : edits.all())
      if (e.verb != Edit::attend && e.verb != Edit::attend_tokens)
        throw Error(Errc::plugin, "got an edit of a policy that promises KeepsTokens, wanted none but attend");
  }
};

}  // namespace kvlab
