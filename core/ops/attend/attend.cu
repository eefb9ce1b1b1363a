// Attention of decode steps over pages of plain bf16 or f16 rows (attend_kernel.cuh): launches.
#include <map>
#include <mutex>
#include <tuple>

#include "base/scratch.cuh"
#include "base/tensor_map.hpp"
#include "ops/attend/attend.cuh"
#include "ops/attend/attend_plain.cuh"
#include "ops/attend/late_mass.hpp"
#include "ops/linear/linear.cuh"
#include "ops/page/add_mass.cuh"
#include "ops/page/ranks.cuh"

namespace kvlab::ops {
using namespace cuda;
using decode::Args;
using decode::max_pairs;
namespace {

template <class T>
void launch_dim(const Args& a, int dim, const CUtensorMap& map, cudaStream_t stream) {
  switch (dim) {
    case 64: return decode::launch_plain<T, 64, false>(a, map, stream);
    case 96: return decode::launch_plain<T, 96, false>(a, map, stream);
    case 128: return decode::launch_plain<T, 128, false>(a, map, stream);
    default: return decode::launch_plain<T, 256, false>(a, map, stream);
  }
}

void round_output(const AttendArgs& in, Stream s) {
  NormArgs a;
  a.x = in.out.data;
  a.rows = in.kv.rows, a.n = in.out.extent[1] * in.out.extent[2], a.x_stride = in.out.stride[0];
  a.dtype = in.kv.layouts[0].dtype;
  a.out = in.rounded;
  a.out_stride = a.n;
  rms_norm_cuda(a, s);
}

}  // namespace

// The map's height is the largest int, because the tier's size is unknown here; copies only name rows of the cache.
const CUtensorMap& unit_map(const void* base, int box_rows, bool half) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, bool>, CUtensorMap> maps;
  const std::lock_guard lock(mutex);
  const auto key = std::make_tuple(base, box_rows, half);
  if (const auto found = maps.find(key); found != maps.end()) return found->second;
  return maps.emplace(key, cuda::matrix_map(base, half, 0x7fffffff, 64, 64, box_rows)).first->second;
}

// Whether the kernel turns keys as it reads them.
static bool turns(const AttendArgs& in) { return in.kv.rope == RopeRegime::cache_relative || in.most_distance > 0; }

static bool takes_layout(const AttendArgs& in, const PageLayout& l) {
  const PagedKv& kv = in.kv;
  const int dim = kv.head_dim, p = kv.page_size, group = static_cast<int>(in.queries.extent[1]) / kv.kv_heads;
  if (l.codec.k.bits || l.codec.v.bits)
    return decode::takes_codes(l) && group <= 8 && !turns(in) && (!in.rounded || l.dtype != DType::f32);
  return (l.dtype == DType::bf16 || l.dtype == DType::f16) && (dim == 64 || dim == 96 || dim == 128 || dim == 256) &&
         (p == 16 || p == 32 || p == 64 || (p == 8 && dim != 96)) && group <= 16 && (!turns(in) || dim % 64 == 0);
}

static bool takes_tokens(const AttendArgs& in) {
  const PagedKv& kv = in.kv;
  const PageLayout& l = kv.layouts[0];
  const int dim = kv.head_dim;
  return !l.codec.k.bits && !l.codec.v.bits && l.dtype != DType::f32 && (dim == 64 || dim == 128 || dim == 256) &&
         static_cast<int>(in.queries.extent[1]) / kv.kv_heads <= 16 && !turns(in) && !kv.lower_pages && !in.mass &&
         !in.logits.out && in.tokens->index.stride[2] == 1;
}

bool attend_pipelined(const AttendArgs& in) {
  if (in.kv.kv_heads > max_pairs || in.masks) return false;
  if (in.tokens) return takes_tokens(in);
  return !in.bias && takes_layout(in, in.kv.layouts[0]) &&
         (!in.kv.lower_pages || (!in.pages && takes_layout(in, in.kv.layouts[1])));
}

