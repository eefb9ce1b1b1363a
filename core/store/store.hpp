// The paged KV store: the only mutator of the cache. One table per tier, [layer, slot, kv_head, logical page] ->
// PageEntry. CpuStore (cpu_store.hpp) and CudaStore (cuda_store.hpp) keep it in the memory of their device.
//
// Invariants (checked by check_invariants): the pages of a head are full except the last; a page has a frame in at
// least one tier; a frame belongs to one page; the ledger's KV bytes equal the frames handed out. A lower copy that the
// upper page outgrew is freed, so a host frame is valid whenever it exists.
#pragma once
#include <kvlab/edits.hpp>
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/stream_memory.hpp"
#include "store/ledger.hpp"
#include "store/workspace.hpp"

namespace kvlab {

struct StoreOptions {
  Shape shape;
  std::vector<CodecSpec> codecs = {CodecSpec{}};  // [0] = appended tokens; others are targets of encode edits
  CodecSpec host_codec;
  RopeRegime rope = RopeRegime::original;
  RopeTable rope_table;
  Summary summary = Summary::none;
  std::vector<std::string> token_state;
  std::int64_t device_limit = -1, host_limit = -1;  // bytes of frames; -1 = none
};

enum class Fit : std::uint8_t { ok, out_of_memory };  // not fitting is a value

// What an apply did.
struct Applied {
  Fit fit = Fit::ok;
  std::int64_t changed = 0;  // tokens or pages that an edit really changed; -1 where only the device knows yet

  Applied& operator+=(const Applied& o) {
    if (o.fit != Fit::ok) fit = o.fit;
    changed = changed < 0 || o.changed < 0 ? -1 : changed + o.changed;
    return *this;
  }
};

class CpuStore;
class CudaStore;

// What the engine, the executor and measurement use. Work is given to one stream; what the host is told ("exact") waits
// for it.
class Store {
 public:
  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Itself, for what one device's executor alone needs; null on the other device.
  virtual CpuStore* cpu() { return nullptr; }
  virtual CudaStore* cuda() { return nullptr; }

  const Shape& shape() const { return options_.shape; }
  const StoreOptions& options() const { return options_; }
  Stream stream() const { return stream_; }  // its device is where views point to

  int open();                        // a free slot, or -1
  virtual void close(int slot) = 0;  // frees every frame and clears the slot's state

  // Views over the rows' slots, in memory of the stream's device but for PagedKv::layouts. `slots` is borrowed by the
  // view on the CPU; on CUDA a view ends when another list of as many slots is asked for.
  virtual PagedKv view(int layer, const std::vector<std::int32_t>& slots, Tier tier = Tier::device) const = 0;
  virtual Summaries summaries(int layer) const = 0;
  virtual int length(int layer, int slot, int head) const = 0;  // exact
  // Longest head of these slots; on CUDA no less than that.
  virtual int max_length(int layer, const std::vector<std::int32_t>& slots) const = 0;

  // Text tokens seen (the true position counter), and decode steps.
  std::int32_t position(int slot) const { return position_[static_cast<std::size_t>(slot)]; }
  std::int32_t steps(int slot) const { return step_[static_cast<std::size_t>(slot)]; }
  // Once per chunk or step, after the last layer. Carries out the edits that fall due; Applied is theirs.
  Applied advance(int slot, int tokens, bool decode);

  // Applies the edits of one callback over `slots` (the callback's rows), in their order. Those for the next step or a
  // later one wait for advance(); the others run now. The caller keeps attend edits. Lists are memory of the stream's
  // device. What a list must not say is Errc::plugin: at once on the CPU, at the next exact answer on CUDA.
  Applied apply(const std::vector<Edit>& edits, const std::vector<std::int32_t>& slots);
  // Every page of the slot's layer has a frame on the device again.
  virtual Fit recall_all(int layer, int slot) = 0;

  // The pages (of an attend edit) or tokens (of attend_tokens) that attention reads: the list, in any order, plus the
  // pins; ascending and without repeats, in scratch.
  IndexList resolve_attend(const Edit& edit, const std::vector<std::int32_t>& slots, Workspace& w);

