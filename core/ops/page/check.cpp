#include "ops/page/check.hpp"

#include <algorithm>

#include "base/late_state.hpp"
#include "ops/page/final_list.hpp"

namespace kvlab::ops {
namespace {

std::string shape_of(const View<const float, 3>& v) {
  return std::to_string(v.extent[0]) + " x " + std::to_string(v.extent[1]) + " x " + std::to_string(v.extent[2]);
}

}  // namespace

void check_view(const PagedKv& kv, const char* op) {
  if (kv.head_dim < 8 || kv.head_dim > 256 || kv.head_dim % 8)
    fail(Errc::unsupported, op, "got head_dim " + std::to_string(kv.head_dim) + ", wanted a multiple of 8 up to 256");
  if (kv.rows < 0 || kv.kv_heads < 1 || kv.page_size < 1 ||
      (kv.rows > 0 && (!kv.slots || !kv.table.data || !kv.layouts)))
    fail(Errc::internal, op, "got an incomplete cache view, wanted rows, slots, table and layouts");
  if (kv.rope == RopeRegime::cache_relative && (!kv.rope_table.inv_freq || kv.rope_table.head_dim != kv.head_dim))
    fail(Errc::internal, op, "got no RoPE table, wanted one for cache-relative positions");
}

void check_tables(const PagedKv& kv, const char* op) {
  for (int r = 0; r < kv.rows; ++r) {
    const int slot = kv.slots[r];
    if (slot < 0 || slot >= kv.table.extent[0] || slot >= kv.length.extent[0])
      fail(Errc::internal, op,
           "got slot " + std::to_string(slot) + " in row " + std::to_string(r) + ", wanted one of " +
               std::to_string(kv.table.extent[0]));
    for (int h = 0; h < kv.kv_heads; ++h)
      if (kv.tokens(r, h) < 0 || kv.pages(r, h) > kv.table.extent[2])
        fail(Errc::internal, op,
             "got " + std::to_string(kv.tokens(r, h)) + " tokens, wanted at most " +
                 std::to_string(kv.table.extent[2] * kv.page_size));
  }
}

void check_kv(const PagedKv& kv, const char* op, Stream s) {
  check_view(kv, op);
  if (s.device() != Device::cpu) return;
  if (kv.layouts && kv.layouts[0].dtype == DType::f16)
    fail(Errc::unsupported, op, "got a cache of f16 on the CPU, wanted f32 or bf16");
  check_tables(kv, op);
}

void check_page(const PagedKv& kv, int row, int head, int page, const char* op) {
  const PageEntry& e = kv.entry(row, head, page);
  const auto where = [&] {
    return "page " + std::to_string(page) + " of row " + std::to_string(row) + ", head " + std::to_string(head);
  };
  if (e.frame < 0)
    fail(Errc::internal, op,
         "got " + where() + " without a device frame, wanted it resident: the op reads pages on the device alone");
  const PageLayout& l = kv.layout(e);
  if (l.head_dim != kv.head_dim || l.page_size != kv.page_size)
    fail(Errc::internal, op,
         "got " + where() + " in a layout of another shape, wanted the cache's page size and head_dim");
}

void check_resident(const PagedKv& kv, int row, int head, const char* op) {
  const int pages = kv.pages(row, head);
  for (int p = 0; p < pages; ++p) check_page(kv, row, head, p, op);
}

const PagedKv& resident_cache(const PagedKv* kv, const char* op, Stream s, const Heads& heads) {
  if (!kv) fail(Errc::internal, op, "got no cache, wanted a layer's");
  check_kv(*kv, op, s);
  if (s.device() == Device::cuda) return *kv;
  for (int r = 0; r < kv->rows; ++r)
    for (int h = 0; h < kv->kv_heads; ++h)
      if (heads.on(kv->slots[r], h)) check_resident(*kv, r, h, op);
  return *kv;
}

const PagedKv& checked_column(const StateColumn& column, const char* op, Stream s, const Heads& heads) {
  write_late_state();
  const PagedKv& kv = resident_cache(column.kv, op, s, heads);
  if (s.device() == Device::cuda) {
    if (kv.rows > 0 && (column.column < 0 || column.column >= kv.layouts[0].state_columns))
      fail(Errc::internal, op, "got state column " + std::to_string(column.column) + ", wanted one of the page's");
    return kv;
  }
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int p = 0; heads.on(kv.slots[r], h) && p < kv.pages(r, h); ++p)
        if (column.column < 0 || column.column >= kv.layout(kv.entry(r, h, p)).state_columns)
          fail(Errc::internal, op, "got state column " + std::to_string(column.column) + ", wanted one of the page's");
  return kv;
}

void check_scores(const PagedKv& kv, const View<const float, 3>& scores, const char* what, const char* op, Stream s) {
  const int tokens = s.device() == Device::cpu ? longest(kv) : 0;
  if (scores.extent[0] < kv.rows || scores.extent[1] < kv.kv_heads || scores.extent[1] % kv.kv_heads ||
      scores.extent[2] < tokens)
    fail(Errc::internal, op,
         std::string("got ") + what + " of " + shape_of(scores) + ", wanted " + std::to_string(kv.rows) +
             " rows x a multiple of " + std::to_string(kv.kv_heads) + " heads x at least " + std::to_string(tokens));
  if (kv.rows > 0 && tokens > 0 && !scores.data) fail(Errc::internal, op, std::string("got no ") + what);
  if (scores.stride[2] != 1 && scores.extent[2] > 1)
    fail(Errc::unsupported, op, std::string("got ") + what + " with a stride between tokens, wanted them contiguous");
}

void check_kv_scores(const PagedKv& kv, const View<const float, 3>& scores, const char* what, const char* op,
                     Stream s) {
  check_scores(kv, scores, what, op, s);
  if (scores.extent[1] != kv.kv_heads)
    fail(Errc::internal, op,
         std::string("got ") + what + " of " + std::to_string(scores.extent[1]) + " heads, wanted one per KV head (" +
             std::to_string(kv.kv_heads) + ")");
}

void check_list(const PagedKv& kv, const IndexList& list, const char* op) {
  if (list.index.extent[0] < kv.rows || list.index.extent[1] < kv.kv_heads || list.count.extent[0] < kv.rows ||
      list.count.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, "got too small a list, wanted [row, kv_head]");
  if (list.final) list.final->clear();
}

int longest(const PagedKv& kv) {
  int n = 0;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) n = std::max(n, kv.tokens(r, h));
  return n;
}

void check_room(const PagedKv& kv, const TokenList& list, const char* op) {
  if (const int wanted = longest(kv); list.index.extent[2] < wanted)
    fail(Errc::internal, op,
         "got a list for " + std::to_string(list.index.extent[2]) + " tokens, wanted room for " +
             std::to_string(wanted));
}

}  // namespace kvlab::ops