// All but the launch's rows and what a kind of rows adds.
Args decode::args_of(const AttendArgs& in, const PageLayout& l, Stream s) {
  const PagedKv& kv = in.kv;
  const int dim = kv.head_dim, row_bytes = dim * 2;
  Args a = {};
  a.table = kv.table.data;
  a.table_slot = kv.table.stride[0], a.table_head = kv.table.stride[1];
  a.length = kv.length.data;
  a.length_slot = kv.length.stride[0], a.length_head = kv.length.stride[1];
  a.lower_pages = kv.lower_pages.data;
  a.lower_slot = kv.lower_pages.stride[0], a.lower_head = kv.lower_pages.stride[1];
  a.query_row = in.queries.stride[0], a.query_head = in.queries.stride[1];
  a.out_row = in.out.stride[0], a.out_head = in.out.stride[1];
  a.wide = reinterpret_cast<std::uintptr_t>(in.out.data) % 16 == 0 && a.out_row % 4 == 0 && a.out_head % 4 == 0;
  a.base = kv.base;
  a.keys = l.k, a.positions = l.positions;
  a.kv_heads = kv.kv_heads;
  a.pair_of = PairOf(kv.kv_heads);
  a.group = static_cast<int>(in.queries.extent[1]) / kv.kv_heads;
  a.page_size = kv.page_size;
  a.half = l.dtype == DType::f16;
  a.window = in.window;
  a.value_rows = static_cast<int>((l.v - l.k) / 128);
  a.scale = (in.softmax_scale != 0 ? in.softmax_scale : 1.f / std::sqrt(static_cast<float>(dim))) * log2e;
  const std::size_t partials = std::size_t(cuda::multiprocessors()) * 2 * 16 * (256 + 2) * sizeof(float);
  a.partial = static_cast<float*>(cuda::kept(s.handle(), "attend partial", partials));
  a.arrived = static_cast<int*>(cuda::zeroed(s.handle(), "attend arrived", max_pairs * sizeof(int)));
  a.joint =
      kv.page_size == unit_tokens && l.v - l.k == unit_tokens * row_bytes && 2 * unit_tokens * row_bytes / 128 <= 256;
  return a;
}

void decode::set_rows(Args& a, const AttendArgs& in, int begin, int rows) {
  const std::int64_t heads = in.queries.extent[1];
  a.rows = rows;
  a.slots = in.kv.slots + begin;
  a.queries = in.queries.data + begin * a.query_row;
  a.out = in.out.data + begin * a.out_row;
  if (in.rounded) a.rounded = static_cast<std::byte*>(in.rounded) + begin * heads * in.kv.head_dim * 2;
  a.last = in.last ? in.last + begin : nullptr;
  if (in.lse) a.lse = in.lse.data + begin * in.lse.stride[0], a.lse_row = in.lse.stride[0];
}

const CUtensorMap& decode::map_of_units(const PagedKv& kv, const Args& a) {
  const int unit_rows = std::min(kv.page_size, unit_tokens) * kv.head_dim * 2 / 128 * (a.joint ? 2 : 1);
  return unit_map(kv.base, unit_rows, a.half);
}

// Attends to the pages of one layout. lower: the layout of lower runs that the same launch reads. prior: the result of
// the lower pages, with Args::rest. shares: where they go instead of scores, to be added to token state unless they are
// left.
static void attend_part(const AttendArgs& in, const MassShares* shares, const PageLayout& l, const PageLayout* lower,
                        Args::Part part, const AttendArgs* prior, Stream s) {
  const PagedKv& kv = in.kv;
  const cudaStream_t stream = cuda::stream_of(s);
  const int dim = kv.head_dim, heads = static_cast<int>(in.queries.extent[1]);
  const bool codes = l.codec.k.bits != 0;
  Args a = decode::args_of(in, l, s);
  a.part = part;
  const CUtensorMap* map = codes || in.tokens ? nullptr : &decode::map_of_units(kv, a);
  const bool turn = turns(in);
  const std::int32_t* ranks = !turn ? nullptr
                              : in.most_distance > 0
                                  ? tokens_beyond(DeviceKv(kv), in.last, in.most_distance, s.handle())
                                  : token_ranks(DeviceKv(kv), s.handle());
  if (shares && !in.late)
    a.adds = true, a.state = FrameColumn::state(kv, in.mass_into.column), a.rule = in.mass_into.rule,
    a.error = kv.error;
  if (turn) a.inv_freq = kv.rope_table.inv_freq;
  if (turn) a.turn_scale = in.most_distance > 0 ? 1 : kv.rope_table.attention_scale;  // stored keys carry it
  a.rank_room = static_cast<int>(kv.table.extent[2]) * kv.page_size;
  const int at_once = max_pairs / kv.kv_heads;
  for (int begin = 0; begin < kv.rows; begin += at_once) {
    decode::set_rows(a, in, begin, std::min(at_once, kv.rows - begin));
    if (prior)
      a.prior_out = prior->out.data + begin * prior->out.stride[0],
      a.prior_lse = prior->lse.data + std::int64_t{begin} * heads;
    if (shares) {
      a.shares = *shares, a.shares.data += begin * shares->row;
    } else if (in.mass) {
      a.mass = in.mass.data + begin * in.mass.stride[0], a.mass_row = in.mass.stride[0],
      a.mass_head = in.mass.stride[1];
    }
    if (in.logits.out) {
      a.logits = in.logits, a.logits.out.data += begin * in.logits.out.stride[0];
      a.logits_at_once = logits_at_once(in.logits);
    }
    if (in.pages || in.tokens) {
      const IndexList& list = in.pages ? static_cast<const IndexList&>(*in.pages) : *in.tokens;
      a.list = list.index.data + begin * list.index.stride[0];
      a.list_row = list.index.stride[0], a.list_head = list.index.stride[1];
      a.list_count = list.count.data + begin * list.count.stride[0];
      a.count_row = list.count.stride[0], a.count_head = list.count.stride[1];
      a.list_room = static_cast<int>(list.index.extent[2]);
    }
    if (in.bias) a.bias = in.bias, a.bias.data += begin * in.bias.stride[0];
    if (lower) {
      decode::launch_both(a, l, *lower, stream);
    } else if (codes) {
      decode::launch_codes(a, l, stream);
    } else if (in.tokens) {
      decode::launch_listed(a, dim, a.half, stream);
    } else if (turn) {
      a.rank = ranks + std::int64_t{begin} * kv.kv_heads * a.rank_room;
      decode::launch_turned(a, dim, a.half, *map, stream);
    } else {
      a.half ? launch_dim<__half>(a, dim, *map, stream) : launch_dim<__nv_bfloat16>(a, dim, *map, stream);
    }
  }
}

