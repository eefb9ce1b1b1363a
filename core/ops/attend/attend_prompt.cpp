#include "ops/attend/attend_prompt.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/device_op.hpp"
#include "ops/attend/attend_prompt_forms.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/page/row_kernels.hpp"

namespace kvlab::ops {
namespace {

// Blocks of keys count from the first cached token, and a row of scores is summed block by block. So a row's result
// does not depend on the cut into chunks, on the block of queries around it, or on the threads.
constexpr int key_block = 256;
constexpr int block_rows = 96;  // query tokens times the group: a block's scores fit L2
constexpr int panel = gemm::panel_width;
constexpr std::int64_t packed_limit = std::int64_t{64} << 20;  // bytes of K and V packed at once, but at least one head
constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

// The kernel of the two products, and the place of element (key or query, d) in the packed operands. The kernel
// multiplies the rows of a tile together. Zeros pad the depth of the first product (head_dim) and of the second (keys).
struct F32Products {
  using Element = float;
  static constexpr int row_tile = gemm::row_tile, depth_unit = 1, key_unit = panel;
  static constexpr bool narrow = false;  // probabilities replace the scores in place

  static std::int64_t k_place(int d, int j) { return d * panel + j; }
  static std::int64_t v_place(std::int64_t t, int j) { return t * panel + j; }
  static std::int64_t q_place(int row, int d, int depth) {
    return std::int64_t{row / row_tile} * row_tile * depth + d * row_tile + row % row_tile;
  }
  // y[rows of a tile, columns] = q k^T; `row` is the tile's first row.
  void scores(const float* q, int row, int rows, const float* k, int depth, float* y, std::int64_t y_stride,
              int columns) const {
    kernels.f32(gemm::Tile{q + std::int64_t{row} * depth, 1, row_tile, k, std::int64_t{depth} * panel, depth, y,
                           y_stride, columns, rows, false});
  }
  // y += p v
  void sums(const float* p, std::int64_t p_stride, int rows, const float* v, std::int64_t v_stride, int depth, float* y,
            std::int64_t y_stride, int columns) const {
    kernels.f32(gemm::Tile{p, p_stride, 1, v, v_stride, depth, y, y_stride, columns, rows, true});
  }

  const gemm::Kernels& kernels;
};

// Rounds operands to bf16 and sums in f32, as matrix tiles in hardware do.
struct Bf16Products {
  using Element = bf16;
  static constexpr int row_tile = 32, depth_unit = 32, key_unit = 32;
  static constexpr bool narrow = true;

  static std::int64_t k_place(int d, int j) { return std::int64_t{d / 2} * 2 * panel + 2 * j + d % 2; }
  static std::int64_t v_place(std::int64_t t, int j) { return t / 2 * 2 * panel + 2 * j + t % 2; }
  static std::int64_t q_place(int row, int d, int depth) { return std::int64_t{row} * depth + d; }
  void scores(const bf16* q, int row, int rows, const bf16* k, int depth, float* y, std::int64_t y_stride,
              int columns) const {
    product(gemm::PairTile{q + std::int64_t{row} * depth, depth, k, std::int64_t{depth} * panel, depth, y, y_stride,
                           columns, rows, false});
  }
  void sums(const bf16* p, std::int64_t p_stride, int rows, const bf16* v, std::int64_t v_stride, int depth, float* y,
            std::int64_t y_stride, int columns) const {
    product(gemm::PairTile{p, p_stride, v, v_stride, depth, y, y_stride, columns, rows, true});
  }

  gemm::PairProduct product;
};

// One KV head's keys and values: the tokens before the chunk, then the chunk. Zeros pad them to whole panels.
template <class Element>
struct PackedHead {
  int index = 0, past = 0, keys = 0, padded = 0;
  Element* k = nullptr;              // [padded / 16][depth, 16]
  Element* v = nullptr;              // [wide / 16][padded, 16]
  float* past_rows = nullptr;        // [2][past][head_dim], gathered keys, then values
  std::int32_t* position = nullptr;  // [keys]; filled only for a window or masks
};

// Scratch of one thread.
template <class Element>
struct ThreadScratch {
  Element* queries;            // [rows, depth]
  float *scores, *out, *sums;  // [rows, key_block], [rows, wide], [group, key_block]
  Element* weights;            // [rows, key_block] of the softmax; the same memory as scores unless `narrow`
  float *largest, *total;      // [rows]
};

template <class Products>
class Prefill {
  using Element = typename Products::Element;
  using Head = PackedHead<Element>;
  using Scratch = ThreadScratch<Element>;
  static constexpr int row_tile = Products::row_tile;

