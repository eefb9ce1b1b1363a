// The paged KV store: the only mutator of the cache. One table per tier, [layer, slot, kv_head, logical page] ->
// PageEntry. CpuStore (cpu_store.hpp) and CudaStore (cuda_store.hpp) keep it in the memory of their device.
//
// Invariants (checked by check_invariants): the pages of a head are full except the last; a page has a frame in at
// least one tier; a frame belongs to one page; the ledger's KV bytes equal the frames handed out. A lower copy that the
// upper page outgrew is freed, so a host frame is valid whenever it exists.
//
// With StoreOptions::archive a third table holds copies of heads. Its pages take frames of the host, and it has lengths
// of its own. No page of the cache lies on the host then.
#pragma once
#include <kvlab/edits.hpp>
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/stream_memory.hpp"
#include "store/ledger.hpp"
#include "store/spare.hpp"
#include "store/workspace.hpp"

namespace kvlab {

namespace ops {
struct Finding;
}

// When the place edits of a sequence take effect. Under `pressure` all its pages stay on the device until frames run
// short. Then it spills: its place edits are carried out, from the latest on. It spills in parts: each time half of the
// pages that could leave do, and the others stay as long as the edits' `room` were so large.
enum class Spill : std::uint8_t { always, pressure };

struct StoreOptions {
  Shape shape;
  std::vector<CodecSpec> codecs = {CodecSpec{}};  // one or two; see Policy::codecs
  CodecSpec host_codec;
  RopeRegime rope = RopeRegime::original;
  RopeTable rope_table;
  Summary summary = Summary::none;
  int summary_bits = 16;  // or 8
  std::vector<std::string> token_state;
  std::int64_t device_limit = -1, host_limit = -1;  // bytes of frames; -1 = none
  std::int64_t scratch_limit = -1;                  // bytes of a workspace's scratch; -1 = none
  bool host_pages = false;                          // take the host tier at the start; place edits need it
  bool pauses = false;                              // with host_pages: allow place edits for Deadline::sequence
  // On the CPU such edits are carried out after as many later steps or chunks, or when their row is awaited; 0 = at the
  // end of their own step. Tests see rows wait so. On a GPU the copies' own time decides.
  int reload_steps = 0;
  bool archive = false;   // take the host tier for archives; archive and fetch need it
  bool offloads = false;  // take it at the start for offload; else the first one does
  Spill spill = Spill::always;
  // On a GPU the host reads the list of pages that a place edit moves, and copies each with a memcpy. It is for
  // comparisons: the host waits for the device in each edit.
  bool copy_by_host = false;
  bool keeps_memory = false;     // on the CPU memory of pages that leave stays for others, until the store goes
  bool all_layers = false;       // view_all, and edits of all layers
  bool planned_on_host = false;  // see Needs::planned_on_host
  bool functional = false;       // rewrite needs it; see Needs::functional
  bool rebuilds_keys = false;    // or it needs this; see Needs::rebuilds_keys
};

enum class Fit : std::uint8_t { ok, out_of_memory };  // the store returns out_of_memory and does not throw it

// The result of edits.
struct Applied {
  Fit fit = Fit::ok;
  std::int64_t changed = 0;  // tokens or pages that an edit really changed; -1 if only the device knows yet

  Applied& operator+=(const Applied& o) {
    if (o.fit != Fit::ok) fit = o.fit;
    changed = changed < 0 || o.changed < 0 ? -1 : changed + o.changed;
    return *this;
  }
};

class CpuStore;
class CudaStore;

// The interface for the engine, the executor and measurement. All work runs on one stream. A call marked "exact" waits
// for the stream.
class Store {
 public:
  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Returns this store for its device's executor; null on the other device.
  virtual CpuStore* cpu() { return nullptr; }
  virtual CudaStore* cuda() { return nullptr; }

  const Shape& shape() const { return options_.shape; }
  const StoreOptions& options() const { return options_; }
  Stream stream() const { return stream_; }  // views point to memory of its device

  int open();                        // returns a free slot, or -1
  virtual void close(int slot) = 0;  // frees every frame and clears the slot's state

