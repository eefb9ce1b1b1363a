// The paged KV cache as a policy sees it: one layer, all sequences ("rows") of this call, all KV heads. Read-only.
//
// A page holds up to `page_size` tokens of one KV head in one codec. A frame is the memory of one page in one tier. The
// frame number counts granules of 128 bytes from the tier's base; a page outside the tier has null_frame (-1).
// Token t of a head lies in page t / page_size at offset t % page_size. The order of tokens means nothing: an eviction
// may move the last token into the hole. Each token's text position is stored with it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvlab/dtype.hpp"
#include "kvlab/params.hpp"
#include "kvlab/view.hpp"

namespace kvlab {

namespace ops {
struct Injected;  // core's own
}

inline constexpr std::int32_t null_frame = -1;
inline constexpr std::int64_t granule_bytes = 128;  // a GPU's cache line, and the row of its bulk copies
inline constexpr std::int64_t segment_bytes = 64;   // alignment of the parts of a frame

enum class Tier : std::uint8_t { device, host, disk };

// How RoPE rotates a cached key. original: by its text position, before it is stored. cache_relative: by its rank among
// the resident tokens, whenever it is read. re_rotate: by that rank before it is stored, and again when an eviction
// changes the rank.
enum class RopeRegime : std::uint8_t { original, cache_relative, re_rotate };

// What the bits of a code mean. integer: an unsigned number. e4m3: an FP8 number of 1 sign bit, 4 bits of exponent and
// 3 of mantissa. It reaches from -448 to 448 and has no infinity. whole_zero: an unsigned number, one of which reads as
// about 0.
enum class CodeKind : std::uint8_t { integer, e4m3, whole_zero };

// Which numbers share a scale. token: elements of one token. channel: one element of several tokens of a page, as KIVI
// stores keys.
enum class CodeAxis : std::uint8_t { token, channel };

// How K or V is stored. bits 0: in the run's dtype. Otherwise as codes of `bits`, x = code * scale + zero. Numbers of a
// group share one f16 scale and one f16 zero.
// A group is `group` neighbours along the axis: elements of a token, or tokens of a page. 0, or more than there are,
// means all head_dim elements or all tokens of the page. Groups must divide these. A codec with a side of axis channel
// or with groups is `grouped`: only Edits::encode stores a page in it, and no token of that page can be replaced.
// integer: scale = (max - min) / (2^bits - 1) and zero = min (plain_quant, LeanKV). e4m3: scale = max |x| / 448 and
// zero = 0. whole_zero (Atom): scale = max(max - min, 1e-5) / (2^bits - 1), and zero = -scale * z. z is -min / scale,
// rounded to the nearest whole number, ties to even, and within the codes. So numbers of one sign saturate: those of
// 10 to 12 become 2. Both stay within 65504. A code is the one nearest to (x - zero) / scale, with the stored scale and
// zero. Ties go to even, and what lies outside saturates. A token whose stored scale is 0 has the codes 0. NaN counts
// neither for max nor for min. As an integer it becomes code 0; in e4m3 it stays NaN. Infinities read as finite
// numbers. Element e lies at bit e * bits of its row, little end first.
struct CodecSide {
  std::uint8_t bits = 0;              // 0 | 2 | 4 | 8
  CodeKind kind = CodeKind::integer;  // e4m3 has 8 bits
  CodeAxis axis = CodeAxis::token;
  std::uint16_t group = 0;

  constexpr bool grouped() const { return bits && (axis == CodeAxis::channel || group); }
  bool operator==(const CodecSide&) const = default;
};

struct CodecSpec {
  CodecSide k, v;
  // For pages on the host alone, both sides in bf16: full pages cross the link packed, without loss. Their frames are
  // as large as others. A packed page keeps its tokens: an edit that evicts, moves or encodes them is refused.
  bool packs = false;

  bool grouped() const { return k.grouped() || v.grouped(); }
  // Whether pages of both lie alike where they are not packed.
  bool stores_as(const CodecSpec& other) const { return k == other.k && v == other.v; }

