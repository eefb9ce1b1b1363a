// A wrapper of a policy that keeps all tokens at their places. Core relies on it, so an edit that breaks the promise is
// Errc::plugin.
#pragma once
#include <kvlab/error.hpp>

#include <memory>
#include <utility>

#include "compose/forwarding.hpp"

namespace kvlab {

class KeepingPolicy : public ForwardingPolicy {
 public:
  // tiers: its pages may go to the host.
  explicit KeepingPolicy(std::shared_ptr<Policy> inner, bool tiers = false)
      : ForwardingPolicy(std::move(inner)), tiers_(tiers) {}
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
  void check(const Edits& edits) const {
    for (const Edit& e : edits.all()) {
      const bool moves =
          e.verb == Edit::place || e.verb == Edit::offload || e.verb == Edit::drop || e.verb == Edit::recall;
      if (e.verb != Edit::attend && e.verb != Edit::attend_tokens && !(tiers_ && moves))
        throw Error(Errc::plugin, "got an edit of a policy that promises KeepsTokens, wanted none but attend");
    }
  }

  bool tiers_;
};

}  // namespace kvlab