 public:
  Prefill(const PromptArgs& a, Workspace& w, const Products& products)
      : a_(a),
        dim_(a.kv.head_dim),
        depth_(round_up(dim_, Products::depth_unit)),
        wide_(round_up(dim_, panel)),
        chunk_(static_cast<int>(a.queries.extent[0])),
        group_(static_cast<int>(a.queries.extent[1]) / a.kv.kv_heads),
        block_tokens_(std::max(1, block_rows / group_)),
        rows_(round_up(block_tokens_ * group_, row_tile)),
        blocks_((chunk_ + block_tokens_ - 1) / block_tokens_),
        scale_(prompt_scale(a)),
        row_(row_kernels()),
        products_(products) {
    int longest = 0;
    for (int h = 0; h < a.kv.kv_heads; ++h) longest = std::max(longest, a.kv.tokens(0, h));
    const int padded = round_up(longest + chunk_, Products::key_unit);
    const std::int64_t packed = std::int64_t{padded} * (depth_ + wide_);
    const std::int64_t gathered = std::int64_t{2} * longest * dim_;
    const std::int64_t head_bytes =
        packed * std::int64_t{sizeof(Element)} + (gathered + padded) * std::int64_t{sizeof(float)};
    heads_at_once_ = static_cast<int>(std::clamp<std::int64_t>(packed_limit / head_bytes, 1, a.kv.kv_heads));
    heads_ = take<Head>(w, heads_at_once_);
    for (int i = 0; i < heads_at_once_; ++i) {
      heads_[i] = Head{};
      heads_[i].k = take<Element>(w, packed);
      heads_[i].v = heads_[i].k + std::int64_t{padded} * depth_;
      heads_[i].past_rows = take<float>(w, gathered);
      heads_[i].position = take<std::int32_t>(w, padded);
    }
    if (a.sums) lse_ = take<float>(w, std::int64_t{chunk_} * a.queries.extent[1]);
    threads_ = take<Scratch>(w, omp_get_max_threads());
    for (int i = 0; i < omp_get_max_threads(); ++i) {
      Scratch& s = threads_[i];
      s.queries = take<Element>(w, std::int64_t{rows_} * depth_);
      s.scores = take<float>(w, std::int64_t{rows_} * key_block);
      s.out = take<float>(w, std::int64_t{rows_} * wide_);
      s.sums = take<float>(w, std::int64_t{group_} * key_block);
      if constexpr (Products::narrow)
        s.weights = take<Element>(w, std::int64_t{rows_} * key_block);
      else
        s.weights = s.scores;
      s.largest = take<float>(w, rows_);
      s.total = take<float>(w, rows_);
      // The product also multiplies rows that pad the last tile, so they must hold numbers.
      std::fill_n(s.queries, std::int64_t{rows_} * depth_, Element(0.f));
      if constexpr (Products::narrow) std::fill_n(s.weights, std::int64_t{rows_} * key_block, Element(0.f));
      std::fill_n(s.out, std::int64_t{rows_} * wide_, 0.f);
    }
  }

  void run() {
    for (int first = 0; first < a_.kv.kv_heads; first += heads_at_once_) {
      const int heads = std::min(heads_at_once_, a_.kv.kv_heads - first);
      for (int i = 0; i < heads; ++i) {
        heads_[i].index = first + i;
        heads_[i].past = a_.kv.tokens(0, first + i);
        heads_[i].keys = heads_[i].past + chunk_;
        heads_[i].padded = round_up(heads_[i].keys, Products::key_unit);
      }
      pack(heads);
      // The longest blocks go first, so that threads end at about the same time.
#pragma omp parallel for schedule(dynamic)
      for (int i = 0; i < heads * blocks_; ++i) attend_block(heads_[i % heads], blocks_ - 1 - i / heads, scratch());
      if (!a_.sums) continue;
      int most = 0;
      for (int i = 0; i < heads; ++i) most = std::max(most, heads_[i].padded);
      const int key_blocks = (most + key_block - 1) / key_block;
#pragma omp parallel for schedule(dynamic)
      for (int i = 0; i < heads * key_blocks; ++i)
        if (i / heads * key_block < heads_[i % heads].keys)
          mass_block(heads_[i % heads], i / heads * key_block, scratch());
    }
  }

