// What a policy wants done to the cache. A callback fills Edits; the store applies them in order and is the only one
// that moves bytes, updates tables, token state, summaries and the ledger. Lists are borrowed until the callback has
// returned (core copies those with a later deadline).
#pragma once
#include <cstdint>
#include <vector>

#include "kvlab/kv.hpp"

namespace kvlab {

// When an edit takes effect; edits with one deadline apply in the order that the callback gave them in. The list of an
// edit for the next step or later is dense, else Errc::unsupported.
//   this_attention   before the attention that select() prepares; Errc::plugin from any other callback, and for tokens
//                    that leave or move beside a list to attend to, which names places
//   next_attention   at once, but of select() after this layer's attention
//   next_step        when this step has ended, or this chunk of the prompt
//   steps_from_now   when that many decode steps of the row have ended, this one included; 0: like next_attention
struct Deadline {
  enum Kind : std::uint8_t { this_attention, next_attention, next_step, steps_from_now } kind = next_attention;
  int steps = 0;  // steps_from_now only

  static Deadline in_steps(int n) { return {steps_from_now, n}; }
};

struct Edit {
  enum Verb : std::uint8_t {
    attend,         // this step's attention reads only these pages (plus pins)
    evict,          // these tokens leave every tier
    evict_rest,     // all tokens but these leave every tier
    offload,        // copy pages device -> host; the device frame stays
    drop,           // free the frames of these pages in `tier`; refused for the only copy (that is evict)
    recall,         // copy pages host -> device; the host copy stays
    encode,         // re-encode pages that are on the device as `codec`; the store's alone: a policy has one codec
    move,           // exchange the places of tokens: list holds pairs (from, to)
    attend_tokens,  // this step's attention reads only these tokens (plus pins)
  };
  Verb verb = attend;
  IndexList list;  // pages, or tokens for evict, evict_rest, move and attend_tokens; [row, kv_head, i] over the rows of
                   // the callback
  int layer = 0;
  Tier tier = Tier::device;
  int codec = 0;
  Pins pins;
  Deadline when;
};

class Edits {
 public:
  explicit Edits(int layer = 0) : layer_(layer) {}

  // In select() alone, and one list a callback, of pages or of tokens; else Errc::plugin. A page that a pin reaches
  // into is pinned whole.
  void attend(const PageList& pages, Pins pins = {}) {
    push(Edit::attend, pages, {Deadline::this_attention}).pins = pins;
  }
  void attend(const TokenList& tokens, Pins pins = {}) {
    push(Edit::attend_tokens, tokens, {Deadline::this_attention}).pins = pins;
  }
  void evict(const TokenList& tokens, Deadline when = {}) { push(Edit::evict, tokens, when); }
  void evict_rest(const TokenList& kept, Deadline when = {}) { push(Edit::evict_rest, kept, when); }
  void offload(const PageList& pages, Deadline when = {}) { push(Edit::offload, pages, when); }
  void drop(Tier tier, const PageList& pages, Deadline when = {}) { push(Edit::drop, pages, when).tier = tier; }
  void recall(const PageList& pages, Deadline when = {}) { push(Edit::recall, pages, when); }
  void move(const TokenList& pairs, Deadline when = {}) { push(Edit::move, pairs, when); }

  // Step::finish works on all layers: say which one the next edits are for.
  void for_layer(int layer) { layer_ = layer; }

  const std::vector<Edit>& all() const { return edits_; }

 private:
  Edit& push(Edit::Verb verb, const IndexList& list, Deadline when) {
    Edit e;
    e.verb = verb;
    e.list = list;
    e.layer = layer_;
    e.when = when;
    edits_.push_back(e);
    return edits_.back();
  }

  int layer_;
  std::vector<Edit> edits_;
};

}  // namespace kvlab
