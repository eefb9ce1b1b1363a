// The paged KV store: the only mutator of the cache. One table per tier, [layer, slot, kv_head, logical page] ->
// PageEntry.
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
#include <string>
#include <vector>

#include "store/arena.hpp"
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
  std::int64_t changed = 0;  // tokens or pages that an edit really changed
};

class Store {
 public:
  explicit Store(const StoreOptions& options);

  const Shape& shape() const { return options_.shape; }
  const StoreOptions& options() const { return options_; }

  int open();            // a free slot, or -1
  void close(int slot);  // frees every frame and clears the slot's state

  // Views over the rows' slots; `slots` is borrowed by the view.
  PagedKv view(int layer, const std::vector<std::int32_t>& slots, Tier tier = Tier::device) const;
  Summaries summaries(int layer) const;
  int length(int layer, int slot, int head) const { return lengths_[head_index(layer, slot, head)]; }
  int max_length(int layer, const std::vector<std::int32_t>& slots) const;

  // k, v [token, kv_head, head_dim] f32, as they are to be stored; text positions first, first + 1, ... Changes nothing
  // when it does not fit.
  Fit append(int layer, int slot, const float* k, const float* v, int tokens, int first);

  // Text tokens seen: the true position counter, and decode steps. advance() once per chunk or step, after the last
  // layer.
  std::int32_t position(int slot) const { return position_[static_cast<std::size_t>(slot)]; }
  std::int32_t steps(int slot) const { return step_[static_cast<std::size_t>(slot)]; }
  // Carries out the edits that fall due; Applied is theirs.
  Applied advance(int slot, int tokens, bool decode);

  // Applies the edits of one callback over `slots` (the callback's rows), except attend, which is the caller's.
  Applied apply(const std::vector<Edit>& edits, const std::vector<std::int32_t>& slots);

  // The pages that attention reads: the list of an attend edit plus its pins.
  PageList resolve_attend(const Edit& edit, const std::vector<std::int32_t>& slots, Workspace& w) const;

  // Whole cache of a sequence, with token state, tiers, counters and edits to come: bytes that restore() takes back
  // into any open slot, in place of what it holds. Errc::data for bytes that are not what save() wrote or come from
  // another kind of store. A slot whose restore threw or did not fit is empty.
  std::vector<std::byte> save(int slot) const;
  Fit restore(int slot, const std::vector<std::byte>& snapshot);

  std::int64_t fired() const { return fired_; }  // edits, of apply and of advance, that changed something

  // Text positions in the cache of one head, ascending.
  std::vector<std::int32_t> positions(int layer, int slot, int head) const;

  Ledger& ledger() { return ledger_; }
  const Ledger& ledger() const { return ledger_; }
  std::int64_t page_bytes(Tier tier) const { return arena(tier).held(); }  // what the limits bound
  StoreWorkspace& workspace() { return workspace_; }
  void protect_host(bool on) { host_.protect(on); }
  void check_invariants() const;  // Errc::internal with what is broken

 private:
  struct Pending {
    Edit edit;
    std::vector<std::int32_t> slots, index, count;
    int due = 0;  // decode step of slots[0]
  };
  std::size_t head_index(int layer, int slot, int head) const {
    return (static_cast<std::size_t>(layer) * static_cast<std::size_t>(options_.shape.max_slots) +
            static_cast<std::size_t>(slot)) *
               static_cast<std::size_t>(options_.shape.kv_heads) +
           static_cast<std::size_t>(head);
  }
  PageEntry* entries(Tier tier, int layer, int slot, int head) {
    return table_[static_cast<std::size_t>(tier)].data() + head_index(layer, slot, head) * pages_per_head_;
  }
  const PageEntry* entries(Tier tier, int layer, int slot, int head) const {
    return const_cast<Store*>(this)->entries(tier, layer, slot, head);
  }
  const PageLayout& layout(Tier tier, const PageEntry& e) const {
    return tier == Tier::host ? host_layout_ : layouts_[e.codec];
  }
  Arena& arena(Tier tier) { return tier == Tier::host ? host_ : device_; }
  const Arena& arena(Tier tier) const { return tier == Tier::host ? host_ : device_; }

  bool take(Tier tier, PageEntry& e, int codec);
  void give_back(Tier tier, PageEntry& e);
  void count_frame(Tier tier, const PageLayout& l, int sign);
  void copy_page(int layer, int slot, int head, int page, Tier from, Tier to);
  void copy_state_down(int layer, int slot, int head, int page);
  std::byte* summary_at(int layer, int slot, int head, int page);
  void summarize(int layer, int slot, int head, int page);
  struct Place {
    std::byte* frame;
    const PageLayout* layout;
    int offset;
  };
  Place place(int layer, int slot, int head, int token);

  std::int64_t keep_only(int layer, int slot, int head, const std::int32_t* kept, int count);
  void check_list(const Edit& e, std::size_t rows) const;  // Errc::plugin
  Applied apply_now(const Edit& e, const std::vector<std::int32_t>& slots);
  void outdated(int layer, int slot, int head, int page);
  void read_snapshot(int slot, const std::vector<std::byte>& snapshot, Fit& fit);
  void swap_tokens(int layer, int slot, int head, int a, int b);

  StoreOptions options_;
  std::vector<PageLayout> layouts_;
  PageLayout host_layout_;
  std::size_t pages_per_head_ = 0;
  Arena device_, host_;
  std::vector<PageEntry> table_[2];
  std::vector<std::int32_t> lengths_;
  MappedArray summary_pool_;
  std::int64_t summary_bytes_ = 0;
  std::vector<std::int32_t> position_, step_;
  std::vector<bool> used_;
  std::vector<Pending> pending_;
  std::vector<int> touched_;  // pages: kept so that a decode step allocates nothing
  std::int64_t fired_ = 0;
  Ledger ledger_;
  StoreWorkspace workspace_{ledger_};
};

}  // namespace kvlab
