// The store in host memory. The tiers "device" and "host" are arenas with limits. Calls return when their work is done.
#pragma once
#include <span>

#include "store/arena.hpp"
#include "store/store.hpp"

namespace kvlab {

class CpuStore final : public Store {
 public:
  explicit CpuStore(const StoreOptions& options);

  static void check(const StoreOptions& options);
  static StoreBytes bytes(const StoreOptions& options);
  CpuStore* cpu() override { return this; }

  void close(int slot) override;
  void start_reloads() override;
  bool reloading(int slot) override { return waits_for_pages(slot); }
  Fit await_reloads(const std::vector<std::int32_t>& slots) override;
  PagedKv view(int layer, const std::vector<std::int32_t>& slots, Tier tier = Tier::device) const override;
  PagedKv view_all(const std::vector<std::int32_t>& slots) const override;
  Summaries summaries(int layer) const override;
  int length(int layer, int slot, int head) const override { return lengths_[head_index(layer, slot, head)]; }
  int archived(int layer, int slot, int head) const override {
    return archived_.empty() ? 0 : archived_[head_index(layer, slot, head)];
  }
  int max_length(int layer, const std::vector<std::int32_t>& slots) const override;

  // Stores k, v [token, kv_head, head_dim] f32 at text positions first, first + 1, ... Keys are already rotated where
  // the regime stores them so. Changes nothing if it does not fit.
  // `bits`: the same numbers in bf16 [kv_head, token, head_dim], if the caller has them; pages that hold bf16 copy
  // them.
  struct Bits {
    const std::uint16_t *k = nullptr, *v = nullptr;
  };
  Fit append(int layer, int slot, const float* k, const float* v, int tokens, int first) {
    return append(layer, slot, k, v, tokens, first, {});
  }
  Fit append(int layer, int slot, const float* k, const float* v, int tokens, int first, Bits bits);

  std::vector<std::byte> save(int slot) const override;
  Fit restore(int slot, const std::vector<std::byte>& snapshot) override;
  Aside set_aside(int slot) const override;
  Fit bring_back(int slot, const Aside& cache) override;
  std::vector<std::int32_t> positions_by_place(int layer, int slot, int head) const override;
  void by_place(int layer, std::span<const std::int32_t> slots, View<const float, 3> of,
                View<float, 3> out) const override;
  Ledger& ledger() override { return ledger_; }
  const Ledger& ledger() const override { return ledger_; }
  std::int64_t page_bytes(Tier tier) const override { return arena(tier).held(); }
  std::int64_t spare_bytes() const override;
  void protect_host(bool on) override { host_.protect(on); }
  void check_invariants() const override;

 private:
  // An empty store for a copy of one slot of a store with these options and so many bytes of state a slot.
  static std::shared_ptr<CpuStore> for_one_slot(StoreOptions options, std::size_t state_bytes);

  friend class CudaStore;  // it copies a slot in and out to save, restore and check it

  PageEntry* entries(Tier tier, int layer, int slot, int head) {
    return table_[static_cast<std::size_t>(tier)].data() + head_index(layer, slot, head) * pages_per_head_;
  }
  const PageEntry* entries(Tier tier, int layer, int slot, int head) const {
    return const_cast<CpuStore*>(this)->entries(tier, layer, slot, head);
  }
  PageEntry* archive_entries(int layer, int slot, int head) {
    return archive_.data() + head_index(layer, slot, head) * pages_per_head_;
  }
  const PageEntry* archive_entries(int layer, int slot, int head) const {
    return const_cast<CpuStore*>(this)->archive_entries(layer, slot, head);
  }
  const PageLayout& layout(Tier tier, const PageEntry& e) const {
    return tier == Tier::host ? host_layout_ : layouts_[e.codec];
  }
  Arena& arena(Tier tier) { return tier == Tier::host ? host_ : device_; }
  const Arena& arena(Tier tier) const { return tier == Tier::host ? host_ : device_; }

  bool take(Tier tier, PageEntry& e, int codec);
  void give_back(Tier tier, PageEntry& e);
  void count_frame(Tier tier, const PageEntry& e, int sign);
  void copy_page(int layer, int slot, int head, int page, Tier from, Tier to);
  bool comes_without_keys(const Edit& e, int slot, int head, int page) const;
  void rebuild_pages(const Edit& e, int slot, int head, const std::vector<int>& pages);
  // spared: bytes of the page that did not cross, because it is packed.
  void count_arrival(Tier to, const PageLayout& l, std::int64_t spared = 0);
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
  Applied keep_tokens(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied evict_surplus(const Edit& e, const std::vector<std::int32_t>& slots, ops::Finding* nan) override;
  Applied swap_tokens(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied edit_pages(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied place_pages(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied store_levels(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied archive_heads(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied fetch_tokens(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied rewrite_rows(const Edit& e, const std::vector<std::int32_t>& slots) override;
  int rewrite_page(const Edit& e, int row, int slot, int head, int page);
  Fit archive_head(int layer, int slot, int head);
  bool take_archive(int layer, int slot, int head, int tokens);  // frames for them all; false: none
  void free_archive(int layer, int slot, int head);
  void count_spare(const Edit& e, int slot) override;
  void mark_heads(const Heads& heads, const std::vector<std::int32_t>& slots, HeadFlags out) override;
  Fit recall_layer(int layer, int slot) override;
  std::int64_t free_frames(Tier tier) const override;
  bool keeps_reloads() const override { return options_.reload_steps > 0; }
  Fit take_pages(int layer, int slot, int tokens);
  IndexList attend_list(const Edit& e, const std::vector<std::int32_t>& slots, Workspace& w) override;
  template <class Body>
  Applied each_list(const Edit& e, const std::vector<std::int32_t>& slots, Body body);
  Applied edit_page(const Edit& e, int slot, int head, int page);
  Applied encode_pages(const Edit& e, int slot, int head, std::span<const std::int32_t> list);
  Fit encode_page(int layer, int slot, int head, int page, int codec);
  void swap_pages(int layer, int slot, int head, int a, int b);
  Applied store_head(int layer, int slot, int head, const std::uint8_t* levels);
  void outdated(int layer, int slot, int head, int page);
  // goes_on: steps of this store follow. Otherwise it holds a copy.
  Fit load(int slot, const std::vector<std::byte>& snapshot, bool goes_on);
  bool has_pages_below(int slot) const;  // on the host alone
  bool has_tail_below(int slot) const;   // a partly filled page on the host
  void read_snapshot(int slot, const std::vector<std::byte>& snapshot, Fit& fit);
  template <class Reader>
  SpillState read_spill_state(Reader& r) const;
  template <class Reader>
  Fit read_archive(int layer, int slot, int head, Reader& r);
  void exchange(int layer, int slot, int head, int a, int b);

  std::vector<PageLayout> layouts_;
  PageLayout host_layout_;
  Arena device_, host_;
  std::vector<PageEntry> table_[2];
  std::vector<std::int32_t> lengths_, lower_pages_;
  mutable std::vector<std::int32_t> all_slots_;  // view_all's
  std::vector<PageEntry> archive_;               // [layer, slot, kv_head, page] of the host, with StoreOptions::archive
  std::vector<std::int32_t> archived_;           // [layer, slot, kv_head] its tokens
  MappedArray summary_pool_;
  std::vector<int> reload_left_;  // [slot] steps or chunks until its pages come; 0 = none wait, or of this step
  std::vector<int> touched_;      // pages that an eviction changed; a member, so that a decode step allocates nothing
};

}  // namespace kvlab
