// A policy changes the cache through edits. A callback fills Edits, and the store applies them in order. Only the store
// moves bytes and updates tables, token state, summaries and the ledger. Core borrows a list until the callback
// returns, and copies it if its deadline is later.
#pragma once
#include <cstdint>
#include <vector>

#include "kvlab/kv.hpp"

namespace kvlab {

struct KeyFactors;  // kvlab/key_factors.hpp

// When an edit takes effect. Edits with the same deadline keep the callback's order. An edit for the next step or later
// needs a dense list, else Errc::unsupported. Its scratch list and the heads that it means are those of the callback. A
// list that lasts is read when the edit takes effect.
//   this_attention   before the attention that select() prepares. Errc::plugin from any other callback, for fetch, and
//                    for evict, evict_rest and move beside a list to attend to: they would change the places that it
//                    names
//   next_attention   at once; an edit of select() waits for the end of this layer's attention. What place and fetch
//                    bring travels beside the rest of the step
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
// capturable takes `keep` and `pins` by Workspace::constant, in attach, or by StepNumbers (kvlab/step_numbers.hpp).
struct Surplus {
  View<const std::int32_t, 2> keep;  // [row, kv_head]; a head of at most so many tokens keeps them all
  const Pins* pins = nullptr;        // [row], or null
  View<const float, 3> scores;       // [row, kv_head, token], higher stays; or empty
  int column = -1;                   // without scores: the column of token state that ranks; -1 = newer stays
};

// [row, kv_head, token] by place: the number of the codec that stores the token, or `level_gone`. Only the first
// tokens(row, kv_head) entries of a head are read.
using Levels = View<const std::uint8_t, 3>;
inline constexpr std::uint8_t level_gone = 255;

struct Edit {
  enum Verb : std::uint8_t {
    attend,         // this step's attention reads only these pages (plus pins)
    evict,          // these tokens leave every tier
    evict_rest,     // all tokens but these leave every tier
    offload,        // copy pages device -> host; the device frame stays
    drop,           // free the frames of these pages in `tier`; refused for a page's only copy
    recall,         // copy pages host -> device; the host copy stays
    encode,         // these full pages are stored in `codec` of Policy::codecs
    move,           // exchange the places of tokens: list holds pairs (from, to)
    attend_tokens,  // this step's attention reads only these tokens (plus pins)
    evict_surplus,  // the tokens beyond a number leave every tier, the lowest first
    place,          // these pages (plus pins) are on the device, and all full pages on the host
    store_as,       // each token is stored in a codec of Policy::codecs, or leaves
    archive,        // the heads' archives become copies of all tokens that they hold
    fetch,          // the heads' first tokens become those of these places of their archives
    rewrite,        // the heads' tokens get other keys or values
  };
  static constexpr int all_layers = -1;

  Verb verb = attend;
  IndexList list;  // [row, kv_head, i] of the callback's rows: tokens for evict, evict_rest, move, attend_tokens and
                   // fetch, else pages; archive and store_as have none
  int layer = 0;   // or all_layers
  Tier tier = Tier::device;
  int codec = 0;
  Pins pins;
  Surplus surplus;  // evict_surplus, which has no list
  Deadline when;
  bool resident = false;  // attend only
  Heads heads;            // place, archive and fetch
  int room = 0;           // place only, like the members below
  View<const std::int32_t, 2> rooms;
  bool reuse = true;
  View<const float, 3> order;
  const KeyFactors* keys = nullptr;
  Levels levels;              // store_as, which has no list
  KvSide side = KvSide::key;  // rewrite, which has no list
  View<const float, 4> rows;
  TokenRange range;
};

// How Edits::place works.
struct Placing {
  Heads heads;   // the others stay as they are
  Pins pins;     // pages of these tokens stay on the device too; the newest page always does
  int room = 0;  // pages of a head that may be on the device; while there is room, others stay, the oldest leave first
  // Pages that come take the frames of pages that leave. false: the pool's, but for two pages of each layer, slot and
  // KV head, which stay free for appended tokens.
  bool reuse = true;
  Deadline when;
  View<const std::int32_t, 2> rooms;  // [row, kv_head] in place of `room`; or empty
  // [row, kv_head, page] where not the oldest but the lowest leave first; or empty. Beside a list that lasts it lasts,
  // too, and is [slot, kv_head, page] (kvlab/page_order.hpp). It also says what leaves first when device memory runs
  // short.
  View<const float, 3> order;
  // Pages that these factors cover come without their keys, which the store makes from the factors. It must live as
  // long as the policy. null, or another codec on the host = pages come whole. Needs::rebuilds_keys is needed. Not with
  // Deadline::sequence, a later step, or an observe beside the step: Errc::plugin.
  const KeyFactors* keys = nullptr;
};

// How Edits::fetch works.
struct Fetching {
  Heads heads;  // the others stay as they are and cost no bytes
  Deadline when;
};

class Edits {
 public:
  explicit Edits(int layer = 0) : layer_(layer) {}