 private:
  template <class T>
  static T* take(Workspace& w, std::int64_t count) {
    return static_cast<T*>(w.scratch("attend_prompt", static_cast<std::size_t>(count) * sizeof(T)));
  }

  const Scratch& scratch() const { return threads_[omp_get_thread_num()]; }

  void pack(int heads) {
#pragma omp parallel
    {
#pragma omp for schedule(dynamic)
      for (int i = 0; i < 2 * heads; ++i) {
        const Head& h = heads_[i / 2];
        const KvSide side = i % 2 ? KvSide::value : KvSide::key;
        gather_rows(a_.kv, 0, h.index, side, h.past, h.past_rows + std::int64_t{i % 2} * h.past * dim_);
        if (hides() && side == KvSide::key) {
          token_positions(a_.kv, 0, h.index, h.past, h.position);
          for (int t = 0; t < chunk_; ++t) h.position[h.past + t] = a_.first + t;
        }
      }
      for (int i = 0; i < heads; ++i) {
#pragma omp for schedule(static) nowait
        for (int p = 0; p < heads_[i].padded / panel; ++p) pack_keys(heads_[i], p);
      }
    }
  }

  // Packs panel p: sixteen tokens of K, transposed, and of V.
  void pack_keys(const Head& h, int p) const {
    const View<const float, 3>&keys = a_.keys, &values = a_.values;
    Element* k = h.k + std::int64_t{p} * depth_ * panel;
    const std::int64_t v_panel = std::int64_t{h.padded} * panel;
    for (int j = 0; j < panel; ++j) {
      const int t = p * panel + j;
      const bool past = t < h.past, real = t < h.keys;
      const float* from_k = !real  ? nullptr
                            : past ? h.past_rows + std::int64_t{t} * dim_
                                   : &keys(t - h.past, h.index, 0);
      const float* from_v = !real  ? nullptr
                            : past ? h.past_rows + (std::int64_t{h.past} + t) * dim_
                                   : &values(t - h.past, h.index, 0);
      for (int d = 0; d < depth_; ++d) k[Products::k_place(d, j)] = Element(real && d < dim_ ? from_k[d] : 0.f);
      for (int d = 0; d < wide_; ++d)
        h.v[d / panel * v_panel + Products::v_place(t, d % panel)] = Element(real && d < dim_ ? from_v[d] : 0.f);
    }
  }

  // Query tokens [begin, end) of one head's group. Row r is token begin + r / group and query head r % group.
  struct Block {
    int begin, end, rows;
  };
  Block block(int b) const {
    const int begin = b * block_tokens_, end = std::min(chunk_, begin + block_tokens_);
    return {begin, end, (end - begin) * group_};
  }
  int token(const Block& b, int row) const { return b.begin + row / group_; }

  void pack_queries(const Head& h, const Block& b, Element* out) const {
    for (int r = 0; r < b.rows; ++r) {
      const float* q = &a_.queries(token(b, r), h.index * group_ + r % group_, 0);
      for (int d = 0; d < dim_; ++d) out[Products::q_place(r, d, depth_)] = Element(q[d] * scale_);
    }
  }

  // Keys of the block at k0 that some row of a tile may see, rounded up to whole units of keys.
  int visible(const Head& h, const Block& b, int row, int k0) const {
    const int last = std::min(b.rows, row + row_tile) - 1;
    return std::clamp(round_up(h.past + token(b, last) + 1 - k0, Products::key_unit), 0,
                      std::min(key_block, h.padded - k0));
  }

  bool hides() const { return a_.window > 0 || a_.masks; }
  // Whether the first token of the block of queries, and so all of them, see none of these keys.
  bool hidden(const Head& h, const Block& b, int k0, int count) const {
    if (!hides()) return false;
    const std::int32_t* p = h.position + k0;
    const int own = a_.first + b.begin;
    if (a_.window > 0 && *std::max_element(p, p + count) <= own - a_.window) return true;
    return a_.masks &&
           std::all_of(p, p + count, [&](std::int32_t position) { return a_.masks[h.index].hides(position, own); });
  }

  // Computes scores[row, key] of the rows and the block of keys. Entries that a row must not see may hold anything.
  void score(const Head& h, const Block& b, int k0, const Scratch& s) const {
    for (int r = 0; r < b.rows; r += row_tile)
      if (const int n = visible(h, b, r, k0))
        products_.scores(s.queries, r, std::min(row_tile, b.rows - r), h.k + std::int64_t{k0} * depth_, depth_,
                         s.scores + std::int64_t{r} * key_block, key_block, n);
  }