  bool operator==(const CodecSpec&) const = default;
};

// Shape of the model and of this run's cache.
struct Shape {
  int layers = 0, query_heads = 0, kv_heads = 0, head_dim = 0;
  int page_size = 0;
  int max_slots = 0;   // sequences at once
  int max_tokens = 0;  // per sequence, prompt and output
  DType dtype = DType::bf16;

  int group() const { return query_heads / kv_heads; }
  int max_pages() const { return (max_tokens + page_size - 1) / page_size; }
};

// Byte offsets inside a frame of one codec. K and V are [token, head_dim] in the run's dtype, or rows of head_dim *
// bits / 8 bytes of codes. The metadata of a side of codes is f16 {scale, zero}: [token, head_dim / group, 2], or of
// axis channel [page_size / group, head_dim, 2]. Positions are i32 [token]; state column c is f32 [token] at state + c
// * page_size * 4. A group of all there is has the number 0.
struct PageLayout {
  CodecSpec codec;
  DType dtype = DType::bf16;  // of a side whose bits are 0
  int page_size = 0, head_dim = 0;
  std::int64_t k = 0, v = 0, k_meta = 0, v_meta = 0, positions = 0, state = 0;
  int state_columns = 0;
  std::int64_t bytes = 0;  // of the whole frame, a multiple of granule_bytes
};

struct PageEntry {
  std::int32_t frame = null_frame;
  std::uint16_t tokens = 0;
  std::uint8_t codec = 0;  // index into PagedKv::layouts
  std::uint8_t packed =
      0;  // of the host tier: units of a packed page (ops::packed_unit), 0 = it lies as its layout says
};

// inv_freq: [head_dim / 2] of the model, scaling included; only ops that rotate read it. RoPE turns the pairs (i, i +
// head_dim / 2) of a row x by the angle a = position * inv_freq[i]: x[i] cos a - x[i + head_dim / 2] sin a, and
// x[i + head_dim / 2] cos a + x[i] sin a. Both are multiplied by attention_scale.
struct RopeTable {
  const float* inv_freq = nullptr;
  int head_dim = 0;
  float attention_scale = 1.f;
};

struct PagedKv {
  std::byte* base = nullptr;            // of the device tier
  const PageLayout* layouts = nullptr;  // by codec
  View<const PageEntry, 3> table;       // [slot, kv_head, page] of this layer, device tier
  View<const std::int32_t, 2> length;   // [slot, kv_head] tokens in the cache, whatever their tier
  // [slot, kv_head] pages of the second codec, which come before those of the first; empty if there is one codec.
  View<const std::int32_t, 2> lower_pages;
  const std::int32_t* slots = nullptr;  // [row] -> slot
  int rows = 0, kv_heads = 0, head_dim = 0, page_size = 0;
  RopeRegime rope = RopeRegime::original;
  RopeTable rope_table;
  const ops::Injected* injected = nullptr;  // core's own: replaces what score_pages and turned_heads find
  // Core's own, memory of a GPU: ops note here a page that they must read and that has no frame. null on the CPU.
  std::int32_t* error = nullptr;