// Whether one launch reads the pages of both codecs.
static bool reads_both(const AttendArgs& in) {
  const PagedKv& kv = in.kv;
  const int group = static_cast<int>(in.queries.extent[1]) / kv.kv_heads;
  return in.window == 0 && !in.logits.out.data &&
         decode::takes_both(kv.layouts[0], kv.layouts[1], group, std::min(kv.rows * kv.kv_heads, max_pairs));
}

// The first of two launches reads the pages of the second codec, and the next one merges that into its result.
static void attend_apart(const AttendArgs& in, Stream s) {
  const std::int64_t rows = in.kv.rows, heads = in.queries.extent[1], dim = in.kv.head_dim;
  auto* prior = static_cast<float*>(
      cuda::fixed_scratch(s.handle(), "attend prior", static_cast<std::size_t>(rows * heads * (dim + 1)) * 4));
  AttendArgs first = in;
  first.out = View<float, 3>::dense(prior, {rows, heads, dim});
  first.lse = View<float, 2>::dense(prior + rows * heads * dim, {rows, heads});
  first.rounded = nullptr;
  attend_part(first, nullptr, in.kv.layouts[1], nullptr, Args::lower, nullptr, s);
  attend_part(in, nullptr, in.kv.layouts[0], nullptr, Args::rest, &first, s);
}

static void attend_cuda(const AttendArgs& in, Workspace&, Stream s) {
  const bool into = in.mass_into.column >= 0;
  if (!attend_pipelined(in)) {
    attend_any_cuda(in, s);
    if (in.rounded) round_output(in, s);
    if (into) add_mass_cuda(in.mass, in.mass_into.rule, {&in.kv, in.mass_into.column}, s);
    return;
  }
  const PagedKv& kv = in.kv;
  if (kv.rows == 0) return;
  const cudaStream_t stream = cuda::stream_of(s);
  const int heads = static_cast<int>(in.queries.extent[1]);
  const bool both = kv.lower_pages && reads_both(in);
  // Blocks that add to token state wait for one another, and other work holds the multiprocessors that a step leaves
  // free.
  MassShares room;
  const bool sums = into && in.mass_into.rule != GroupRule::softmax_mean && (both || !kv.lower_pages) &&
                    cuda::step_multiprocessors() == cuda::multiprocessors() && room.fill(in.mass, kv);
  AttendArgs a = in;
  a.late = sums && !kv.lower_pages && !in.pages && !in.lse ? in.late : nullptr;
  if (a.late) {
    room.fill(*a.late, heads, kv.kv_heads);
    a.lse = View<float, 2>::dense(MassShares::lse_of(*a.late, kv.rows, heads, kv.kv_heads), {kv.rows, heads});
    a.late->left = true, a.late->kv = kv, a.late->into = in.mass_into, a.late->heads = heads;
  } else if (in.mass && !in.lse) {
    a.lse = View<float, 2>::dense(
        static_cast<float*>(cuda::fixed_scratch(s.handle(), "attend lse", std::size_t(kv.rows) * heads * 4)),
        {kv.rows, heads});
  }
  if (in.mass && !sums) clear_scores(in, stream);
  if (kv.lower_pages && !(both && (sums || !in.mass)))
    attend_apart(a, s);
  else
    attend_part(a, sums ? &room : nullptr, kv.layouts[0], both ? &kv.layouts[1] : nullptr, Args::all, nullptr, s);
  if (!in.mass || sums) return;
  scores_to_mass(in.mass, a.lse, kv.rows, stream);
  if (into) add_mass_cuda(in.mass, in.mass_into.rule, {&in.kv, in.mass_into.column}, s);
}
KVLAB_ON_CUDA(attend, attend_cuda);

}  // namespace kvlab::ops