  // Returns how many keys of the block this row sees; scores of those that are hidden become -inf.
  int mask(const Head& h, const Block& b, int row, int k0, float* scores) const {
    const int n = std::min(std::min(key_block, h.keys - k0), h.past + token(b, row) + 1 - k0);
    if (a_.window > 0) {
      const int oldest = a_.first + token(b, row) - a_.window;
      for (int j = 0; j < n; ++j)
        if (h.position[k0 + j] <= oldest) scores[j] = minus_infinity;
    }
    if (a_.masks)
      for (int j = 0; j < n; ++j)
        if (a_.masks[h.index].hides(h.position[k0 + j], a_.first + token(b, row))) scores[j] = minus_infinity;
    return std::max(n, 0);
  }

  void attend_block(const Head& h, int index, const Scratch& s) const {
    const Block b = block(index);
    pack_queries(h, b, s.queries);
    std::fill_n(s.out, std::int64_t{b.rows} * wide_, 0.f);
    std::fill_n(s.largest, b.rows, minus_infinity);
    std::fill_n(s.total, b.rows, 0.f);
    const int limit = h.past + b.end;
    for (int k0 = 0; k0 < limit; k0 += key_block) {
      if (hidden(h, b, k0, std::min(key_block, limit - k0))) continue;
      score(h, b, k0, s);
      for (int r = 0; r < b.rows; ++r) soften(h, b, r, k0, s);
      for (int r = 0; r < b.rows; r += row_tile)
        if (const int n = visible(h, b, r, k0))
          products_.sums(s.weights + std::int64_t{r} * key_block, key_block, std::min(row_tile, b.rows - r),
                         h.v + std::int64_t{k0} * panel, std::int64_t{h.padded} * panel, n,
                         s.out + std::int64_t{r} * wide_, wide_, wide_);
    }
    for (int r = 0; r < b.rows; ++r) {
      const int head = h.index * group_ + r % group_;
      float* out = &a_.out(token(b, r), head, 0);
      for (int d = 0; d < dim_; ++d) out[d] = s.out[std::int64_t{r} * wide_ + d] / s.total[r];
      if (lse_) lse_[std::int64_t{token(b, r)} * a_.queries.extent[1] + head] = s.largest[r] + std::log(s.total[r]);
    }
  }

  // One row's step of the running softmax: turns its scores into weights and rescales its earlier sums.
  void soften(const Head& h, const Block& b, int row, int k0, const Scratch& s) const {
    float* scores = s.scores + std::int64_t{row} * key_block;
    const int n = mask(h, b, row, k0, scores);
    const float largest = std::max(s.largest[row], row_.max(scores, n));
    const int seen = n;
    if (largest == minus_infinity) {  // all scores are -inf or NaN; a NaN must reach the output
      s.total[row] += row_.exp_sum(scores, n, 0.f);
    } else if (seen > 0) {
      const float before = std::exp(s.largest[row] - largest);
      if (before != 1) row_.scale(s.out + std::int64_t{row} * wide_, wide_, before);
      s.total[row] = s.total[row] * before + row_.exp_sum(scores, n, largest);
      s.largest[row] = largest;
    }
    Element* weights = s.weights + std::int64_t{row} * key_block;
    if constexpr (Products::narrow) row_.to_bf16(scores, seen, &weights->bits);
    std::fill(weights + seen, weights + visible(h, b, row / row_tile * row_tile, k0), Element(0.f));
  }

  // Sums the probabilities of one block of keys over all queries. It computes the scores again, in the same way.
  void mass_block(const Head& h, int k0, const Scratch& s) const {
    const int count = std::min(key_block, h.keys - k0);
    for (int g = 0; g < group_; ++g) std::fill_n(&a_.sums(h.index * group_ + g, k0), count, 0.f);
    for (int i = 0; i < blocks_; ++i) {
      const Block b = block(i);
      if (h.past + b.end <= k0 || hidden(h, b, k0, std::min(count, h.past + b.end - k0))) continue;
      pack_queries(h, b, s.queries);
      score(h, b, k0, s);
      std::fill_n(s.sums, std::int64_t{group_} * key_block, 0.f);
      for (int r = 0; r < b.rows; ++r) {
        const int head = h.index * group_ + r % group_;
        float* scores = s.scores + std::int64_t{r} * key_block;
        const int n = mask(h, b, r, k0, scores);
        row_.exp_sum(scores, n, lse_[std::int64_t{token(b, r)} * a_.queries.extent[1] + head]);
        row_.add_scaled(scores, n, 1.f, s.sums + std::int64_t{r % group_} * key_block);
      }
      for (int g = 0; g < group_; ++g)
        row_.add_scaled(s.sums + std::int64_t{g} * key_block, count, 1.f, &a_.sums(h.index * group_ + g, k0));
    }
  }

