#include "store/cpu_store.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <cstring>

#include "ops/page/packed.hpp"
#include "ops/page/paged.hpp"
#include "store/host_tier.hpp"

namespace kvlab {
namespace {

std::int64_t worst_case(const Shape& s, std::int64_t frame_bytes) {
  const std::int64_t per_extent =
      std::max<std::int64_t>(1, Arena::extent_bytes / std::max<std::int64_t>(1, frame_bytes));
  const std::int64_t frames = std::int64_t{s.max_slots} * s.layers * s.kv_heads * (s.max_pages() + 1);
  return (frames / per_extent + 8) * Arena::extent_bytes;
}

std::vector<PageLayout> make_layouts(const StoreOptions& o) {
  std::vector<PageLayout> out;
  for (const CodecSpec& c : o.codecs) out.push_back(frame_layout(o, c));
  return out;
}

std::size_t heads_of(const Shape& s) {
  return static_cast<std::size_t>(s.layers) * static_cast<std::size_t>(s.max_slots) *
         static_cast<std::size_t>(s.kv_heads);
}

std::int64_t widest(const std::vector<PageLayout>& layouts) {
  std::int64_t bytes = 0;
  for (const auto& l : layouts) bytes = std::max(bytes, l.bytes);
  return bytes;
}

}  // namespace

CpuStore::CpuStore(const StoreOptions& options)
    : Store(options, Stream::cpu()),
      layouts_(make_layouts(options)),
      host_layout_(frame_layout(options, options.host_codec)),
      device_(worst_case(options.shape, widest(layouts_)), options.device_limit, options.keeps_memory),
      host_(worst_case(options.shape, host_layout_.bytes),
            std::min(worst_case(options.shape, host_layout_.bytes), host_tier_limit(options)), options.keeps_memory) {
  const std::size_t heads = heads_of(options.shape);
  const StoreBytes taken = bytes(options);
  for (auto& t : table_) t.resize(heads * pages_per_head_);
  lengths_.resize(heads);
  lower_pages_.resize(heads);
  reload_left_.resize(static_cast<std::size_t>(options.shape.max_slots));
  if (options.archive) archive_.resize(heads * pages_per_head_), archived_.resize(heads);
  ledger_.hold(Tier::device, Tag::tables, taken.tables);
  summary_pool_ = MappedArray(taken.summaries);
}

StoreBytes CpuStore::bytes(const StoreOptions& options) {
  const std::size_t heads = heads_of(options.shape),
                    pages = heads * static_cast<std::size_t>(options.shape.max_pages());
  const std::size_t archive = options.archive ? 1 : 0, lower = options.codecs.size() > 1 ? 1 : 0;
  return {static_cast<std::int64_t>((2 + archive) * pages * sizeof(PageEntry) +
                                    (1 + archive + lower) * heads * sizeof(std::int32_t)),
          static_cast<std::int64_t>(pages) * summary_bytes(options), widest(make_layouts(options)), 0};
}

void CpuStore::check(const StoreOptions& options) {
  check_codecs(options);
  make_layouts(options);
  frame_layout(options, options.host_codec);
}

void CpuStore::close(int slot) {
  const Shape& s = options_.shape;
  for (int layer = 0; layer < s.layers; ++layer)
    for (int head = 0; head < s.kv_heads; ++head) {
      keep_only(layer, slot, head, nullptr, 0);
      free_archive(layer, slot, head);
    }
  workspace_.clear_slot(slot);
  reload_left_[static_cast<std::size_t>(slot)] = 0;
  forget(slot);
}

// Pages that find no frames wait on. Who awaits the row hears of it.
void CpuStore::start_reloads() {
  if (!keeps_reloads()) return;
  for (int slot = 0; slot < options_.shape.max_slots; ++slot) {
    if (!waits_for_pages(slot)) continue;
    int& left = reload_left_[static_cast<std::size_t>(slot)];
    if (left == 0)
      left = options_.reload_steps;
    else if (--left == 0)
      bring_pages(slot);
  }
}

Fit CpuStore::await_reloads(const std::vector<std::int32_t>& slots) {
  for (const int slot : slots) {
    if (!waits_for_pages(slot)) continue;
    reload_left_[static_cast<std::size_t>(slot)] = 0;
    if (const Fit fit = bring_pages(slot); fit != Fit::ok) return fit;
  }
  return Fit::ok;
}

PagedKv CpuStore::view(int layer, const std::vector<std::int32_t>& slots, Tier tier) const {
  const std::size_t first = head_index(layer, 0, 0);
  PagedKv kv = paged(entries(tier, layer, 0, 0), lengths_.data() + first,
                     layouts_.size() > 1 ? lower_pages_.data() + first : nullptr, slots.data(), slots.size());
  kv.base = arena(tier).base();
  kv.layouts = tier == Tier::host ? &host_layout_ : layouts_.data();
  return kv;
}

PagedKv CpuStore::view_all(const std::vector<std::int32_t>& slots) const {
  all_slots_ = in_all_layers(slots);
  PagedKv kv =
      paged(entries(Tier::device, 0, 0, 0), lengths_.data(), layouts_.size() > 1 ? lower_pages_.data() : nullptr,
            all_slots_.data(), all_slots_.size(), options_.shape.layers);
  kv.base = device_.base();
  kv.layouts = layouts_.data();
  return kv;
}

Summaries CpuStore::summaries(int layer) const {
  const Shape& s = options_.shape;
  return summaries_at(summary_pool_.data() +
                      summary_bytes_ * static_cast<std::int64_t>(pages_per_head_) * s.kv_heads * s.max_slots * layer);
}

int CpuStore::max_length(int layer, const std::vector<std::int32_t>& slots) const {
  int longest = 0;
  for (int slot : slots)
    for (int head = 0; head < options_.shape.kv_heads; ++head) longest = std::max(longest, length(layer, slot, head));
  return longest;
}

void CpuStore::count_frame(Tier tier, const PageEntry& e, int sign) {
  const PageLayout& l = layout(tier, e);
  const Stored as = tier == Tier::host ? Stored::host : e.codec > 0 ? Stored::second : Stored::first;
  const std::int64_t columns = std::int64_t{l.state_columns} * l.page_size * 4;
  ledger_.hold(tier, Tag::keys, sign * (l.v - l.k), as);
  ledger_.hold(tier, Tag::values, sign * (l.k_meta - l.v), as);
  ledger_.hold(tier, Tag::codec_metadata, sign * (l.positions - l.k_meta), as);
  ledger_.hold(tier, Tag::positions, sign * (l.bytes - l.positions - columns), as);
  ledger_.hold(tier, Tag::scores, sign * columns, as);
}

bool CpuStore::take(Tier tier, PageEntry& e, int codec) {
  const PageLayout& l = tier == Tier::host ? host_layout_ : layouts_[static_cast<std::size_t>(codec)];
  e.frame = arena(tier).allocate(l.bytes);
  if (e.frame == null_frame) return false;
  e.codec = static_cast<std::uint8_t>(tier == Tier::host ? 0 : codec);
  e.tokens = 0;
  count_frame(tier, e, +1);
  return true;
}

void CpuStore::give_back(Tier tier, PageEntry& e) {
  if (e.frame == null_frame) return;
  const PageLayout& l = layout(tier, e);
  arena(tier).free(e.frame, l.bytes);
  count_frame(tier, e, -1);
  e = PageEntry{};
}

std::byte* CpuStore::summary_at(int layer, int slot, int head, int page) {
  return summary_pool_.data() +
         static_cast<std::int64_t>(head_index(layer, slot, head) * pages_per_head_ + static_cast<std::size_t>(page)) *
             summary_bytes_;
}

void CpuStore::summarize(int layer, int slot, int head, int page) {
  if (options_.summary == Summary::none) return;
  const Place p = place(layer, slot, head, page * options_.shape.page_size);
  const int tokens = std::min(options_.shape.page_size, length(layer, slot, head) - page * options_.shape.page_size);
  ops::summarize_page(p.frame, *p.layout, tokens, options_.summary, options_.shape.dtype,
                      summary_at(layer, slot, head, page), options_.summary_bits);
}

CpuStore::Place CpuStore::place(int layer, int slot, int head, int token) {
  const int page = token / options_.shape.page_size, offset = token % options_.shape.page_size;
  for (Tier tier : {Tier::device, Tier::host}) {
    const PageEntry& e = entries(tier, layer, slot, head)[page];
    if (e.packed) break;
    if (e.frame != null_frame) return {arena(tier).at(e.frame), &layout(tier, e), offset};
  }
  throw Error(Errc::internal, "page " + std::to_string(page) + " is in no tier, or packed");
}

// Takes the frames of an append, all or none.
Fit CpuStore::take_pages(int layer, int slot, int tokens) {
  const Shape& s = options_.shape;
  std::vector<PageEntry*> taken;
  for (int head = 0; head < s.kv_heads; ++head) {
    const int begin = length(layer, slot, head), end = begin + tokens;
    if (end > static_cast<int>(pages_per_head_) * s.page_size) {
      for (PageEntry* e : taken) give_back(Tier::device, *e);
      throw Error(Errc::internal, "appended beyond max_tokens " + std::to_string(s.max_tokens));
    }
    PageEntry* device = entries(Tier::device, layer, slot, head);
    for (int page = begin / s.page_size; page * s.page_size < end; ++page) {
      if (device[page].frame != null_frame) continue;
      if (!take(Tier::device, device[page], 0)) {
        for (PageEntry* e : taken) give_back(Tier::device, *e);
        return Fit::out_of_memory;
      }
      taken.push_back(&device[page]);
    }
  }
  return Fit::ok;
}

Fit CpuStore::append(int layer, int slot, const float* k, const float* v, int tokens, int first, Bits bits) {
  const Shape& s = options_.shape;
  if (tokens <= 0) return Fit::ok;
  while (take_pages(layer, slot, tokens) != Fit::ok)
    if (!spill_one()) return Fit::out_of_memory;
  for (int head = 0; head < s.kv_heads; ++head) {
    const int begin = length(layer, slot, head), end = begin + tokens;
    PageEntry* device = entries(Tier::device, layer, slot, head);
    PageEntry* host = entries(Tier::host, layer, slot, head);
    for (int page = begin / s.page_size; page * s.page_size < end; ++page) {
      if (device[page].tokens == 0 && host[page].frame != null_frame)
        copy_page(layer, slot, head, page, Tier::host, Tier::device);
      give_back(Tier::host, host[page]);  // the device page has tokens that the host copy lacks
      device[page].tokens = static_cast<std::uint16_t>(std::min(s.page_size, end - page * s.page_size));
    }
    lengths_[head_index(layer, slot, head)] = end;
  }
  const std::int64_t row = std::int64_t{s.kv_heads} * s.head_dim;
  // Heads may begin at different places of their pages, so some units of a page's tokens are empty.
  const int most = tokens / s.page_size + 2;
#pragma omp parallel for schedule(static) if (tokens > 16)
  for (int unit = 0; unit < s.kv_heads * most; ++unit) {
    const int head = unit % s.kv_heads, end = length(layer, slot, head), begin = end - tokens,
              page = begin / s.page_size + unit / s.kv_heads, from = std::max(begin, page * s.page_size),
              to = std::min(end, (page + 1) * s.page_size);
    if (from >= to) continue;
    const Place p = place(layer, slot, head, from);
    const std::int64_t at = (from - begin) * row + std::int64_t{head} * s.head_dim,
                       of_head = (std::int64_t{head} * tokens + from - begin) * s.head_dim;
    const PageLayout& l = *p.layout;
    if (bits.k && l.dtype == DType::bf16 && !l.codec.k.bits && !l.codec.v.bits)
      ops::write_tokens(p.frame, l, p.offset, to - from, bits.k + of_head, bits.v + of_head, first + from - begin);
    else
      ops::write_tokens(p.frame, l, p.offset, to - from, k + at, v + at, row, first + from - begin);
  }
  if (options_.summary != Summary::none)
    for (int head = 0; head < s.kv_heads; ++head) {
      const int end = length(layer, slot, head);
      for (int page = (end - tokens) / s.page_size; page * s.page_size < end; ++page) {
        if (page * s.page_size >= end - tokens) ledger_.hold(Tier::device, Tag::summaries, summary_bytes_);
        summarize(layer, slot, head, page);
      }
    }
  return Fit::ok;
}

std::int64_t CpuStore::spare_bytes() const { return spare_pages() * layouts_[0].bytes; }

std::int64_t CpuStore::free_frames(Tier tier) const {
  const std::int64_t bytes = tier == Tier::host ? host_layout_.bytes : layouts_[0].bytes;
  return arena(tier).left() / bytes;
}

std::vector<std::int32_t> CpuStore::positions_by_place(int layer, int slot, int head) const {
  const int p = options_.shape.page_size, n = length(layer, slot, head);
  std::vector<std::int32_t> out(static_cast<std::size_t>(n));
  for (int t = 0; t < n; t += p) {
    const PageEntry &upper = entries(Tier::device, layer, slot, head)[t / p],
                    &lower = entries(Tier::host, layer, slot, head)[t / p];
    const Tier tier = upper.frame != null_frame ? Tier::device : Tier::host;
    const PageEntry& e = tier == Tier::device ? upper : lower;
    std::memcpy(out.data() + t, arena(tier).at(e.frame) + ops::positions_of(layout(tier, e), e),
                static_cast<std::size_t>(std::min(p, n - t)) * 4);
  }
  return out;
}

void CpuStore::by_place(int layer, std::span<const std::int32_t> slots, View<const float, 3> of,
                        View<float, 3> out) const {
  for (std::int64_t row = 0; row < out.extent[0]; ++row)
    for (std::int64_t head = 0; head < out.extent[1]; ++head) {
      const std::vector<std::int32_t> positions =
          positions_by_place(layer, slots[static_cast<std::size_t>(row)], static_cast<int>(head));
      for (std::int64_t t = 0; t < out.extent[2]; ++t) {
        const std::int64_t p = t < std::ssize(positions) ? positions[static_cast<std::size_t>(t)] : of.extent[2];
        out(row, head, t) = p >= 0 && p < of.extent[2] ? of(row, head, p) : 0;
      }
    }
}

void CpuStore::check_invariants() const {
  const Shape& s = options_.shape;
  auto fail = [](const std::string& what) { throw Error(Errc::internal, "store: " + what); };
  std::int64_t bytes[2] = {0, 0}, summaries = 0;
  std::vector<std::pair<std::int32_t, std::int64_t>> seen[2];
  for (int layer = 0; layer < s.layers; ++layer)
    for (int slot = 0; slot < s.max_slots; ++slot)
      for (int head = 0; head < s.kv_heads; ++head) {
        const int n = length(layer, slot, head), pages = (n + s.page_size - 1) / s.page_size;
        if (!used_[static_cast<std::size_t>(slot)] && n) fail("a closed slot holds tokens");
        if (options_.summary != Summary::none) summaries += pages * summary_bytes_;
        const int lower = lower_pages_[head_index(layer, slot, head)];
        if (lower < 0 || lower > pages) fail("a head of " + std::to_string(pages) + " pages counts more lower ones");
        for (int page = 0; page < static_cast<int>(pages_per_head_); ++page) {
          int copies = 0;
          for (Tier tier : {Tier::device, Tier::host}) {
            const PageEntry& e = entries(tier, layer, slot, head)[page];
            if (e.frame == null_frame) continue;
            ++copies;
            const std::int64_t size = layout(tier, e).bytes;
            if (tier == Tier::device && (e.codec > 0) != (page < lower)) fail("a page's codec is out of order");
            if (e.packed && (tier == Tier::device || !packs() || e.tokens != s.page_size ||
                             ops::packed_bytes(host_layout_, e) >= host_layout_.bytes))
              fail("a page is packed that must not be");
            bytes[static_cast<int>(tier)] += size;
            seen[static_cast<int>(tier)].emplace_back(e.frame, size);
            if (page < pages && e.tokens != std::min(s.page_size, n - page * s.page_size))
              fail("a page counts " + std::to_string(e.tokens) + " tokens");
          }
          if (page < pages && copies == 0) fail("a page is in no tier");
          if (page >= pages && copies > 0) fail("a page beyond the length holds a frame");
        }
        if (!options_.archive) continue;
        const int tokens = archived(layer, slot, head);
        if (!used_[static_cast<std::size_t>(slot)] && tokens) fail("a closed slot has an archive");
        for (int page = 0; page < static_cast<int>(pages_per_head_); ++page) {
          const PageEntry& e = archive_entries(layer, slot, head)[page];
          if ((e.frame != null_frame) != (page * s.page_size < tokens))
            fail("an archive of " + std::to_string(tokens) + " tokens has a page too many or too few");
          if (e.frame == null_frame) continue;
          bytes[1] += host_layout_.bytes;
          seen[1].emplace_back(e.frame, host_layout_.bytes);
          if (e.tokens != std::min(s.page_size, tokens - page * s.page_size))
            fail("a page of an archive counts " + std::to_string(e.tokens) + " tokens");
        }
      }
  for (int t = 0; t < 2; ++t) {
    std::sort(seen[t].begin(), seen[t].end());
    for (std::size_t i = 1; i < seen[t].size(); ++i)
      if (std::int64_t{seen[t][i - 1].first} * granule_bytes + seen[t][i - 1].second >
          std::int64_t{seen[t][i].first} * granule_bytes)
        fail("two pages share a frame");
    const Tier tier = static_cast<Tier>(t);
    std::int64_t held = 0;
    for (Tag tag : {Tag::keys, Tag::values, Tag::codec_metadata, Tag::positions, Tag::scores})
      held += ledger_.held(tier)[static_cast<std::size_t>(tag)];
    const std::int64_t state = t == 0 ? workspace_.state_bytes() : 0;
    if (held - state != bytes[t] || arena(tier).held() != bytes[t])
      fail("the ledger says " + std::to_string(held - state) + " bytes, the frames " + std::to_string(bytes[t]));
  }
  if (ledger_.held(Tier::device)[static_cast<std::size_t>(Tag::summaries)] != summaries)
    fail("the ledger's summaries differ from the pages");
}

}  // namespace kvlab