  // Only select() may attend, and ChoosesInPrompts::select_chunk to pages. A callback gives one list, of pages or of
  // tokens; else Errc::plugin. In a list of pages, a pin adds every page that holds one of its tokens.
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
  // Only select() may, once, and neither beside a list to attend to nor with mass; else Errc::plugin. No edit: this
  // step's attention writes these logits, which observe may read. Take the memory by Workspace::room, for each layer.
  void keep_logits(const HeadLogits& logits) { logits_.push_back(logits); }
  // Only select() may, once, without mass and in RopeRegime::original; else Errc::plugin. No edit: this step's
  // attention also reads these tokens, whatever else it reads. A sliding window does not hide them. Logits that it
  // keeps are of cached tokens alone. Attention of prompts never reads made-up tokens.
  void read_made_up(const MadeUpTokens& tokens) { made_up_.push_back(tokens); }
  // Only select() may, once, and neither beside a list of pages nor with mass or logits to keep; else Errc::plugin. No
  // edit: this step's attention adds bias(row, query head, token place) to its logits, which are natural ones. -inf =
  // the query head does not read the token. With a list of tokens it counts for the listed ones alone. It may be
  // scratch, and needs room for all tokens of a head. Token places are contiguous.
  void bias_logits(View<const float, 3> bias) { biases_.push_back(bias); }
  // Only select() and ChoosesInPrompts::select_chunk may, once, and in RopeRegime::original; else Errc::plugin. No
  // edit: this step's or this chunk's attention reads a token that lies further than `most` text positions before the
  // query as if it lay there.
  void clamp_distance(int most) { distances_.push_back(most); }
  // Only select() may, once; else Errc::plugin. No edit: the output of this step's attention becomes share * output +
  // (1 - share) * mean, before anything reads it. Mass and logits stay. Bytes: the output, twice.
  void fill_left_out(const LeftOut& left_out) { left_out_.push_back(left_out); }
  void evict(const TokenList& tokens, Deadline when = {}) { push(Edit::evict, tokens, when); }
  void evict_rest(const TokenList& kept, Deadline when = {}) { push(Edit::evict_rest, kept, when); }
  // Finds and evicts the tokens, in a graph maybe behind the last layer: `keep`, `pins` and the column stay until then.
  void evict_surplus(const Surplus& surplus) { push(Edit::evict_surplus, {}, {}).surplus = surplus; }
  void offload(const PageList& pages, Deadline when = {}) { push(Edit::offload, pages, when); }
  void drop(Tier tier, const PageList& pages, Deadline when = {}) { push(Edit::drop, pages, when).tier = tier; }
  void recall(const PageList& pages, Deadline when = {}) { push(Edit::recall, pages, when); }
  // Says where a set of pages shall be. Afterwards the listed and pinned pages of the heads are on the device. Their
  // full pages have a copy on the host, which is written once. No other page is on the device, unless there is room.
  // The store finds what is missing and moves nothing else. A page that comes needs a free frame, unless a page leaves
  // for it. An edit that only writes copies does not count as fired. Needs::host_pages is needed.
  // Other deadlines than this and the next attention do not go with `rooms`, nor with an `order` that is scratch:
  // Errc::unsupported.
  void place(const PageList& pages, const Placing& how) {
    Edit& e = push(Edit::place, pages, how.when);
    e.pins = how.pins;
    e.heads = how.heads;
    e.room = how.room;
    e.rooms = how.rooms;
    e.reuse = how.reuse;
    e.order = how.order;
    e.keys = how.keys;
  }
  // A token that moves to a page of another codec takes that codec.
  void move(const TokenList& pairs, Deadline when = {}) { push(Edit::move, pairs, when); }
  // The pages' tokens are stored in another codec of Policy::codecs. From integers of more bits to fewer, codes become
  // codes: code / 17, code / 5 or code / 85, rounded to the nearest, with the scale times as much and the same zero.
  // A page that is not full stays as it is, and so do
  // pages of the second codec in front of one that is not full. The pages of a head that are stored in the second codec
  // come first: so encode changes the places of tokens.
  void encode(const PageList& pages, int codec, Deadline when = {}) { push(Edit::encode, pages, when).codec = codec; }
  // Every token is stored in the codec of its level, or leaves the cache. Tokens of the second codec fill whole pages,
  // which come first. The last of them that do not fill a page are stored in the first codec, as are those of that
  // level. Both keep their order. RopeRegime::re_rotate is Errc::unsupported.
  void store_as(const Levels& levels) { push(Edit::store_as, {}, {}).levels = levels; }
  // At once: the archive of these heads becomes a copy of all tokens that they hold, in the order of their places. It
  // lies on the host and has a length of its own. Later edits and appends of the head leave it alone, but for the next
  // archive edit, which replaces it. It is freed when the sequence closes. Does not count as fired. Needs::archive is
  // needed. A step that a graph may hold takes none: Errc::plugin.
  void archive(const Heads& heads) { push(Edit::archive, {}, {}).heads = heads; }
  // Of each head the first count(row, kv_head) tokens in the cache become its archive's tokens at these places, as they
  // were archived: K, V, metadata, text position and token state. Lengths and frames do not change. A place beyond the
  // archive, or more places than the head holds tokens, is Errc::plugin. The list may last. this_attention is
  // Errc::plugin too. With next_attention the tokens travel beside the rest of the step. Until it ends, ops may read
  // the tokens before or those after.
  void fetch(const TokenList& places, const Fetching& how) { push(Edit::fetch, places, how.when).heads = how.heads; }
  // At once: the tokens of `range` get the keys or values of `rows`, in the cache's dtype. rows: [row, kv_head, i,
  // head_dim], where i = 0 is the range's first token, as ops::read_range gives them. Without a range it is every token
  // of every head, as ops::read_rows gives them. A row that stays keeps its bits, and one outside is neither read nor
  // written. Positions and token state stay. Summaries of pages that change follow, and their copies on the host are
  // freed. Pages of the range must be on the device. prefill(), finish_prompt() and, without capturable, observe() may;
  // else Errc::plugin. Needs functional or rebuilds_keys.
  void rewrite(KvSide side, View<const float, 4> rows, const TokenRange& range = {}) {
    Edit& e = push(Edit::rewrite, {}, {});
    e.side = side;
    e.rows = rows;
    e.range = range;
  }

  // Sets the layer of the next edits, for Policy::finish_step, which works on all layers, and for finish_prompt.
  void for_layer(int layer) { layer_ = layer; }
  // The next edits have lists of the rows of Step::pages. They are evict, move, encode and store_as, and take effect at
  // once; else Errc::plugin. Needs::all_layers is needed.
  void for_all_layers() { layer_ = Edit::all_layers; }

  const std::vector<Edit>& all() const { return edits_; }
  const std::vector<HeadLogits>& logits() const { return logits_; }
  const std::vector<MadeUpTokens>& made_up() const { return made_up_; }
  const std::vector<View<const float, 3>>& biases() const { return biases_; }
  const std::vector<int>& distances() const { return distances_; }
  const std::vector<LeftOut>& left_out() const { return left_out_; }

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
  std::vector<HeadLogits> logits_;
  std::vector<MadeUpTokens> made_up_;
  std::vector<View<const float, 3>> biases_;
  std::vector<int> distances_;
  std::vector<LeftOut> left_out_;
};

}  // namespace kvlab
