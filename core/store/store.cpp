#include "store/store.hpp"

#include <kvlab/error.hpp>
#include <kvlab/key_factors.hpp>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "base/backend.hpp"
#include "base/late_state.hpp"
#include "base/part_timer.hpp"
#include "ops/page/codes.hpp"
#include "ops/page/packed.hpp"
#include "ops/page/paged.hpp"
#include "store/cpu_store.hpp"
#include "store/cuda_store.hpp"
#include "store/host_tier.hpp"

namespace kvlab {
namespace {

bool moves_pages(Edit::Verb verb) {
  return verb == Edit::recall || verb == Edit::offload || verb == Edit::drop || verb == Edit::place ||
         verb == Edit::archive || verb == Edit::fetch;
}

// Whether an edit means some heads alone.
bool has_condition(const Heads& h) { return h.flags.data || h.steps || h.classes; }

// Refuses what archives do not go with.
void check_archive(const StoreOptions& o) {
  const auto refuse = [](const std::string& what) {
    throw Error(Errc::unsupported, "got Needs::archive with " + what, "the cache");
  };
  if (!o.archive) return;
  if (o.host_pages) refuse("host_pages, wanted one of the two");
  if (o.summary != Summary::none) refuse("page summaries, wanted none");
  if (o.rope == RopeRegime::re_rotate) refuse("rope re_rotate, wanted keys that keep their rotation");
  if (o.codecs.size() != 1 || o.codecs[0] != o.host_codec)
    refuse("another codec on the host, wanted the one of the device");
}

// Refuses what edits that change keys and values do not go with.
void check_functional(const StoreOptions& o) {
  const auto refuse = [&](const std::string& what) {
    throw Error(Errc::unsupported,
                std::string("got Needs::") + (o.functional ? "functional" : "rebuilds_keys") + " with " + what,
                "the cache");
  };
  if (!o.functional && !o.rebuilds_keys) return;
  if (o.rebuilds_keys && !o.host_pages) refuse("no pages on the host, wanted Needs::host_pages");
  if (o.rope != RopeRegime::original) refuse("another RoPE regime, wanted original");
  if (o.archive) refuse("Needs::archive, wanted one of the two: archived copies would be stale");
  for (const CodecSpec& c : o.codecs)
    if (c.k.bits || c.v.bits) refuse("a codec that stores codes, wanted keys and values in the run's dtype");
}

// Refuses what copies by the host do not go with.
void check_copies(const StoreOptions& o) {
  const auto refuse = [](const std::string& what) {
    throw Error(Errc::unsupported, "got page_copies: memcpy with " + what, "the cache");
  };
  if (!o.copy_by_host) return;
  if (o.codecs.size() != 1 || o.codecs[0] != o.host_codec) refuse("pages of several codecs, wanted one of all tiers");
  if (o.pauses) refuse("a policy that pauses sequences, wanted page_copies: kernel");
  if (o.archive) refuse("a policy that archives heads, wanted page_copies: kernel");
}

// Refuses what packed pages do not go with.
void check_packing(const StoreOptions& o) {
  for (const CodecSpec& c : o.codecs)
    if (c.packs)
      throw Error(
          Errc::config,
          "got a codec that packs pages for those on the device, wanted it for the host: placement: {tier: host, "
          "codec: NAME}");
  if (!o.host_codec.packs) return;
  for (const CodecSpec& c : {o.host_codec, o.codecs[0]}) ops::check_packable(frame_layout(o, c));
}

void check_waiting(const Edit& e) {
  const IndexList& list = e.list;
  if (list.index.stride[1] != list.index.extent[2] || list.index.stride[2] != 1 || list.count.stride[1] != 1)
    throw Error(Errc::unsupported, "got a strided list of an edit to come, wanted a dense one", "the cache");
  if (e.keys)
    throw Error(Errc::plugin,
                "edit of layer " + std::to_string(e.layer) +
                    ": got factors of keys in an edit to come, wanted one for this or the next attention");
  if (e.rooms || (e.order && !e.list.slots))
    throw Error(Errc::unsupported,
                "got `rooms`, or an `order` without a list that lasts, in a place edit to come, wanted `room`",
                "the cache");
}

void check_keys(const Edit& e, const StoreOptions& o) {
  const auto refuse = [&](const char* what) {
    throw Error(Errc::plugin, "edit of layer " + std::to_string(e.layer) + ": got factors of keys " + what);
  };
  if (!o.rebuilds_keys) refuse("without Needs::rebuilds_keys, wanted the policy to ask for it");
  const KeyFactors& f = *e.keys;
  if (!f || f.dtype != o.shape.dtype || f.kv_heads != o.shape.kv_heads || f.pages != o.shape.max_pages())
    refuse("of another cache, wanted those of KeptKeyFactors");
}

}  // namespace

void Store::bad(const Edit& e, const std::string& what) {
  throw Error(Errc::plugin, "edit of layer " + std::to_string(e.layer) + ": " + what);
}

Store::Store(const StoreOptions& options, Stream stream)
    : options_(options),
      stream_(stream),
      pages_per_head_(static_cast<std::size_t>(options.shape.max_pages())),
      summary_bytes_(summary_bytes(options)),
      position_(static_cast<std::size_t>(options.shape.max_slots)),
      step_(static_cast<std::size_t>(options.shape.max_slots)),
      used_(static_cast<std::size_t>(options.shape.max_slots)),
      encoded_(static_cast<std::size_t>(options.shape.layers * options.shape.max_slots)),
      workspace_(ledger_, stream, options.scratch_limit),
      spare_(static_cast<std::size_t>(options.shape.layers * options.shape.max_slots)),
      spilled_(used_.size()),
      slot_room_(used_.size()),
      spills_at_once_(options.spill == Spill::always),
      places_(static_cast<std::size_t>(options.shape.layers)),
      placed_(spare_.size()),
      placed_step_(spare_.size()),
      placed_room_(spare_.size()) {
  check_archive(options);
  check_functional(options);
  check_copies(options);
}

std::int64_t Store::summary_bytes(const StoreOptions& o) {
  return kvlab::summary_bytes(o.summary, o.summary_bits, o.shape.dtype, o.shape.head_dim);
}

void Store::count_fetched(const PageLayout& l, std::int64_t tokens) {
  const auto number = static_cast<std::int64_t>(sizeof(float));  // metadata of a side, a position, a column of state
  const int coded = (l.codec.k.bits > 0) + (l.codec.v.bits > 0);
  ledger_.move(Tier::device, Tag::keys, tokens * ops::row_bytes(l, true), Stored::first);
  ledger_.move(Tier::device, Tag::values, tokens * ops::row_bytes(l, false), Stored::first);
  ledger_.move(Tier::device, Tag::codec_metadata, tokens * coded * number, Stored::first);
  ledger_.move(Tier::device, Tag::positions, tokens * number, Stored::first);
  ledger_.move(Tier::device, Tag::scores, tokens * l.state_columns * number, Stored::first);
}

int Store::open() {
  for (std::size_t i = 0; i < used_.size(); ++i)
    if (!used_[i]) {
      used_[i] = true;
      return static_cast<int>(i);
    }
  return -1;
}

void Store::forget(int slot) {
  std::erase_if(pending_, [&](const Pending& p) { return p.slot == slot; });
  position_[static_cast<std::size_t>(slot)] = step_[static_cast<std::size_t>(slot)] = 0;
  used_[static_cast<std::size_t>(slot)] = spilled_[static_cast<std::size_t>(slot)] = false;
  slot_room_[static_cast<std::size_t>(slot)] = 0;
  for (int layer = 0; layer < options_.shape.layers; ++layer)
    placed_[layer_slot(layer, slot)] = encoded_[layer_slot(layer, slot)] = false;
}

void Store::note_brought(int slot) {
  for (int layer = 0; layer < options_.shape.layers; ++layer) encoded_[layer_slot(layer, slot)] = true;
}

bool Store::any_spills(const std::vector<std::int32_t>& slots) const {
  return std::any_of(slots.begin(), slots.end(), [&](int slot) { return spills(slot); });
}

void Store::spill_at_once() {
  if (spills_at_once_) return;
  spills_at_once_ = true;
  for (int slot = 0; slot < options_.shape.max_slots; ++slot) spill(slot);
}

void Store::spill(int slot, int room) {
  spilled_[static_cast<std::size_t>(slot)] = true;
  slot_room_[static_cast<std::size_t>(slot)] = room;
  mark_spilled(slot, room);
}

Store::SpillState Store::spill_state(int slot) const {
  SpillState s{.spilled = spills(slot), .room = slot_room(slot), .layers = {}};
  for (int layer = 0; layer < options_.shape.layers; ++layer) {
    const std::size_t at = layer_slot(layer, slot);
    s.layers.push_back(placed_[at] ? SpillState::OfLayer{true, placed_step_[at], placed_room_[at], spare_[at]}
                                   : SpillState::OfLayer{});
  }
  return s;
}

void Store::set_spill_state(int slot, const SpillState& s) {
  spilled_[static_cast<std::size_t>(slot)] = s.spilled;
  slot_room_[static_cast<std::size_t>(slot)] = s.room;
  for (int layer = 0; layer < options_.shape.layers; ++layer) {
    const std::size_t at = layer_slot(layer, slot);
    const SpillState::OfLayer& of = s.layers[static_cast<std::size_t>(layer)];
    placed_[at] = of.placed, placed_step_[at] = of.step, placed_room_[at] = of.room, spare_[at] = of.spare;
  }
}

void Store::resume_spilling(int slot, bool below) {
  bool known = true;
  for (int layer = 0; layer < options_.shape.layers; ++layer)
    known = known && (!placed_[layer_slot(layer, slot)] || places_[static_cast<std::size_t>(layer)].list.slots);
  if (!known || (below && !spills(slot)))
    spill(slot);
  else if (spilled_[static_cast<std::size_t>(slot)])
    mark_spilled(slot, slot_room(slot));
}

std::int64_t Store::spare_pages(int slot) const {
  std::int64_t sum = 0;
  for (int layer = 0; layer < options_.shape.layers; ++layer)
    if (placed_[layer_slot(layer, slot)]) sum += spare_[layer_slot(layer, slot)].leave;
  return used_[static_cast<std::size_t>(slot)] && (!spills(slot) || slot_room(slot) > 0) ? sum : 0;
}

std::int64_t Store::left_to_write(int slot) const {
  return spills(slot) && slot_room(slot) == 0 ? 0 : pages_to_write(slot);
}

std::int64_t Store::leave_of(int slot, std::optional<int> room) {
  std::int64_t leave = 0;
  const std::vector<std::int32_t> one{slot};
  for (int layer = 0; layer < options_.shape.layers; ++layer) {
    const std::size_t at = layer_slot(layer, slot);
    if (!placed_[at]) continue;
    Edit e = spare_edit(layer, one);
    if (room) e.room = std::max(e.room, *room);
    spare_[at] = {};
    placed_step_[at] = steps(slot);
    count_spare(e, slot);
  }
  exact();
  for (int layer = 0; layer < options_.shape.layers; ++layer)
    if (placed_[layer_slot(layer, slot)]) leave += spare_[layer_slot(layer, slot)].leave;
  return leave;
}

Edit Store::spare_edit(int layer, const std::vector<std::int32_t>& one) const {
  Edit e = places_[static_cast<std::size_t>(layer)];
  e.room = placed_room_[layer_slot(layer, one[0])];
  e.list.slots = view(layer, one).slots;
  return e;
}

// An edit that names heads in some steps alone may find none now.
bool Store::counts_now(int slot) const {
  for (int layer = 0; layer < options_.shape.layers; ++layer)
    if (const Heads& h = places_[static_cast<std::size_t>(layer)].heads;
        placed_[layer_slot(layer, slot)] && (h.steps || h.flags.data))
      return false;
  return true;
}

// Half of what could leave does: few spills suffice, and most pages that are of use stay. Heads may differ much, and
// some are not placed at all, so the room is looked for by counting what leaves with it. Where nothing can be counted,
// all that can leave does when it is due.
std::optional<int> Store::room_after_spill(int slot) {
  if (!counts_now(slot)) return 0;
  const std::int64_t all = leave_of(slot, {}), half = (all + 1) / 2;
  if (all == 0) return {};
  int room = 0, too_much = static_cast<int>(pages_per_head_);  // with so many pages for each head none leaves
  std::int64_t leaves = all;
  while (too_much - room > 1) {
    const int middle = room + (too_much - room) / 2;
    const std::int64_t leave = leave_of(slot, middle);
    if (leave < half)
      too_much = middle;
    else
      room = middle, leaves = leave;
  }
  return leaves == all ? 0 : room;
}

std::int64_t Store::pages_to_write(int slot) const {
  const Shape& s = options_.shape;
  std::int64_t pages = 0;
  for (int layer = 0; layer < s.layers; ++layer) {
    const std::size_t at = layer_slot(layer, slot);
    if (placed_[at]) pages += spare_[at].write + s.kv_heads * ((steps(slot) - placed_step_[at]) / s.page_size + 1);
  }
  return pages;
}

std::int64_t Store::fresh_pages(const std::vector<std::int32_t>& slots) const {
  return std::int64_t{options_.shape.layers} * static_cast<std::int64_t>(slots.size()) * options_.shape.kv_heads;
}

std::int64_t Store::placed_pages(const std::vector<std::int32_t>& slots) const {
  if (!options_.host_pages) return 0;
  const auto spilled = std::count_if(slots.begin(), slots.end(), [&](int slot) { return spills(slot); });
  return std::int64_t{options_.shape.layers} * spilled * options_.shape.kv_heads;
}

bool Store::room_for_step(const std::vector<std::int32_t>& slots) const {
  const std::int64_t placed = placed_pages(slots);
  const auto fits = [&](std::int64_t fresh, std::int64_t spare) {
    const bool device = page_limit() < 0 || free_frames(Tier::device) + spare >= fresh + placed + lower_room(slots);
    return device && (placed == 0 || free_frames(Tier::host) >= placed);
  };
  if (fits(fresh_pages(slots), 0)) return true;
  exact();
  if (fits(fresh_pages_of(slots), spare_pages())) return true;
  if (end_reloads()) {
    exact();
    if (fits(fresh_pages_of(slots), spare_pages())) return true;
  }
  return const_cast<Store*>(this)->count_grown() && fits(fresh_pages_of(slots), spare_pages());
}

std::int64_t Store::fresh_pages_of(const std::vector<std::int32_t>& slots) const {
  const Shape& s = options_.shape;
  std::int64_t fresh = 0;
  for (int layer = 0; layer < s.layers; ++layer)
    for (const int slot : slots)
      for (int head = 0; head < s.kv_heads; ++head) fresh += length(layer, slot, head) % s.page_size == 0;
  return fresh;
}

std::int64_t Store::spare_pages() const {
  std::vector<std::pair<std::int64_t, int>> slots;  // in the order in which they spill
  for (int slot = 0; slot < options_.shape.max_slots; ++slot)
    if (const std::int64_t spare = spare_pages(slot); spare > 0) slots.emplace_back(-spare, slot);
  std::sort(slots.begin(), slots.end());
  std::int64_t room = free_frames(Tier::host), sum = 0;
  for (const auto& [spare, slot] : slots)
    if (const std::int64_t pages = left_to_write(slot); pages <= room) room -= pages, sum -= spare;
  return sum;
}

std::int64_t Store::host_room() const {
  exact();
  std::int64_t room = free_frames(Tier::host);
  for (int slot = 0; slot < options_.shape.max_slots; ++slot)
    if (spare_pages(slot) > 0) room -= left_to_write(slot);
  return std::max<std::int64_t>(0, room);
}

int Store::next_to_spill() const {
  int chosen = -1;
  std::int64_t most = 0;
  for (int slot = 0; slot < options_.shape.max_slots; ++slot) {
    const std::int64_t spare = spare_pages(slot);
    if (spare == 0 || left_to_write(slot) > free_frames(Tier::host)) continue;
    const bool goes_on = slot_room(slot) > 0, other_does = chosen >= 0 && slot_room(chosen) > 0;
    if (goes_on > other_does || (goes_on == other_does && spare > most)) most = spare, chosen = slot;
  }
  return chosen;
}

// Texts have grown since their pages were counted.
bool Store::count_grown() {
  bool some = false;
  for (int slot = 0; slot < options_.shape.max_slots; ++slot) {
    bool grown = false;
    for (int layer = 0; layer < options_.shape.layers; ++layer) {
      const std::size_t at = layer_slot(layer, slot);
      grown = grown || (placed_[at] && steps(slot) > placed_step_[at]);
    }
    const bool spilled = spills(slot) && slot_room(slot) == 0;
    if (!grown || spilled || !used_[static_cast<std::size_t>(slot)] || !counts_now(slot)) continue;
    leave_of(slot, {});
    some = true;
  }
  return some;
}

bool Store::spill_one() {
  if (spilling_) return false;
  struct Spilling {
    Store& store;
    const bool beside;
    explicit Spilling(Store& of) : store(of), beside(std::exchange(of.beside_, false)) { store.spilling_ = true; }
    ~Spilling() { store.spilling_ = false, store.beside_ = beside; }
  } const until_the_end(*this);
  int chosen = next_to_spill();
  if (chosen < 0 && count_grown()) chosen = next_to_spill();
  for (; chosen >= 0; chosen = next_to_spill()) {
    if (slot_room(chosen) > 0) end_reloads();  // a page that is on its way down has no copy yet
    const std::optional<int> room = room_after_spill(chosen);
    if (!room) continue;  // nothing has come back to leave; the count says so now
    spill(chosen, *room);
    ++spill_rounds_;
    const std::vector<std::int32_t> one{chosen};
    bool fits = true;
    for (int layer = 0; layer < options_.shape.layers; ++layer)
      if (placed_[layer_slot(layer, chosen)]) fits = fits && place_pages(spare_edit(layer, one), one).fit == Fit::ok;
    if (*room > 0) leave_of(chosen, {});
    return fits;
  }
  return false;
}

void Store::note_place(const Edit& e, const std::vector<std::int32_t>& slots) {
  if (!e.list.slots || e.rooms) spill_at_once();  // such an edit cannot be carried out later
  if (spills_at_once_ || in_graph_) return;
  Edit& kept = places_[static_cast<std::size_t>(e.layer)];
  if (!kept.list.slots) kept = e;
  kept.when = {};
  for (const int slot : slots)
    if (!placed_[layer_slot(e.layer, slot)] && !spills(slot)) {
      placed_[layer_slot(e.layer, slot)] = true;
      placed_step_[layer_slot(e.layer, slot)] = steps(slot);
      placed_room_[layer_slot(e.layer, slot)] = e.room;
      spare_[layer_slot(e.layer, slot)] = {};
      Edit of_slot = e;
      const std::vector<std::int32_t> one{slot};
      of_slot.list.slots = view(e.layer, one).slots;
      count_spare(of_slot, slot);
    }
}

void Store::forget_place(int layer, int slot) {
  placed_[layer_slot(layer, slot)] = false;
  if (slot_room(slot) > 0) spill(slot);  // the room was that of another prompt
}

Fit Store::recall_all(int layer, int slot) {
  forget_place(layer, slot);
  return recall_layer(layer, slot);
}

void Store::check_levels(const Edit& e, std::int64_t rows) const {
  if (options_.rope == RopeRegime::re_rotate)
    throw Error(Errc::unsupported, "got a store_as edit with rope: re_rotate, wanted another regime", "the cache");
  if (e.levels.extent[0] < rows || e.levels.extent[1] < options_.shape.kv_heads || e.levels.stride[2] != 1)
    bad(e, "got levels of another shape, wanted [row, kv_head, token] contiguous");
}

// Such an edit takes effect at once, on the rows of all layers.
void Store::check_all_layers(const Edit& e) const {
  const bool goes = e.verb == Edit::evict || e.verb == Edit::move || e.verb == Edit::encode || e.verb == Edit::store_as;
  if (!goes || (e.when.kind != Deadline::next_attention && (e.when.kind != Deadline::steps_from_now || e.when.steps)))
    throw Error(Errc::plugin, "got another edit of all layers, wanted evict, move, encode or store_as, at once");
  if (!options_.all_layers)
    throw Error(Errc::plugin, "got an edit of all layers, wanted it of a policy with Needs::all_layers");
}

void Store::check_edit(const Edit& e, std::size_t rows) const {
  const Shape& s = options_.shape;
  if (e.layer < 0 || e.layer >= s.layers) bad(e, "got that layer, wanted 0 to " + std::to_string(s.layers - 1));
  const std::int64_t wanted = static_cast<std::int64_t>(rows);
  const bool of_tokens = e.verb == Edit::evict || e.verb == Edit::evict_rest || e.verb == Edit::evict_surplus ||
                         e.verb == Edit::move || e.verb == Edit::store_as || e.verb == Edit::encode;
  if (of_tokens && packs())
    throw Error(Errc::unsupported,
                "got an edit of tokens with a codec that packs pages on the host, wanted edits of pages",
                "edit of layer " + std::to_string(e.layer));
  if (e.verb == Edit::evict_surplus) return check_surplus(e, wanted);
  if (e.verb == Edit::store_as) return check_levels(e, wanted);
  if (e.verb == Edit::rewrite) return;
  check_archiving(e);
  if (e.verb == Edit::archive) return;
  if (e.verb == Edit::offload && options_.codecs.size() > 1)
    bad(e, "got an offload from a policy with two codecs, wanted its pages on the device alone");
  if (e.list.slots && e.verb != Edit::place && e.verb != Edit::fetch && e.verb != Edit::attend &&
      e.verb != Edit::attend_tokens)
    throw Error(Errc::unsupported, "got a list that lasts in an edit, wanted it only to attend, to place or to fetch",
                "edit of layer " + std::to_string(e.layer));
  const auto& index = e.list.index.extent;
  const auto& count = e.list.count.extent;
  const std::int64_t listed = e.list.slots ? s.max_slots : wanted;
  if (index[0] < listed || count[0] < listed || index[1] < s.kv_heads || count[1] < s.kv_heads)
    bad(e, "got a list of fewer rows or heads than the callback has, wanted [row, kv_head]");
  if (e.verb == Edit::place && !options_.host_pages)
    bad(e, "got a place edit without Needs::host_pages, wanted the policy to ask for it");
  if (e.keys) {
    check_keys(e, options_);
    if (beside_) bad(e, "got factors of keys beside the step, wanted them in select, prefill or finish_prompt");
  }
  if (e.rooms && (e.rooms.extent[0] < wanted || e.rooms.extent[1] < s.kv_heads))
    bad(e, "got rooms of fewer rows or heads than the callback has, wanted [row, kv_head]");
  if (e.order && (e.order.extent[0] < listed || e.order.extent[1] < s.kv_heads || e.order.stride[2] != 1))
    bad(e, std::string("got an order of another shape, wanted [") + (e.list.slots ? "slot" : "row") +
               ", kv_head, page] contiguous");
  if (e.verb == Edit::drop && e.tier == Tier::disk) bad(e, "got a drop on the disk tier, wanted device or host");
  if (e.verb == Edit::encode && (e.codec < 0 || e.codec >= static_cast<int>(options_.codecs.size())))
    bad(e, "got codec " + std::to_string(e.codec) + ", wanted one that the policy declares");
  if (stream_.device() != Device::cpu) return;
  for (std::size_t row = 0; row < rows; ++row)
    for (int head = 0; head < s.kv_heads; ++head)
      if (const std::int32_t n = e.list.count(e.list.at(static_cast<std::int64_t>(row)), head); n < 0 || n > index[2])
        bad(e,
            "got a count of " + std::to_string(n) + ", wanted 0 to " + std::to_string(index[2]) + ", the list's room");
}

void Store::check_surplus(const Edit& e, std::int64_t rows) const {
  const Surplus& s = e.surplus;
  const int heads = options_.shape.kv_heads, columns = static_cast<int>(options_.token_state.size());
  if (s.keep.extent[0] < rows || s.keep.extent[1] < heads)
    bad(e, "got numbers to keep of fewer rows or heads than the callback has, wanted [row, kv_head]");
  if (s.scores && (s.scores.extent[0] < rows || s.scores.extent[1] < heads || s.scores.stride[2] != 1))
    bad(e, "got scores of another shape, wanted [row, kv_head, token] contiguous");
  if (s.column >= columns)
    bad(e, "got column " + std::to_string(s.column) + " of token state, wanted less than " + std::to_string(columns));
}

void Store::check_rewrite(const Edit& e, const std::vector<std::int32_t>& slots) const {
  const Shape& s = options_.shape;
  if (!options_.functional && !options_.rebuilds_keys)
    bad(e, "got a rewrite from a policy without Needs::functional, wanted the policy to ask for it");
  if (!options_.functional && e.side != KvSide::key)
    bad(e, "got a rewrite of values from a policy with Needs::rebuilds_keys, wanted keys alone");
  const auto& extent = e.rows.extent;
  if (extent[0] < std::ssize(slots) || extent[1] < s.kv_heads || (!e.range && extent[2] < max_length(e.layer, slots)) ||
      extent[3] != s.head_dim || e.rows.stride[3] != 1)
    bad(e,
        "got rows of another shape, wanted [row, kv_head, token, head_dim] with every token of the range, head_dim "
        "contiguous");
  if (!e.range) return;
  for (const auto& numbers : {e.range.first, e.range.count})
    if (!numbers || numbers.extent[0] < std::ssize(slots) || numbers.extent[1] < s.kv_heads)
      bad(e, "got a range of fewer rows or heads than the callback has, wanted [row, kv_head]");
  if (stream_.device() != Device::cpu) return;
  for (std::size_t row = 0; row < slots.size(); ++row)
    for (int head = 0; head < s.kv_heads; ++head) {
      const auto r = static_cast<std::int64_t>(row);
      const int n = length(e.layer, slots[row], head);
      if (!e.range.fits(r, head, n) || e.range.count(r, head) > extent[2])
        bad(e, "got a range of " + std::to_string(e.range.count(r, head)) + " tokens from place " +
                   std::to_string(e.range.first(r, head)) + ", wanted places below " + std::to_string(n) +
                   " and at most " + std::to_string(extent[2]) + ", the tokens of the rows");
    }
}

void Store::check_archiving(const Edit& e) const {
  if (e.verb == Edit::offload && options_.archive)
    bad(e, "got an offload from a policy with Needs::archive, wanted archive alone: its pages stay on the device");
  if (e.verb != Edit::archive && e.verb != Edit::fetch) return;
  if (!options_.archive)
    bad(e, std::string("got ") + (e.verb == Edit::fetch ? "a fetch" : "an archive edit") +
               " without Needs::archive, wanted the policy to ask for it");
  if (e.verb == Edit::archive && in_graph_)
    bad(e, "got an archive edit in a decode step of a policy that promises capturable(true), wanted it in prefill");
  if (e.verb == Edit::fetch && e.when.kind == Deadline::this_attention)
    bad(e, "got a fetch for this attention, wanted next_attention or later");
}

Store::Pending Store::pending(const Edit& e, int slot, int due, const std::int32_t* index, const std::int32_t* count,
                              const std::uint8_t* marks, Stream device, Stream through) {
  const std::int64_t heads = e.list.count.extent[1], room = e.list.index.extent[2];
  const auto bytes = [](std::int64_t n) { return static_cast<std::size_t>(n) * sizeof(std::int32_t); };
  Pending p{e, slot, due, StreamMemory(device, bytes(heads * room)), StreamMemory(device, bytes(heads)), {}, false};
  copy_memory(p.index.as<>(), index, p.index.bytes(), through);
  copy_memory(p.count.as<>(), count, p.count.bytes(), through);
  p.edit.list.slots = nullptr;
  p.edit.list.index = View<std::int32_t, 3>::dense(p.index.as<std::int32_t>(), {1, heads, room});
  p.edit.list.count = View<std::int32_t, 2>::dense(p.count.as<std::int32_t>(), {1, heads});
  if (!marks) return p;
  p.heads = StreamMemory(device, static_cast<std::size_t>(heads));
  copy_memory(p.heads.as<>(), marks, p.heads.bytes(), through);
  p.edit.heads = Heads::flagged({p.heads.as<std::uint8_t>(), {1, heads}, {0, 1}});
  return p;
}

// Rows have their own clocks, so each row's edit waits on its own.
void Store::defer(const Edit& e, const std::vector<std::int32_t>& slots) {
  check_waiting(e);
  const Shape& s = options_.shape;
  const IndexList& list = e.list;
  Edit of_row = e;
  of_row.list.index.extent[1] = of_row.list.count.extent[1] = s.kv_heads;
  StreamMemory marks;
  if (has_condition(e.heads)) {
    marks = StreamMemory(stream_, static_cast<std::size_t>(s.max_slots * s.kv_heads));
    mark_heads(e.heads, slots, HeadFlags::dense(marks.as<std::uint8_t>(), {s.max_slots, s.kv_heads}));
  }
  const int steps_to_go = e.when.kind == Deadline::steps_from_now ? e.when.steps : 0;
  if (e.when.kind != Deadline::sequence) of_row.when = {};
  for (std::size_t row = 0; row < slots.size(); ++row) {
    const auto r = list.slots ? slots[row] : static_cast<std::int64_t>(row);
    Pending& p = pending_.emplace_back(
        pending(of_row, slots[row], steps(slots[row]) + steps_to_go, list.index.data + r * list.index.stride[0],
                list.count.data + r * list.count.stride[0],
                marks ? marks.as<std::uint8_t>() + slots[row] * s.kv_heads : nullptr, stream_, stream_));
    if (list.slots) p.edit.list = list, p.lasts = true;
  }
  if (marks) synchronize(stream_);  // the marks are freed
}

// A graph's copies go to memory that it finds there again.
void Store::hold(const Edit& e, const std::vector<std::int32_t>& slots) {
  check_waiting(e);
  const Shape& s = options_.shape;
  const bool copied = !e.list.slots;
  const std::int64_t last = static_cast<std::int64_t>(slots.size()) - 1,
                     index = copied ? last * e.list.index.stride[0] + s.kv_heads * e.list.index.extent[2] : 0,
                     count = copied ? last * e.list.count.stride[0] + s.kv_heads : 0, marks = s.max_slots * s.kv_heads;
  if (held_count_ == held_.size()) held_.emplace_back();
  Held& h = held_[held_count_];
  const auto bytes = [](std::int64_t numbers) { return static_cast<std::size_t>(numbers) * sizeof(std::int32_t); };
  if (const std::size_t all = bytes(index + count) + static_cast<std::size_t>(marks); h.memory.bytes() < all) {
    h.memory = StreamMemory(stream_, all);
    ++held_moves_;
  }
  h.edit = e;
  if (e.when.kind != Deadline::sequence) h.edit.when = {};
  h.slots = slots;
  if (copied) {
    h.edit.list.index.data = h.memory.as<std::int32_t>();
    h.edit.list.count.data = h.memory.as<std::int32_t>() + index;
    copy_memory(h.edit.list.index.data, e.list.index.data, bytes(index), working());
    copy_memory(h.edit.list.count.data, e.list.count.data, bytes(count), working());
  }
  if (has_condition(e.heads)) {
    const HeadFlags out =
        HeadFlags::dense(h.memory.as<std::uint8_t>() + bytes(index + count), {s.max_slots, s.kv_heads});
    mark_heads(e.heads, slots, out);
    h.edit.heads = Heads::flagged(out);
  }
  ++held_count_;
}

// What a place edit for Deadline::sequence plans must not be edited before its copies are done, so it comes last.
Applied Store::end_step() {
  Applied total;
  if (held_count_ == 0) return total;
  settle();
  for (const bool last : {false, true})
    for (std::size_t i = 0; i < held_count_ && total.fit == Fit::ok; ++i)
      if ((held_[i].edit.when.kind == Deadline::sequence) == last) {
        total += carry_out(held_[i].edit, held_[i].slots);
        workspace().reset();
      }
  held_count_ = 0;
  return total;
}

bool Store::waits_for_sequence(int layer, const std::vector<std::int32_t>& slots) const {
  const auto is = [&](const Edit& e) { return e.when.kind == Deadline::sequence && e.layer == layer; };
  return std::any_of(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(held_count_),
                     [&](const Held& h) { return is(h.edit); }) ||
         std::any_of(pending_.begin(), pending_.end(), [&](const Pending& p) {
           return is(p.edit) && std::find(slots.begin(), slots.end(), p.slot) != slots.end();
         });
}

// A page of a grouped codec keeps its tokens.
void Store::check_grouped(const Edit& e, const std::vector<std::int32_t>& slots) {
  if (options_.codecs.size() < 2 || !options_.codecs[1].grouped()) return;
  if (e.verb == Edit::encode && e.codec > 0)
    for (const int slot : slots) encoded_[layer_slot(e.layer, slot)] = true;
  const bool changes = e.verb == Edit::evict || e.verb == Edit::evict_rest || e.verb == Edit::evict_surplus ||
                       e.verb == Edit::move || e.verb == Edit::store_as || e.verb == Edit::fetch;
  if (!changes) return;
  if (e.verb == Edit::store_as || in_graph_ ||
      std::any_of(slots.begin(), slots.end(), [&](int slot) { return encoded_[layer_slot(e.layer, slot)]; }))
    throw Error(Errc::unsupported,
                "got an edit that replaces tokens of a cache whose codec has groups or axis channel, wanted it before "
                "the first encode: such pages keep their tokens",
                "edit of layer " + std::to_string(e.layer));
}

bool Store::leaves_later(int layer) const {
  return std::any_of(leaving_.begin(), leaving_.end(), [&](const Leaving& l) { return l.edit.layer == layer; });
}

void Store::end_layers() {
  write_late_state();
  if (leaving_.empty()) return;
  const PartTimer timer(Part::compact);
  evict_together(std::exchange(leaving_, {}));
}

Applied Store::carry_out(const Edit& e, const std::vector<std::int32_t>& slots, ops::Finding* nan) {
  check_grouped(e, slots);
  write_late_state();
  if (leaves_later(e.layer)) end_layers();
  const PartTimer timer(moves_pages(e.verb) ? Part::recall : Part::compact);
  Applied one;
  switch (e.verb) {
    case Edit::evict:
    case Edit::evict_rest: one = keep_tokens(e, slots); break;
    case Edit::evict_surplus: one = evict_surplus(e, slots, nan); break;
    case Edit::move: one = swap_tokens(e, slots); break;
    case Edit::drop:
      if (e.tier == Tier::device) spill_at_once();
      [[fallthrough]];
    case Edit::offload:
    case Edit::recall:
    case Edit::encode: one = edit_pages(e, slots); break;
    case Edit::place: one = any_spills(slots) ? place_pages(e, slots) : Applied{}; break;
    case Edit::store_as: one = store_levels(e, slots); break;
    case Edit::archive: one = archive_heads(e, slots); break;
    case Edit::fetch: one = fetch_tokens(e, slots); break;
    case Edit::rewrite: one = rewrite_rows(e, slots); break;
    default: bad(e, "got an unknown verb");
  }
  fired_ += one.changed > 0;
  return one;
}

Stream Store::begin_beside() {
  const Stream s = fork();
  if (!beside_workspace_) beside_workspace_ = std::make_unique<StoreWorkspace>(ledger_, s, options_.scratch_limit);
  beside_workspace_->in_graph(in_graph_);
  beside_ = true;
  return s;
}

void Store::end_beside() {
  beside_workspace_->reset();
  forked();
  beside_ = false;
}

Applied Store::apply(const std::vector<Edit>& edits, const std::vector<std::int32_t>& slots, ops::Finding* nan,
                     bool last) {
  Applied total;
  for (std::size_t i = 0; i < edits.size(); ++i) {
    const Edit& e = edits[i];
    if (e.verb == Edit::attend || e.verb == Edit::attend_tokens) continue;
    if (e.layer == Edit::all_layers) {
      end_layers();
      check_all_layers(e);
      const std::vector<std::int32_t> all = in_all_layers(slots);
      if (steps_down(edits, i)) {
        std::array<Edit, 3> three = {e, edits[i + 1], edits[i + 2]};
        for (Edit& one : three) {
          check_all_layers(one);
          one.layer = 0;
          check_edit(one, all.size());
          check_grouped(one, all);
        }
        const PartTimer timer(Part::compact);
        if (const std::optional<Applied> done = step_down(three, all)) {
          total += *done;
          if (total.fit != Fit::ok) break;
          i += 2;
          continue;
        }
      }
      Edit flat = e;
      flat.layer = 0;
      check_edit(flat, all.size());
      total += carry_out(flat, all);
      if (total.fit != Fit::ok) break;
      continue;
    }
    check_edit(e, slots.size());
    if (e.verb == Edit::rewrite) check_rewrite(e, slots);
    if (e.when.kind == Deadline::sequence && (e.verb != Edit::place || !options_.pauses))
      bad(e, "got Deadline::sequence, wanted it of a place edit of a policy with Needs::pauses and Needs::host_pages");
    if (e.when.kind == Deadline::sequence && waits_for_sequence(e.layer, slots))
      bad(e, "got a second place edit for Deadline::sequence, wanted one of a layer in a step");
    if (e.verb == Edit::place) note_place(e, slots);
    const bool later = e.when.kind == Deadline::steps_from_now && e.when.steps > 0;
    if (in_graph_ && later)
      bad(e,
          "got an edit of a later step from a policy that promises capturable(true), wanted edits for this step or "
          "its end");
    if (later || e.when.kind == Deadline::next_step || e.when.kind == Deadline::sequence) {
      in_graph_ ? hold(e, slots) : defer(e, slots);
      continue;
    }
    if (last && in_graph_ && e.verb == Edit::evict_surplus && i + 1 == edits.size() && may_leave_later(e)) {
      check_grouped(e, slots);
      if (leaves_later(e.layer)) end_layers();
      leaving_.push_back({e, slots, nan});
      total += {Fit::ok, -1};
      continue;
    }
    total += carry_out(e, slots, nan);
    if (total.fit != Fit::ok) break;
  }
  applied();
  return total;
}

// Whether edits i to i + 2 are those of Store::step_down.
bool Store::steps_down(const std::vector<Edit>& edits, std::size_t i) {
  if (edits.size() - i < 3) return false;
  constexpr Edit::Verb verbs[] = {Edit::move, Edit::evict, Edit::encode};
  for (std::size_t k = 0; k < 3; ++k) {
    const Edit& e = edits[i + k];
    if (e.verb != verbs[k] || e.layer != Edit::all_layers || e.list.index.extent[2] != (k == 0 ? 2 : 1)) return false;
  }
  return edits[i + 2].codec == 1;
}

bool Store::waits_for_pages(int slot) const {
  return std::any_of(pending_.begin(), pending_.end(),
                     [&](const Pending& p) { return p.slot == slot && p.edit.when.kind == Deadline::sequence; });
}

Fit Store::bring_pages(int slot) {
  const std::vector<std::int32_t> one{slot};
  for (std::size_t i = 0; i < pending_.size();) {
    const Pending& p = pending_[i];
    if (p.slot != slot || p.edit.when.kind != Deadline::sequence) {
      ++i;
      continue;
    }
    Edit e = p.edit;
    if (p.lasts) e.list.slots = view(e.layer, one).slots;
    if (carry_out(e, one).fit != Fit::ok) return Fit::out_of_memory;
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return Fit::ok;
}

Applied Store::advance(int slot, int tokens, bool decode) {
  position_[static_cast<std::size_t>(slot)] += tokens;
  const int now = step_[static_cast<std::size_t>(slot)] += decode;
  Applied total;
  const std::vector<std::int32_t> one{slot};
  for (const bool last : {false, true}) {
    if (last && keeps_reloads()) break;
    for (std::size_t i = 0; i < pending_.size();) {
      const Pending& p = pending_[i];
      if (p.slot != slot || p.due > now || (p.edit.when.kind == Deadline::sequence) != last) {
        ++i;
        continue;
      }
      Pending due = std::move(pending_[i]);
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
      if (due.lasts) due.edit.list.slots = view(due.edit.layer, one).slots;
      total += carry_out(due.edit, one);
    }
  }
  advanced(decode);
  return total;
}

IndexList Store::resolve_attend(const Edit& e, const std::vector<std::int32_t>& slots, Workspace& w) {
  check_edit(e, slots.size());
  return attend_list(e, slots, w);
}

void Store::check_codecs(const StoreOptions& o) {
  if (o.codecs.empty() || o.codecs.size() > 2)
    throw Error(Errc::config,
                "got a policy with " + std::to_string(o.codecs.size()) +
                    " codecs, wanted one or two: one number a head says which of its pages have the second");
  if (o.codecs.size() == 2 && (o.host_pages || o.archive))
    throw Error(
        Errc::unsupported,
        "got two codecs with pages on the host, wanted one codec, or pages on the device: a page that comes back "
        "would have the first codec, in the place of one of the second");
}

std::vector<std::int32_t> Store::in_all_layers(const std::vector<std::int32_t>& slots) const {
  std::vector<std::int32_t> all;
  for (int layer = 0; layer < options_.shape.layers; ++layer)
    for (const std::int32_t slot : slots) all.push_back(layer * options_.shape.max_slots + slot);
  return all;
}

PagedKv Store::paged(const PageEntry* entries, const std::int32_t* lengths, const std::int32_t* lower_pages,
                     const std::int32_t* slots, std::size_t rows, int layers) const {
  const Shape& s = options_.shape;
  const std::int64_t all = std::int64_t{layers} * s.max_slots;
  PagedKv kv;
  kv.table = View<const PageEntry, 3>::dense(entries, {all, s.kv_heads, static_cast<std::int64_t>(pages_per_head_)});
  kv.length = View<const std::int32_t, 2>::dense(lengths, {all, s.kv_heads});
  if (lower_pages) kv.lower_pages = View<const std::int32_t, 2>::dense(lower_pages, {all, s.kv_heads});
  kv.slots = slots;
  kv.rows = static_cast<int>(rows);
  kv.kv_heads = s.kv_heads;
  kv.head_dim = s.head_dim;
  kv.page_size = s.page_size;
  kv.rope = options_.rope;
  kv.rope_table = options_.rope_table;
  return kv;
}

Summaries Store::summaries_at(const std::byte* layer) const {
  Summaries out;
  out.kind = options_.summary;
  out.dtype = options_.shape.dtype;
  out.bits = options_.summary_bits;
  if (options_.summary == Summary::none) return out;
  out.page_stride = summary_bytes_;
  out.head_stride = summary_bytes_ * static_cast<std::int64_t>(pages_per_head_);
  out.slot_stride = out.head_stride * options_.shape.kv_heads;
  out.data = layer;
  return out;
}

std::vector<std::int32_t> Store::positions(int layer, int slot, int head) const {
  std::vector<std::int32_t> out = positions_by_place(layer, slot, head);
  std::sort(out.begin(), out.end());
  return out;
}

PageLayout frame_layout(const StoreOptions& o, const CodecSpec& codec) {
  return ops::make_layout(o.shape.dtype, codec, o.shape.page_size, o.shape.head_dim,
                          static_cast<int>(o.token_state.size()));
}

StoreBytes store_bytes(const StoreOptions& options, Device device) {
  return device == Device::cuda ? CudaStore::bytes(options) : CpuStore::bytes(options);
}

void check_store(const StoreOptions& options, Device device) {
  check_archive(options);
  check_functional(options);
  check_copies(options);
  check_packing(options);
  device == Device::cuda ? CudaStore::check(options) : CpuStore::check(options);
  const bool here = device == Device::cpu || cuda_backend();
  if (takes_host_tier(options)) check_host_tier(options, here ? -1 : std::numeric_limits<std::int64_t>::max());
}

std::unique_ptr<Store> make_store(const StoreOptions& options, Stream stream) {
  if (stream.device() == Device::cuda) return std::make_unique<CudaStore>(options, stream);
  if (takes_host_tier(options)) check_host_tier(options);
  return std::make_unique<CpuStore>(options);
}

}  // namespace kvlab