  // Returns a view over the rows' slots, in memory of the stream's device; PagedKv::layouts is host memory. On the CPU
  // the view borrows `slots`. On CUDA it ends when a caller asks for another list of as many slots.
  virtual PagedKv view(int layer, const std::vector<std::int32_t>& slots, Tier tier = Tier::device) const = 0;
  // The rows' slots of all layers, as Step::pages has them. Needs StoreOptions::all_layers.
  virtual PagedKv view_all(const std::vector<std::int32_t>& slots) const = 0;
  virtual Summaries summaries(int layer) const = 0;
  virtual int length(int layer, int slot, int head) const = 0;    // exact
  virtual int archived(int layer, int slot, int head) const = 0;  // tokens of the head's archive; exact
  // Returns the length of the longest head of these slots; on CUDA an upper bound of it.
  virtual int max_length(int layer, const std::vector<std::int32_t>& slots) const = 0;

  // Text tokens and decode steps that the slot has seen.
  std::int32_t position(int slot) const { return position_[static_cast<std::size_t>(slot)]; }
  std::int32_t steps(int slot) const { return step_[static_cast<std::size_t>(slot)]; }
  // Runs once per chunk or step, after the last layer. It carries out the edits that fall due and returns their result.
  Applied advance(int slot, int tokens, bool decode);

  // Applies the edits of one callback over `slots` (the callback's rows), in their order. Edits for the next step or a
  // later one wait for advance(), in a graph's step for end_step(); the others run now. The caller keeps attend edits.
  // Lists are memory of the stream's device. A wrong list throws Errc::plugin: at once on the CPU, with the next exact
  // answer on CUDA. nan: memory of that device where evict_surplus notes NaN among the ranks; null = NaN ranks below
  // all.
  // last: nothing of this step looks at these layers after the callback, until end_layers(). In a graph's step a GPU
  // then leaves an evict_surplus at the end of `edits` for that call, if it goes by age or by a column and its numbers
  // are no scratch. An exact answer and another edit of the layer carry it out before.
  Applied apply(const std::vector<Edit>& edits, const std::vector<std::int32_t>& slots, ops::Finding* nan = nullptr,
                bool last = false);
  // Runs once per decode step, behind the last layer and before what looks at all layers: the evictions that wait run,
  // those of layers that are alike in one launch.
  void end_layers();
  // Says that a graph holds this step's work, or is to hold it, until the next call. Work that needs the host then
  // throws Errc::plugin: edits that wait for a step after this one, and uploads.
  void in_graph(bool yes) { in_graph_ = yes, held_count_ = 0, leaving_.clear(), workspace_.in_graph(yes); }
  bool in_graph() const { return in_graph_; }
  // Runs once per decode step, after the last layer's edits: carries out those that wait for the end of a graph's step.
  Applied end_step();
  // Runs after a decode step, before its results are read: so the host knows with them which rows have reloads.
  virtual void note_reloads() {}
  // Runs after a decode step or a prompt's chunk: copies for Deadline::sequence begin. They run beside later steps.
  virtual void start_reloads() {}
  // Whether such copies of the slot are under way.
  virtual bool reloading(int /*slot*/) { return false; }
  // The stream's later work runs after such copies of these slots. out_of_memory: their pages find no frames.
  virtual Fit await_reloads(const std::vector<std::int32_t>& /*slots*/) { return Fit::ok; }
  // Brings every page of the slot's layer back to the device, for the next part of its prompt.
  Fit recall_all(int layer, int slot);
  // The same of a prompt that reads listed pages alone. Pages stay where they are.
  void forget_place(int layer, int slot);
  // Whether place edits of one of the slots take effect.
  bool any_spills(const std::vector<std::int32_t>& slots) const;
  // Ends a step: later work runs after the copies that place edits started beside the step.
  virtual void settle() {}

  // Returns where an op may note, until the next call, that a list to attend to is final; null = nobody looks.
  virtual ops::FinalList* final_list() { return nullptr; }
  // Returns the pages (attend) or tokens (attend_tokens) that attention reads: the edit's list, in any order, plus the
  // pins. The result is scratch or the edit's own list; it ascends and has no repeats.
  IndexList resolve_attend(const Edit& edit, const std::vector<std::int32_t>& slots, Workspace& w);

