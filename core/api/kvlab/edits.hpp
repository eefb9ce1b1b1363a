// A policy changes the cache through edits. A callback fills Edits, and the store applies them in order. Only the store
// moves bytes and updates tables, token state, summaries and the ledger. Core borrows a list until the callback
// returns, and copies it if its deadline is later.
#pragma once
#include <cstdint>
#include <vector>

#include "kvlab/kv.hpp"

namespace kvlab {

// When an edit takes effect. Edits with the same deadline keep the callback's order. An edit for the next step or later
// needs a dense list, else Errc::unsupported. Its scratch list and the heads that it means are those of the callback. A
// list that lasts is read when the edit takes effect.
//   this_attention   before the attention that select() prepares. Errc::plugin from any other callback, and for evict,
//                    evict_rest and move beside a list to attend to: they would change the places that it names
//   next_attention   at once; an edit of select() waits for the end of this layer's attention. Pages that a place edit
//                    brings travel beside the rest of the step
//   next_step        at the end of this step, or of this chunk of the prompt
//   steps_from_now   at the end of that many decode steps of the row, this one included; 0 = next_attention. A
//                    step that a graph may hold takes 0 alone, else Errc::plugin
//   sequence         of place edits, one of a layer: at the end of this step, after its other edits. The copies run
//                    beside later steps, and the row takes part in none of them until its pages are there.
//                    Needs::pauses is needed, else Errc::plugin
struct Deadline {
  enum Kind : std::uint8_t {
    this_attention,
    next_attention,
    next_step,
    steps_from_now,
    sequence
  } kind = next_attention;
  int steps = 0;  // steps_from_now only

  static Deadline in_steps(int n) { return {steps_from_now, n}; }
};

// Which tokens ops::top_tokens would leave out, without a list. All is memory of the stream's device. A policy that is
// capturable takes `keep` and `pins` by Workspace::constant, in attach.
struct Surplus {
  View<const std::int32_t, 2> keep;  // [row, kv_head]; a head of at most so many tokens keeps them all
  const Pins* pins = nullptr;        // [row], or null
  View<const float, 3> scores;       // [row, kv_head, token], higher stays; or empty
  int column = -1;                   // without scores: the column of token state that ranks; -1 = newer stays
};

struct Edit {
  enum Verb : std::uint8_t {
    attend,         // this step's attention reads only these pages (plus pins)
    evict,          // these tokens leave every tier
    evict_rest,     // all tokens but these leave every tier
    offload,        // copy pages device -> host; the device frame stays
    drop,           // free the frames of these pages in `tier`; refused for a page's only copy
    recall,         // copy pages host -> device; the host copy stays
    encode,         // re-encode pages on the device as `codec`; no policy can ask for it, since it has one codec
    move,           // exchange the places of tokens: list holds pairs (from, to)
    attend_tokens,  // this step's attention reads only these tokens (plus pins)
    evict_surplus,  // the tokens beyond a number leave every tier, the lowest first
    place,          // these pages (plus pins) are on the device, and all full pages on the host
  };
  Verb verb = attend;
  IndexList list;  // [row, kv_head, i] of the callback's rows: tokens for evict, evict_rest, move and attend_tokens,
                   // else pages
  int layer = 0;
  Tier tier = Tier::device;
  int codec = 0;
  Pins pins;
  Surplus surplus;  // evict_surplus, which has no list
  Deadline when;
  bool resident = false;  // attend only
  Heads heads;            // place only, like the members below
  int room = 0;
  View<const std::int32_t, 2> rooms;
  bool reuse = true;
  View<const float, 3> order;
};

// How Edits::place works.
struct Placing {
  Heads heads;   // the others stay as they are
  Pins pins;     // pages of these tokens stay on the device too; the newest page always does
  int room = 0;  // pages of a head that may be on the device; while there is room, others stay, the oldest leave first
  bool reuse = true;  // pages that come take the frames of pages that leave; false: the pool's, where it has some
  Deadline when;
  View<const std::int32_t, 2> rooms;  // [row, kv_head] in place of `room`; or empty
  View<const float, 3> order;         // [row, kv_head, page] where not the oldest but the lowest leave first; or empty
};

class Edits {
 public:
  explicit Edits(int layer = 0) : layer_(layer) {}

  // Only select() may attend, and a callback gives one list, of pages or of tokens; else Errc::plugin. In a list of
  // pages, a pin adds every page that holds one of its tokens.
  void attend(const PageList& pages, Pins pins = {}) {
    push(Edit::attend, pages, {Deadline::this_attention}).pins = pins;
  }
  // As attend. Attention also reads all other pages that are on the device once the edits for it are carried out.
  void attend_resident(const PageList& pages, Pins pins = {}) {
    attend(pages, pins);
    edits_.back().resident = true;
  }
  void attend(const TokenList& tokens, Pins pins = {}) {
    push(Edit::attend_tokens, tokens, {Deadline::this_attention}).pins = pins;
  }
  void evict(const TokenList& tokens, Deadline when = {}) { push(Edit::evict, tokens, when); }
  void evict_rest(const TokenList& kept, Deadline when = {}) { push(Edit::evict_rest, kept, when); }
  // Finds the tokens and evicts them at once: one launch on the GPU.
  void evict_surplus(const Surplus& surplus) { push(Edit::evict_surplus, {}, {}).surplus = surplus; }
  void offload(const PageList& pages, Deadline when = {}) { push(Edit::offload, pages, when); }
  void drop(Tier tier, const PageList& pages, Deadline when = {}) { push(Edit::drop, pages, when).tier = tier; }
  void recall(const PageList& pages, Deadline when = {}) { push(Edit::recall, pages, when); }
  // Says where a set of pages shall be. Afterwards the listed and pinned pages of the heads are on the device. Their
  // full pages have a copy on the host, which is written once. No other page is on the device, unless there is room.
  // The store finds what is missing and moves nothing else. A page that comes needs a free frame, unless a page that
  // has a copy leaves for it. An edit that only writes copies does not count as fired. Needs::host_pages is needed.
  // Other deadlines than this and the next attention do not go with `rooms` and `order`, which are scratch:
  // Errc::unsupported.
  void place(const PageList& pages, const Placing& how) {
    Edit& e = push(Edit::place, pages, how.when);
    e.pins = how.pins;
    e.heads = how.heads;
    e.room = how.room;
    e.rooms = how.rooms;
    e.reuse = how.reuse;
    e.order = how.order;
  }
  void move(const TokenList& pairs, Deadline when = {}) { push(Edit::move, pairs, when); }

  // Sets the layer of the next edits, for Policy::finish_step, which works on all layers.
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