  // Whole cache of a sequence, with token state, tiers, counters and edits to come: bytes that restore() takes back
  // into any open slot, in place of what it holds, on either device. Errc::data for bytes that are not what save()
  // wrote or come from another kind of store. A slot whose restore threw or did not fit is empty.
  virtual std::vector<std::byte> save(int slot) const = 0;
  virtual Fit restore(int slot, const std::vector<std::byte>& snapshot) = 0;

  // Edits, of apply and of advance, that changed something, and attends that leave something out; exact.
  virtual std::int64_t fired() const { return fired_; }

  // Text positions in the cache of one head: ascending, and place by place; exact.
  std::vector<std::int32_t> positions(int layer, int slot, int head) const;
  virtual std::vector<std::int32_t> positions_by_place(int layer, int slot, int head) const = 0;

  virtual Ledger& ledger() = 0;  // exact
  virtual const Ledger& ledger() const = 0;
  virtual std::int64_t page_bytes(Tier tier) const = 0;  // what the limits bound; exact
  // Most bytes of pages on the device: the limit of the options, on a GPU no more than what was free at the start less
  // a reserve for what runs beside the cache. -1 = no limit, or as much as all slots can need.
  virtual std::int64_t page_limit() const { return options_.device_limit; }
  StoreWorkspace& workspace() { return workspace_; }
  virtual void protect_host(bool on) = 0;     // any access of the host tier faults; Errc::unsupported on CUDA
  virtual void check_invariants() const = 0;  // Errc::internal with what is broken

 protected:
  // An edit to come of one slot. The store owns a copy of its list: dense [1, kv_head, room].
  struct Pending {
    Edit edit;
    int slot = 0;
    int due = 0;  // carried out by the first advance() that leaves the slot with as many decode steps
    StreamMemory index, count;
  };

  // The verbs. apply() has checked the edit and the shape of its list.
  virtual Applied keep_tokens(const Edit& e, const std::vector<std::int32_t>& slots) = 0;  // evict, evict_rest
  virtual Applied swap_tokens(const Edit& e, const std::vector<std::int32_t>& slots) = 0;  // move
  virtual Applied edit_pages(const Edit& e,
                             const std::vector<std::int32_t>& slots) = 0;  // offload, recall, drop, encode
  virtual IndexList attend_list(const Edit& e, const std::vector<std::int32_t>& slots, Workspace& w) = 0;
  virtual void advanced(bool /*decode*/) {}  // advance() has counted and carried out what was due

  // An edit to come of `slot` whose list is memory of `device`; `index` and `count` are copied in the order of
  // `through`.
  static Pending pending(const Edit& e, int slot, int due, const std::int32_t* index, const std::int32_t* count,
                         Stream device, Stream through);
  [[noreturn]] static void bad(const Edit& e, const std::string& what);  // Errc::plugin
  void forget(int slot);  // its counters and its edits to come; the slot is free

  // A view of the shape of the run; base and layouts are the tier's.
  PagedKv paged(const PageEntry* entries, const std::int32_t* lengths, const std::int32_t* slots,
                std::size_t rows) const;
  Summaries summaries_at(const std::byte* layer) const;

  Store(const StoreOptions& options, Stream stream);

  std::size_t head_index(int layer, int slot, int head) const {
    return (static_cast<std::size_t>(layer) * static_cast<std::size_t>(options_.shape.max_slots) +
            static_cast<std::size_t>(slot)) *
               static_cast<std::size_t>(options_.shape.kv_heads) +
           static_cast<std::size_t>(head);
  }

  StoreOptions options_;
  Stream stream_;
  std::size_t pages_per_head_ = 0;
  std::int64_t summary_bytes_ = 0;  // of a page
  std::vector<std::int32_t> position_, step_;
  std::vector<bool> used_;
  std::vector<Pending> pending_;
  std::int64_t fired_ = 0;  // of edits whose change the host saw
  Ledger ledger_;
  StoreWorkspace workspace_;

 private:
  void check_edit(const Edit& e, std::size_t rows) const;  // Errc::plugin
  void defer(const Edit& e, const std::vector<std::int32_t>& slots);
  Applied carry_out(const Edit& e, const std::vector<std::int32_t>& slots);
};

// What make_store would refuse on such a device; takes no memory.
void check_store(const StoreOptions& options, Device device);
// On the stream's device, for as long as the stream lives. Errc::unsupported for options that it cannot serve.
std::unique_ptr<Store> make_store(const StoreOptions& options, Stream stream);

}  // namespace kvlab