  // save returns a sequence's whole cache, with token state, tiers, counters, waiting edits and whether it has spilled.
  // restore replaces the contents of any open slot by such bytes, on either device. Where frames run short, others
  // spill. It throws Errc::data for damaged bytes or those of another kind of store. A slot whose restore threw or did
  // not fit is empty.
  virtual std::vector<std::byte> save(int slot) const = 0;
  virtual Fit restore(int slot, const std::vector<std::byte>& snapshot) = 0;
  // A sequence's whole cache in host memory: slot 0 of a store of its own, with as many bytes of each tier. set_aside
  // copies a slot. bring_back replaces the contents of an open slot; if they do not fit, the slot is empty then. The
  // pair is faster than save and restore, whose bytes are for a file.
  using Aside = std::shared_ptr<const Store>;
  virtual Aside set_aside(int slot) const = 0;
  virtual Fit bring_back(int slot, const Aside& cache) = 0;

  // Counts the edits of apply and advance that changed something, and the attends that leave something out; exact. An
  // edit that waited counts once for each row, but once for all rows of a step that a graph may hold.
  virtual std::int64_t fired() const { return fired_; }

  // Both return the text positions in the cache of one head, in ascending order or place by place; exact.
  std::vector<std::int32_t> positions(int layer, int slot, int head) const;
  virtual std::vector<std::int32_t> positions_by_place(int layer, int slot, int head) const = 0;
  // Numbers of text positions in the order of places: out [slot of `slots`, KV head, place] is of [the same, KV head,
  // that place's text position], and 0 beyond the end of either. Both are memory of the store's device. Runs on its
  // stream, and the host does not wait.
  virtual void by_place(int layer, std::span<const std::int32_t> slots, View<const float, 3> of,
                        View<float, 3> out) const = 0;

  virtual Ledger& ledger() = 0;  // exact
  virtual const Ledger& ledger() const = 0;
  virtual std::int64_t page_bytes(Tier tier) const = 0;  // bytes of frames in use, which the limits bound; exact
  // Bytes of device pages that leave as soon as frames run short, as counted at the end of each prompt; exact. Pages of
  // a sequence for which the host has no room do not count.
  virtual std::int64_t spare_bytes() const = 0;
  // Returns whether the frames suffice for one more token of every row, if spare pages leave. Waits for the device only
  // where its bounds do not tell.
  bool room_for_step(const std::vector<std::int32_t>& slots) const;
  // Pages that the host must take before the slot's spare pages may leave; an upper bound.
  std::int64_t pages_to_write(int slot) const;
  // Host frames that no page takes yet, less those that sequences with spare pages will take; exact.
  std::int64_t host_room() const;
  std::int64_t spill_rounds() const { return spill_rounds_; }  // spills so far; a part is one
  // Most bytes of pages on the device: the options' limit, on a GPU at most a share of the memory that was free at the
  // start. -1 = no limit, or enough for all slots.
  virtual std::int64_t page_limit() const { return options_.device_limit; }
  // The workspace of the stream that work goes to.
  StoreWorkspace& workspace() { return beside_ ? *beside_workspace_ : workspace_; }
  // Blocks that workspaces allocated. Each voids addresses of earlier callbacks.
  std::int64_t workspace_moves() const {
    return workspace_.moves() + (beside_workspace_ ? beside_workspace_->moves() : 0) + held_moves_;
  }
  // Of a step that a graph holds or is to hold: work that edits give, until end_beside, runs beside the step's later
  // work, and settle() joins it. It takes place and fetch edits alone. Returns its stream: on the CPU the store's own.
  Stream begin_beside();
  void end_beside();
  void leave_beside() { beside_ = false; }    // where an error ends it
  virtual void protect_host(bool on) = 0;     // makes any access of the host tier fault; Errc::unsupported on CUDA
  virtual void check_invariants() const = 0;  // throws Errc::internal that names the broken invariant