  const PromptArgs& a_;
  int dim_, depth_, wide_, chunk_, group_, block_tokens_, rows_, blocks_, heads_at_once_ = 1;
  float scale_;
  const RowKernels& row_;
  Products products_;
  Head* heads_ = nullptr;
  Scratch* threads_ = nullptr;
  float* lse_ = nullptr;
};

}  // namespace

float prompt_scale(const PromptArgs& a) {
  return a.softmax_scale > 0 ? a.softmax_scale : 1.f / std::sqrt(static_cast<float>(a.kv.head_dim));
}

void check_prompt(const PromptArgs& a, const char* op) {
  check_kv(a.kv, op);
  if (a.kv.rows < 1) fail(Errc::internal, op, "got no sequence, wanted row 0");
  const auto shape = [](const auto& v) {
    return std::to_string(v.extent[0]) + " x " + std::to_string(v.extent[1]) + " x " + std::to_string(v.extent[2]);
  };
  const std::int64_t tokens = a.queries.extent[0], heads = a.queries.extent[1], dim = a.kv.head_dim;
  if (tokens < 1) fail(Errc::internal, op, "got a chunk without tokens");
  if (heads < 1 || heads % a.kv.kv_heads || a.queries.extent[2] != dim || a.out.extent != a.queries.extent)
    fail(Errc::internal, op,
         "got queries " + shape(a.queries) + " and out " + shape(a.out) + " for " + std::to_string(a.kv.kv_heads) +
             " KV heads of " + std::to_string(dim));
  const std::array<std::int64_t, 3> want{tokens, a.kv.kv_heads, dim};
  if (a.keys.extent != want || a.values.extent != want)
    fail(Errc::internal, op,
         "got keys " + shape(a.keys) + " and values " + shape(a.values) + ", wanted " + std::to_string(tokens) + " x " +
             std::to_string(a.kv.kv_heads) + " x " + std::to_string(dim));
  if (a.queries.stride[2] != 1 || a.keys.stride[2] != 1 || a.values.stride[2] != 1 || a.out.stride[2] != 1 ||
      (a.sums && a.sums.stride[1] != 1))
    fail(Errc::unsupported, op, "got a strided last index, wanted contiguous rows");
  for (int h = 0; h < a.kv.kv_heads; ++h) {
    check_resident(a.kv, 0, h, op);
    if (a.sums && (a.sums.extent[0] != heads || a.sums.extent[1] < a.kv.tokens(0, h) + tokens))
      fail(Errc::internal, op,
           "got sums " + std::to_string(a.sums.extent[0]) + " x " + std::to_string(a.sums.extent[1]) + ", wanted " +
               std::to_string(heads) + " x " + std::to_string(a.kv.tokens(0, h) + tokens));
  }
}

bool attend_prompt(const PromptArgs& a, Workspace& w, Stream s) {
  if (s.device() == Device::cuda) {
    check_view(a.kv, "attend_prompt");
    return on_cuda<attend_prompt>(a, w, s);
  }
  check_prompt(a, "attend_prompt");
  if (const gemm::PairProduct tiles = a.round_to_bf16 ? gemm::amx_pair_product() : nullptr)
    Prefill(a, w, Bf16Products{tiles}).run();
  else
    Prefill(a, w, F32Products{gemm::avx2_kernels() ? *gemm::avx2_kernels() : gemm::portable_kernels()}).run();
  return true;
}

void attend_prompt_bf16(const PromptArgs& a, Workspace& w, gemm::PairProduct product) {
  check_prompt(a, "attend_prompt");
  Prefill(a, w, Bf16Products{product}).run();
}

const LibraryState& cudnn_state() { return only_on_cuda<cudnn_state>(); }
std::int64_t cudnn_chunks() { return only_on_cuda<cudnn_chunks>(); }

}  // namespace kvlab::ops