  int tokens(int row, int head) const { return length(slots[row], head); }
  int pages(int row, int head) const { return (tokens(row, head) + page_size - 1) / page_size; }
  const PageEntry& entry(int row, int head, int page) const { return table(slots[row], head, page); }
  std::byte* frame(const PageEntry& e) const { return base + std::int64_t{e.frame} * granule_bytes; }
  const PageLayout& layout(const PageEntry& e) const { return layouts[e.codec]; }
};

enum class KvSide : std::uint8_t { key, value };

// All cached keys (or values) of the layer, as rows of head_dim elements.
struct KvRows {
  const PagedKv* kv = nullptr;
  KvSide side = KvSide::key;
};

// One f32 column that travels with its tokens (Needs::token_state).
struct StateColumn {
  const PagedKv* kv = nullptr;
  int column = 0;
};

// Per-page summaries of the keys, in the run's dtype or in codes. min_max: [2, head_dim] = minimum, maximum. mean: [1,
// head_dim]. centre_radius: [2, head_dim] = centre - radius, centre + radius. The centre is (minimum + maximum) / 2,
// the radius the mean of the keys' distances from it, both element by element. The box lies inside that of min_max, and
// keys may lie outside of it. Both boxes are rounded outwards in 16 bits and in codes.
enum class Summary : std::uint8_t { none, min_max, mean, centre_radius };

// Vectors of head_dim that the summary of a page has. A summary of two is a box.
constexpr int summary_vectors(Summary kind) { return kind == Summary::none ? 0 : kind == Summary::mean ? 1 : 2; }

// Bytes of a page's summary. bits 16: the numbers in `dtype`, which may be f32. bits 8: codes of 8 bits, then an f32
// scale and an f32 zero that they share, then zeros up to a multiple of 16 bytes.
// A code reads as code * scale + zero in f32, with both roundings. zero = the least number. scale = (most - least) *
// 0x1.010108p-8, at least 2^-126. That is a little more than a 255th, so code 255 reaches the most. A box's low end has
// the greatest code that reads as no more than it, its high end the least code that reads as no less. A mean has the
// code nearest to (x - zero) * (1 / scale), ties to even. Numbers count as within +-2^100. NaN counts neither for least
// nor for most. As a low end or a mean it has code 0, as a high end 255.
constexpr std::int64_t summary_bytes(Summary kind, int bits, DType dtype, int head_dim) {
  const std::int64_t numbers = std::int64_t{summary_vectors(kind)} * head_dim;
  if (numbers == 0 || bits != 8) return numbers * static_cast<std::int64_t>(size_of(dtype));
  return (numbers + 2 * static_cast<std::int64_t>(sizeof(float)) + 15) / 16 * 16;
}

struct Summaries {
  Summary kind = Summary::none;
  DType dtype = DType::bf16;
  const std::byte* data = nullptr;
  std::int64_t slot_stride = 0, head_stride = 0, page_stride = 0;  // bytes
  int bits = 16;                                                   // or 8: codes; see summary_bytes
  const std::byte* at(int slot, int head, int page) const {
    return data + slot * slot_stride + head * head_stride + page * page_stride;
  }
};

// Scores in scratch memory: [row, kv_head or query head, token] f32, higher = keep. Only the first tokens(row, kv_head)
// entries of a head mean anything. `token` is a place in the cache, not a text position. After an eviction places are
// out of text order, and one place of two heads may hold different tokens. ops::recency gives the text positions;
// ops::layer_reduce joins heads by them.
using Scores = View<float, 3>;

namespace ops {
struct FinalList;  // core's own
}

// Lists: index(at(row), kv_head, i) for i < count(at(row), kv_head), ascending and without repeats. A list in scratch
// memory has the callback's rows. A list that lasts has all slots (KeptPages), and `slots` names those of the rows.
struct IndexList {
  View<std::int32_t, 3> index;
  View<std::int32_t, 2> count;
  const std::int32_t* slots = nullptr;  // [row] memory of the stream's device; null = entry `row` is the row's
  ops::FinalList* final = nullptr;      // core's own: where an op notes that attention can read the list as it is

  constexpr std::int64_t at(std::int64_t row) const { return slots ? slots[row] : row; }
};
struct PageList : IndexList {};   // logical pages
struct TokenList : IndexList {};  // tokens by their place in the cache (page * page_size + offset)

// What an id of the vocabulary stands for. special: a control token, as those that begin or end texts and turns.
// punctuation: characters of ASCII punctuation alone, with or without white space around them.
enum class TokenKind : std::uint8_t { plain, special, punctuation };

// The sequences' text, if needs() asks for it (Needs::token_ids). Memory of the stream's device, at one address.
struct TextTokens {
  View<const std::int32_t, 2> ids;    // [slot, text position]; of positions that the sequence has seen
  View<const std::uint8_t, 1> kinds;  // [id] TokenKind