 protected:
  bool packs() const { return options_.host_codec.packs; }  // full pages on the host are packed

  // A waiting edit of one slot. The store owns copies of its list, dense [1, kv_head, room], unless it lasts, and of
  // marks of the heads that it means, [kv_head] u8; none = all heads.
  struct Pending {
    Edit edit;
    int slot = 0;
    int due = 0;  // the first advance() that leaves the slot with as many decode steps carries it out
    StreamMemory index, count, heads;
    bool lasts = false;  // edit.list has all slots
  };

  // The verbs. apply() has checked the edit and the shape of its list.
  virtual Applied keep_tokens(const Edit& e, const std::vector<std::int32_t>& slots) = 0;  // evict, evict_rest
  virtual Applied evict_surplus(const Edit& e, const std::vector<std::int32_t>& slots, ops::Finding* nan) = 0;
  // An evict_surplus that waits for those of other layers.
  struct Leaving {
    Edit edit;
    std::vector<std::int32_t> slots;
    ops::Finding* nan = nullptr;
  };
  virtual bool may_leave_later(const Edit& /*e*/) const { return false; }
  virtual void evict_together(const std::vector<Leaving>& /*all*/) {}  // in the order of the callbacks
  virtual Applied swap_tokens(const Edit& e, const std::vector<std::int32_t>& slots) = 0;  // move
  virtual Applied edit_pages(const Edit& e,
                             const std::vector<std::int32_t>& slots) = 0;  // offload, recall, drop, encode
  // Three edits of all layers as one: a move of a pair, an evict of a token and an encode of a page to the second
  // codec, each of a head at most. nullopt = the device carries them out one by one.
  virtual std::optional<Applied> step_down(const std::array<Edit, 3>& /*edits*/,
                                           const std::vector<std::int32_t>& /*slots*/) {
    return std::nullopt;
  }
  virtual Applied place_pages(const Edit& e, const std::vector<std::int32_t>& slots) = 0;    // place
  virtual Applied store_levels(const Edit& e, const std::vector<std::int32_t>& slots) = 0;   // store_as
  virtual Applied archive_heads(const Edit& e, const std::vector<std::int32_t>& slots) = 0;  // archive
  virtual Applied fetch_tokens(const Edit& e, const std::vector<std::int32_t>& slots) = 0;   // fetch
  virtual Applied rewrite_rows(const Edit& e, const std::vector<std::int32_t>& slots) = 0;   // rewrite
  // Numbers the slots of all layers as Step::pages does.
  std::vector<std::int32_t> in_all_layers(const std::vector<std::int32_t>& slots) const;
  // The same edit for one slot: sets spare_ of its layer and slot.
  virtual void count_spare(const Edit& e, int slot) = 0;
  virtual Fit recall_layer(int layer, int slot) = 0;
  virtual void mark_spilled(int /*slot*/, int /*room*/) {}
  // Writes for each head of the slots whether it is meant. out: [slot, kv_head] memory of the stream's device.
  virtual void mark_heads(const Heads& heads, const std::vector<std::int32_t>& slots, HeadFlags out) = 0;
  virtual std::int64_t free_frames(Tier tier) const = 0;  // a lower bound; exact after exact()
  virtual void exact() const {}
  virtual bool end_reloads() const { return false; }  // waits for all; whether exact numbers may have changed
  virtual Stream fork() { return stream_; }
  virtual Stream working() const { return stream_; }  // that callbacks give their work to
  virtual void forked() {}
  virtual void applied() {}  // apply() calls it last
  virtual IndexList attend_list(const Edit& e, const std::vector<std::int32_t>& slots, Workspace& w) = 0;
  virtual void advanced(bool /*decode*/) {}  // advance() calls it last
  // Whether advance() leaves place edits for Deadline::sequence to bring_pages().
  virtual bool keeps_reloads() const { return false; }
  bool waits_for_pages(int slot) const;
  Fit bring_pages(int slot);  // carries them out; one that does not fit waits on

