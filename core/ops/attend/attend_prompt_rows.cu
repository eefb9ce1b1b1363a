// Dense 16-bit rows of a prompt's chunk, for kernels that do not read pages.
#include <algorithm>

#include "base/scratch.cuh"
#include "ops/attend/attend_prompt.cuh"
#include "ops/linear/linear.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 256, vector_bytes = 16;

struct Gather {
  const PageEntry* table;
  std::int64_t table_head;
  const std::int32_t* length;  // tokens that the first row sees
  std::int64_t length_head;
  const std::int32_t* slots;
  std::int64_t length_slot, table_slot;
  const std::byte* base;
  std::int64_t keys, values;  // offsets in a frame, bytes
  int rows, page_size, row_bytes, room, from;
  std::byte *to_keys, *to_values;  // [kv_head, room, row_bytes]; gather_kernel zeroes rows after the last token
  std::int32_t *query_tokens, *key_tokens;
};

__global__ void __launch_bounds__(threads) gather_kernel(const __grid_constant__ Gather a) {
  const int head = blockIdx.y, each = a.row_bytes / vector_bytes, i = blockIdx.x * threads + threadIdx.x;
  const int row_of = i / each, token = a.from + row_of, piece = i % each;
  const int total = a.length[a.slots[0] * a.length_slot + head * a.length_head] + a.rows - 1;
  if (i == 0 && a.query_tokens) a.query_tokens[head] = a.rows, a.key_tokens[head] = total;
  if (row_of >= a.room) return;
  uint4 key = make_uint4(0, 0, 0, 0), value = key;
  if (token < total) {
    const PageEntry& e = a.table[a.slots[0] * a.table_slot + head * a.table_head + token / a.page_size];
    const std::byte* row = a.base + std::int64_t{e.frame} * granule_bytes +
                           std::int64_t{token % a.page_size} * a.row_bytes + piece * vector_bytes;
    key = *reinterpret_cast<const uint4*>(row + a.keys);
    if (a.to_values) value = *reinterpret_cast<const uint4*>(row + a.values);
  }
  const std::int64_t to = (std::int64_t{head} * a.room + row_of) * a.row_bytes + piece * vector_bytes;
  *reinterpret_cast<uint4*>(a.to_keys + to) = key;
  if (a.to_values) *reinterpret_cast<uint4*>(a.to_values + to) = value;
}

unsigned blocks_of(std::int64_t work) { return static_cast<unsigned>((work + threads - 1) / threads); }

}  // namespace

void gather_prompt(const PagedKv& kv, int room, void* keys, void* values, std::int32_t* lengths, Stream s, int from) {
  const PageLayout& l = kv.layouts[0];
  Gather g;
  g.table = kv.table.data;
  g.table_slot = kv.table.stride[0], g.table_head = kv.table.stride[1];
  g.length = kv.length.data;
  g.length_slot = kv.length.stride[0], g.length_head = kv.length.stride[1];
  g.slots = kv.slots;
  g.base = kv.base;
  g.keys = l.k, g.values = l.v;
  g.rows = kv.rows, g.page_size = kv.page_size, g.row_bytes = kv.head_dim * 2, g.room = room, g.from = from;
  g.to_keys = static_cast<std::byte*>(keys), g.to_values = static_cast<std::byte*>(values);
  g.query_tokens = lengths, g.key_tokens = lengths ? lengths + kv.kv_heads : nullptr;
  const dim3 grid(blocks_of(std::int64_t{room} * g.row_bytes / vector_bytes), static_cast<unsigned>(kv.kv_heads));
  gather_kernel<<<grid, threads, 0, stream_of(s)>>>(g);
  check_launch("attend_prompt gather");
}

const void* rounded_queries(const PromptArgs& a, int room, Stream s) {
  if (a.rounded_queries) return a.rounded_queries;
  const std::int64_t row = a.queries.extent[1] * a.kv.head_dim;
  NormArgs round;
  round.x = a.queries.data;
  round.rows = a.kv.rows, round.n = row, round.x_stride = a.queries.stride[0];
  round.dtype = a.kv.layouts[0].dtype;
  round.out = fixed_scratch(s.handle(), "prompt queries",
                            static_cast<std::size_t>(std::max<std::int64_t>(room * row * 2, 256)));
  round.out_stride = row;
  rms_norm_cuda(round, s);
  return round.out;
}

}  // namespace kvlab::ops