  constexpr TokenKind kind(std::int64_t slot, std::int64_t position) const {
    if (position < 0 || position >= ids.extent[1]) return TokenKind::plain;
    const std::int64_t id = ids.data[slot * ids.stride[0] + position];
    return id < 0 || id >= kinds.extent[0] ? TokenKind::plain : static_cast<TokenKind>(kinds.data[id]);
  }
};

// Marks of KV heads that last (KeptFlags): [slot, kv_head], 0 or 1.
using HeadFlags = View<std::uint8_t, 2>;

// Numbers of KV heads that last (KeptNumbers): [layer, slot, kv_head]. Those of one layer have a single layer. Those of
// all layers go with Step::pages, whose slots are layer * slots + slot.
using HeadNumbers = View<std::int32_t, 3>;

// The KV heads that an op or an edit works on. The device decides, so a graph may hold the call while the heads change
// from step to step. All conditions must hold; without one all heads are meant. A head that is left out costs no bytes.
// `classes` adds to the other conditions or takes away from them. So Heads{}.except(c) is every head out of class c,
// and Heads{}.or_of(c) is every head. Heads::every(kv.steps, 0).or_of(c) is class c alone, if needs() asks for steps.
struct Heads {
  View<const std::uint8_t, 2> flags;    // HeadFlags; empty = no condition
  bool unflagged = false;               // the heads whose flag is 0 instead
  const std::int32_t* steps = nullptr;  // [slot] LayerKv::steps; null = no condition
  int period = 1;                       // (steps + lead) % period == 0, by each sequence's own count; 0 = no step
  int lead = 0;
  const std::uint8_t* classes = nullptr;  // [kv_head] HeadClasses of the layer; null = no condition
  enum Join : std::uint8_t { or_in, unless_in } join = or_in;  // `or_in` adds these heads, `unless_in` takes them away

  static Heads flagged(View<const std::uint8_t, 2> flags, bool yes = true) {
    Heads h;
    h.flags = flags;
    h.unflagged = !yes;
    return h;
  }
  static Heads every(const std::int32_t* steps, int period, int lead = 0) {
    Heads h;
    h.steps = steps;
    h.period = period;
    h.lead = lead;
    return h;
  }
  Heads or_of(const std::uint8_t* heads) const { return joined(heads, or_in); }
  Heads except(const std::uint8_t* heads) const { return joined(heads, unless_in); }

  constexpr bool on(int slot, int head) const {
    bool yes = true;
    if (flags.data) yes = (flags(slot, head) != 0) != unflagged;
    if (steps) yes = yes && period > 0 && (steps[slot] + lead) % period == 0;
    if (classes) yes = join == or_in ? yes || classes[head] != 0 : yes && classes[head] == 0;
    return yes;
  }

  Heads joined(const std::uint8_t* heads, Join how) const {
    Heads h = *this;
    h.classes = heads;
    h.join = how;
    return h;
  }
};

// Where a decode step's attention leaves the logits of some KV heads (Edits::keep_logits): [row, i, token place, query
// head of the group], f32, times log2(e). So 2^x are the weights of the softmax; -inf = a sliding window hides the
// token. The last two indices are dense. A head that holds more tokens than there is room for gets none.
struct HeadLogits {
  View<float, 4> out;
  const std::int32_t* index = nullptr;  // [kv_head] i of the head, -1 = none: HeadOfHead
  Heads heads;                          // the others have none either

  // The logits of a head of so many tokens, or null.
  constexpr float* of(int row, int slot, int head, int tokens) const {
    if (!out.data || index[head] < 0 || !heads.on(slot, head) || tokens > out.extent[2]) return nullptr;
    return out.data + row * out.stride[0] + index[head] * out.stride[1];
  }
};

// Made-up tokens of KV heads, which a policy keeps beside the cache (KeptMadeUp). Attention reads them where
// Edits::read_made_up says so. Token i counts as weights(slot, kv_head, i) tokens that are all alike: attention adds
// the natural logarithm of the weight to its logits. Weight 0 = there is no such token. Keys are as attention reads
// them. head_dim is contiguous.
struct MadeUpTokens {
  View<float, 4> keys, values;  // [slot, kv_head, i, head_dim]
  View<float, 3> weights;       // [slot, kv_head, i]

  explicit operator bool() const { return weights.data != nullptr; }
};

// What counts for the tokens that a step's attention does not read (Edits::fill_left_out).
struct LeftOut {
  View<const float, 2> share;  // [row, query head] of the softmax that attention reads; may be scratch
  View<const float, 3> mean;   // [slot, kv_head, head_dim] of values, contiguous along head_dim