  // Makes a waiting edit of `slot` whose list is memory of `device`. The stream `through` copies index, count and, if
  // the edit has some, the marks of heads.
  static Pending pending(const Edit& e, int slot, int due, const std::int32_t* index, const std::int32_t* count,
                         const std::uint8_t* heads, Stream device, Stream through);
  static std::int64_t summary_bytes(const StoreOptions& options);  // of a page
  void count_fetched(const PageLayout& l, std::int64_t tokens);    // in the ledger
  bool spills_at_once() const { return spills_at_once_; }
  // Whether place edits of the slot take effect.
  bool spills(int slot) const { return spills_at_once_ || spilled_[static_cast<std::size_t>(slot)]; }
  // Spills a part of a sequence: of one that has spilled in part, else of that with the most spare pages. Returns false
  // if no page may leave.
  bool spill_one();
  // Place edits of the slot take effect from now on. They leave at least `room` pages of a head on the device.
  void spill(int slot, int room = 0);
  int slot_room(int slot) const { return slot_room_[static_cast<std::size_t>(slot)]; }
  void spill_at_once();  // and those of all slots
  // Whether a sequence has spilled, and what a spill of it would do. A saved cache has it.
  struct SpillState {
    struct OfLayer {
      bool placed = false;
      std::int32_t step = 0, room = 0;
      Spare spare;
    };
    bool spilled = false;
    std::int32_t room = 0;
    std::vector<OfLayer> layers;
  };
  SpillState spill_state(int slot) const;
  void set_spill_state(int slot, const SpillState& s);
  // A sequence with such numbers came back, to go on. below: it has pages on the host alone. It spills as a whole then,
  // unless it had spilled, and where this store has not seen the place edits that a spill would carry out.
  void resume_spilling(int slot, bool below);
  std::int64_t spare_pages(int slot) const;
  std::int64_t spare_pages() const;            // of all slots that the host has room for
  std::int64_t left_to_write(int slot) const;  // pages_to_write before a slot's first spill
  // The next one for spill(); none = no page can leave.
  std::optional<int> room_after_spill(int slot);
  std::size_t layer_slot(int layer, int slot) const {
    return static_cast<std::size_t>(layer * options_.shape.max_slots + slot);
  }
  [[noreturn]] static void bad(const Edit& e, const std::string& what);  // throws Errc::plugin
  void forget(int slot);  // clears the slot's counters and waiting edits, and frees the slot

  // Returns a view of the store's shape, or with `layers` of so many layers as one. The caller sets base and layouts.
  // lower_pages: null = there is one codec.
  PagedKv paged(const PageEntry* entries, const std::int32_t* lengths, const std::int32_t* lower_pages,
                const std::int32_t* slots, std::size_t rows, int layers = 1) const;
  Summaries summaries_at(const std::byte* layer) const;
  static void check_codecs(const StoreOptions& options);  // throws Errc::config or Errc::unsupported

  Store(const StoreOptions& options, Stream stream);

  std::size_t head_index(int layer, int slot, int head) const {
    return (static_cast<std::size_t>(layer) * static_cast<std::size_t>(options_.shape.max_slots) +
            static_cast<std::size_t>(slot)) *
               static_cast<std::size_t>(options_.shape.kv_heads) +
           static_cast<std::size_t>(head);
  }

  void note_brought(int slot);  // the slot's cache comes from a snapshot or another store

  StoreOptions options_;
  Stream stream_;
  std::size_t pages_per_head_ = 0;
  std::int64_t summary_bytes_;  // of a page
  std::vector<std::int32_t> position_, step_;
  std::vector<bool> used_;
  std::vector<bool> encoded_;  // [layer, slot] may have pages of a grouped codec
  std::vector<Pending> pending_;
  std::int64_t fired_ = 0;  // edits whose change the host saw
  Ledger ledger_;
  StoreWorkspace workspace_;
  bool in_graph_ = false;
  bool beside_ = false;  // between begin_beside and end_beside
  std::unique_ptr<StoreWorkspace> beside_workspace_;
  // The pages by which a step of these rows may grow: of appends, at most and exactly, and of place edits.
  std::int64_t fresh_pages(const std::vector<std::int32_t>& slots) const;
  virtual std::int64_t fresh_pages_of(const std::vector<std::int32_t>& slots) const;
  // Frames of the first codec that pages of the second may take the place of, in a step of these rows; at most.
  virtual std::int64_t lower_room(const std::vector<std::int32_t>& /*slots*/) const { return 0; }
  std::int64_t placed_pages(const std::vector<std::int32_t>& slots) const;

  std::vector<Spare> spare_;    // [layer, slot]
  std::vector<bool> spilled_;   // [slot]
  std::vector<int> slot_room_;  // [slot] pages of a head that stay in any case, after a spill in part; else 0

 private:
  // Notes what a place edit of a sequence that has not spilled will do when it spills.
  void note_place(const Edit& e, const std::vector<std::int32_t>& slots);
  bool waits_for_sequence(int layer, const std::vector<std::int32_t>& slots) const;

  // An edit for the end of a graph's step, with copies of its list, unless it lasts, and of the marks of its heads.
  struct Held {
    Edit edit;
    std::vector<std::int32_t> slots;
    StreamMemory memory;
  };
  std::vector<Leaving> leaving_;  // of this step
  bool leaves_later(int layer) const;
  std::vector<Held> held_;  // the first held_count_ are of this step
  std::size_t held_count_ = 0;
  std::int64_t held_moves_ = 0;  // allocations

  bool spills_at_once_;
  // Counts the slot's spare pages anew and returns those that may leave, where its edits leave so many in any case.
  std::int64_t leave_of(int slot, std::optional<int> room);
  Edit spare_edit(int layer, const std::vector<std::int32_t>& one) const;  // that a spill of the slot carries out
  bool counts_now(int slot) const;  // whether its spare pages can be counted at any time
  int next_to_spill() const;        // -1 = none
  bool count_grown();  // the spare pages of sequences that have made steps since their count; whether there are some
  bool spilling_ = false;  // spill_one runs
  std::int64_t spill_rounds_ = 0;
  std::vector<Edit> places_;  // [layer] the first place edit with a list that lasts: which pages stay at a spill
  std::vector<bool> placed_;  // [layer, slot] such an edit came since the last part of the prompt
  std::vector<std::int32_t> placed_step_;  // [layer, slot] steps that the slot had seen then
  std::vector<int> placed_room_;  // [layer, slot] the room of that edit: a spill leaves so many pages, as counted then
  void check_edit(const Edit& e, std::size_t rows) const;  // throws Errc::plugin
  void check_surplus(const Edit& e, std::int64_t rows) const;
  void check_rewrite(const Edit& e, const std::vector<std::int32_t>& slots) const;
  void check_levels(const Edit& e, std::int64_t rows) const;
  void check_all_layers(const Edit& e) const;
  static bool steps_down(const std::vector<Edit>& edits, std::size_t i);
  void check_archiving(const Edit& e) const;  // of archive, fetch, and edits that do not go with them
  void defer(const Edit& e, const std::vector<std::int32_t>& slots);
  void hold(const Edit& e, const std::vector<std::int32_t>& slots);
  void check_grouped(const Edit& e, const std::vector<std::int32_t>& slots);  // throws Errc::unsupported
  Applied carry_out(const Edit& e, const std::vector<std::int32_t>& slots, ops::Finding* nan = nullptr);
};

// Most bytes that a store takes on its device.
struct StoreBytes {
  std::int64_t tables = 0;        // and lists whose length does not depend on the number of frames
  std::int64_t summaries = 0;     // of all pages of all slots
  std::int64_t frame = 0;         // a frame
  std::int64_t frame_places = 0;  // its places in lists of free frames
};
StoreBytes store_bytes(const StoreOptions& options, Device device);
// The layout of a frame in a codec of the store.
PageLayout frame_layout(const StoreOptions& options, const CodecSpec& codec);

// Throws the errors that make_store would throw on such a device, without taking memory.
void check_store(const StoreOptions& options, Device device);
// Makes a store on the stream's device. The stream must outlive it. Throws Errc::unsupported for options that the
// device cannot serve.
std::unique_ptr<Store> make_store(const StoreOptions& options, Stream stream);

}  // namespace kvlab