  explicit operator bool() const { return share.data != nullptr; }
};

// Of each KV head the `count` tokens from the place `first` on. Both are [row, kv_head] memory of the stream's device;
// empty = all tokens. A range that leaves the head is Errc::internal or Errc::plugin on the CPU. On a GPU only what is
// inside counts.
struct TokenRange {
  View<const std::int32_t, 2> first, count;

  explicit operator bool() const { return first.data != nullptr; }
  // The places [begin, end) of a head of so many tokens.
  constexpr int begin(std::int64_t row, std::int64_t head, int tokens) const {
    const int from = first.data ? first(row, head) : 0;
    return from < 0 ? 0 : from < tokens ? from : tokens;
  }
  constexpr int end(std::int64_t row, std::int64_t head, int tokens) const {
    const int from = begin(row, head, tokens), most = tokens - from, n = first.data ? count(row, head) : most;
    return from + (n < 0 ? 0 : n < most ? n : most);
  }
  // Whether it lies in a head of so many tokens. Host memory.
  constexpr bool fits(std::int64_t row, std::int64_t head, int tokens) const {
    if (!first.data) return true;
    const int from = first(row, head), n = count(row, head);
    return from >= 0 && n >= 0 && from <= tokens && n <= tokens - from;
  }
};

// Tokens (or the page) that are kept or attended to whatever their score.
struct Pins {
  int first = 0, last = 0;   // tokens by text position: sinks and the recent window
  bool newest_page = false;  // selection only: the page that is being filled

  bool operator==(const Pins&) const = default;
};

// How the scores of a GQA group's query heads become one per KV head. softmax_mean: softmax over the candidates of each
// query head first, then the mean.
enum class GroupRule : std::uint8_t { mean, max, sum, softmax_mean };
template <>
struct Choices<GroupRule> {
  static constexpr std::pair<GroupRule, const char*> all[] = {{GroupRule::mean, "mean"},
                                                              {GroupRule::max, "max"},
                                                              {GroupRule::sum, "sum"},
                                                              {GroupRule::softmax_mean, "softmax_mean"}};
};

// How ops::score_pages chooses.
struct PageChoice {
  GroupRule rule = GroupRule::max;
  float scale = 1;                      // of softmax_mean
  int budget = 0;                       // pages of a KV head, where `budgets` is empty
  View<const std::int32_t, 2> budgets;  // [row, kv_head] pages
  bool newest_page = false;             // the last page takes one of these places
  // Pages that hold one of these tokens are no candidates: neither in the softmax nor in the list.
  Pins leave_out;
  Heads heads;  // lists of the others stay as they are; in scratch they are uninitialised, so take a KeptPages

  PageChoice among(const Heads& these) const {
    PageChoice c = *this;
    c.heads = these;
    return c;
  }
};

// How ops::top_tokens chooses. The lists of heads that are left out stay as they are.
struct TokenChoice {
  // [row, kv_head] tokens. Empty = as many as the list of the head holds, so that its length stays.
  View<const std::int32_t, 2> keep;
  const Pins* pins = nullptr;  // [row], or null
  Heads heads;
  const std::int32_t* by = nullptr;  // [kv_head] the head whose tokens and scores count in its place; null = its own
  // [kv_head] where `keep` is empty: as many as the list of that head holds. Of these the head keeps the first by
  // place, up to its own number. null = as many as its own.
  const std::int32_t* among = nullptr;
};

enum class Pooling : std::uint8_t { none, average, max };
template <>
struct Choices<Pooling> {
  static constexpr std::pair<Pooling, const char*> all[] = {
      {Pooling::none, "none"}, {Pooling::average, "average"}, {Pooling::max, "max"}};
};

template <>
struct Choices<RopeRegime> {
  static constexpr std::pair<RopeRegime, const char*> all[] = {{RopeRegime::original, "original"},
                                                               {RopeRegime::cache_relative, "cache_relative"},
                                                               {RopeRegime::re_rotate, "re_rotate"}};
};

template <>
struct Choices<Tier> {
  static constexpr std::pair<Tier, const char*> all[] = {
      {Tier::device, "device"}, {Tier::host, "host"}, {Tier::disk, "disk"}};
};

}  // namespace kvlab
