// Rows that become codes: a prompt's on their way into pages, and pages that are stored in another codec. One token for
// each sequence is a case of append.cpp.
#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "cases/case.hpp"
#include "cases/paged_fixture.hpp"
#include "ops/page/reference.hpp"
#include "store/cpu_store.hpp"
#include "store/cuda_store.hpp"

namespace kvlab::cases {
namespace {

constexpr CodecSide fp8{8, CodeKind::e4m3};
constexpr CodecSpec k8v4{{8}, {4}}, k4v2{{4}, {2}};
constexpr CodecSpec grouped(std::uint8_t bits, std::uint16_t group) {
  return {{bits, CodeKind::integer, CodeAxis::channel, group}, {bits, CodeKind::integer, CodeAxis::token, group}};
}

// A prompt's tokens go to pages of `to`. With `from` they lie in full pages of that codec, which are stored in `to`.
struct Encoding {
  std::optional<CodecSpec> from;
  CodecSpec to;
  int kv_heads, dim, page_size, tokens;
  DType dtype = DType::bf16;
  bool odd_rows = false;  // rows of zeros, of equal and of tiny numbers, of infinities and NaN

  int pages() const { return tokens / page_size; }  // full ones
  std::int64_t page_bytes(const CodecSpec& codec) const {
    return ops::make_layout(dtype, codec, page_size, dim, 0).bytes;
  }
  double bytes() const {
    const double read = from ? static_cast<double>(page_bytes(*from)) : 2. * 4 * page_size * dim;
    return kv_heads * pages() * (read + static_cast<double>(page_bytes(to)));
  }
};

class EncodeScene final : public Scene {
 public:
  // Copy i is layer i.
  EncodeScene(Place& place, const Encoding& of, int layers)
      : place_(place), of_(of), layers_(layers), store_(make_store()), rows_(randoms(2 * side())) {
    if (of.odd_rows) make_odd();
    for (int l = 0; l < layers; ++l) there_.push_back(place.put(rows_));
    const std::vector<std::int32_t> count(static_cast<std::size_t>(of.kv_heads), of.pages());
    std::vector<std::int32_t> all;
    for (int h = 0; h < of.kv_heads; ++h)
      for (int page = 0; page < of.pages(); ++page) all.push_back(page);
    list_ = {View<std::int32_t, 3>::dense(place.put(all), {1, of.kv_heads, of.pages()}),
             View<std::int32_t, 2>::dense(place.put(count), {1, of.kv_heads})};
  }

  void prepare() override {
    if (!slots_.empty()) store_->close(slots_[0]);
    slots_ = {store_->open()};
    if (!of_.from) return;
    for (int l = 0; l < layers_; ++l) append(l);
    store_->advance(slots_[0], of_.tokens, false);
  }
  void run(int layer) override {
    if (!of_.from) return append(layer);
    Edits edits(layer);
    edits.encode(PageList{list_}, 1);
    if (store_->apply(edits.all(), slots_).fit != Fit::ok) throw NoRoom("got no room for the pages of a case");
  }
  void check(Check& check) override {
    prepare();
    for (int l = 0; l < layers_; ++l) run(l);
    if (!of_.from) store_->advance(slots_[0], of_.tokens, false);
    std::shared_ptr<CpuStore> copy;
    if (store_->cuda()) copy = store_->cuda()->copy_of(slots_[0]);
    const std::vector<std::int32_t> slots{copy ? 0 : slots_[0]};
    const PagedKv kv = (copy ? copy.get() : store_->cpu())->view(layers_ - 1, slots);
    for (int h = 0; h < of_.kv_heads; ++h) {
      check.that(fmt::format("head {} has all tokens", h), kv.tokens(0, h) == of_.tokens);
      for (const KvSide which : {KvSide::key, KvSide::value}) {
        std::vector<float> got(static_cast<std::size_t>(of_.tokens * of_.dim)), wanted(got.size());
        ops::gather_rows_reference(kv, 0, h, which, of_.tokens, got.data());
        bool same = true;  // of codes, scales and zeros, bit for bit
        for (int page = 0; page * of_.page_size < of_.tokens; ++page) {
          const PageEntry& e = kv.entry(0, h, page);
          same = same && plain_page(h, page, which, wanted.data(), kv.frame(e), kv.layout(e));
        }
        const std::string name = fmt::format("{} of head {}", which == KvSide::key ? "keys" : "values", h);
        check.that(name + " are the same codes", same);
        check.equal(name, got, wanted, 0);
      }
    }
    store_->check_invariants();
  }

 private:
  std::int64_t side() const { return std::int64_t{of_.tokens} * of_.kv_heads * of_.dim; }
  std::unique_ptr<Store> make_store() const {
    StoreOptions o;
    o.shape.layers = layers_;
    o.shape.query_heads = o.shape.kv_heads = of_.kv_heads;
    o.shape.head_dim = of_.dim;
    o.shape.page_size = of_.page_size;
    o.shape.max_slots = 2;  // free frames beyond those of a run, so that the host need not ask how many are left
    o.shape.max_tokens = of_.tokens;
    o.shape.dtype = of_.dtype;
    o.codecs = of_.from ? std::vector{*of_.from, of_.to} : std::vector{of_.to};
    o.host_codec = o.codecs[0];
    if (place_.stream().device() == Device::cuda) return std::make_unique<CudaStore>(o, place_.stream());
    return std::make_unique<CpuStore>(o);
  }
  void append(int layer) {
    const float* k = there_[static_cast<std::size_t>(layer)];
    Fit fit;
    if (CpuStore* cpu = store_->cpu())
      fit = cpu->append(layer, slots_[0], k, k + side(), of_.tokens, 0);
    else
      fit = store_->cuda()->append(layer, slots_[0], k, k + side(), DType::f32, std::int64_t{of_.kv_heads} * of_.dim,
                                   of_.tokens, 0);
    if (fit != Fit::ok) throw NoRoom("got no room for the tokens of a case");
  }
  void make_odd() {
    constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    const auto dim = static_cast<std::size_t>(of_.dim);
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const std::size_t row = i / dim, d = i % dim;
      const float sign = d % 3 == 1 ? -1.f : 1.f, x = rows_[i];
      const float odd[] = {
          x, 1e-9f * sign, 0 * sign, inf, nan, d % 5 ? x : 0 * sign, d % 7 ? x : nan, d % 4 ? x : sign * inf, 3.25f};
      rows_[i] = odd[row / static_cast<std::size_t>(of_.kv_heads) % std::size(odd)];
    }
  }
  // Reads the page's rows after plain encoding. A page that is not full keeps its codec. Returns whether the side of
  // the frame `got` has the same codes; numbers are compared after they are read.
  bool plain_page(int head, int page, KvSide which, float* out, const std::byte* got, const PageLayout& got_as) const {
    const int p = of_.page_size, begin = page * p, count = std::min(p, of_.tokens - begin);
    const auto layout_of = [&](const CodecSpec& codec) { return ops::make_layout(of_.dtype, codec, p, of_.dim, 0); };
    PageLayout layout = layout_of(of_.from.value_or(of_.to));
    std::vector<std::byte> frame(static_cast<std::size_t>(layout.bytes));
    for (int t = 0; t < count; ++t) {
      const float* k = rows_.data() + (std::int64_t{begin + t} * of_.kv_heads + head) * of_.dim;
      ops::write_token_reference(frame.data(), layout, t, k, k + side(), begin + t);
    }
    if (of_.from && count == p) {
      const PageLayout to = layout_of(of_.to);
      std::vector<std::byte> fresh(static_cast<std::size_t>(to.bytes));
      if (of_.to.grouped())
        ops::copy_page_reference(frame.data(), layout, fresh.data(), to);
      else
        for (int t = 0; t < p; ++t) ops::copy_token_reference(frame.data(), layout, t, fresh.data(), to, t);
      layout = to, frame = std::move(fresh);
    }
    for (int t = 0; t < count; ++t)
      ops::read_row_reference(frame.data(), layout, which, t, out + std::int64_t{begin + t} * of_.dim);
    const bool key = which == KvSide::key;
    const CodecSide side = ops::side_of(layout, key);
    if (layout.bytes != got_as.bytes) return false;
    if (!side.bits) return true;
    const std::int64_t rows = ops::row_offset(layout, key, 0), meta = key ? layout.k_meta : layout.v_meta,
                       scales = side.grouped() ? p * of_.dim / ops::group_of(side, p, of_.dim) : count;
    const auto same = [&](std::int64_t at, std::int64_t bytes) {
      return std::memcmp(frame.data() + at, got + at, static_cast<std::size_t>(bytes)) == 0;
    };
    return same(rows, count * ops::row_bytes(layout, key)) && same(meta, 4 * scales);
  }

  Place& place_;
  Encoding of_;
  int layers_;
  std::unique_ptr<Store> store_;
  std::vector<float> rows_;  // keys, then values: [token, kv_head, dim]
  std::vector<const float*> there_;
  std::vector<std::int32_t> slots_;
  IndexList list_;
};

struct Named {
  const char* name;
  std::optional<CodecSpec> from;
  CodecSpec to;
};
// group: of keys' scales by channel and values' by token.
std::vector<Named> codecs(std::uint16_t group) {
  return {{"k8v8", {}, {{8}, {8}}},
          {"k8v4", {}, k8v4},
          {"k4v4", {}, {{4}, {4}}},
          {"k4v2", {}, k4v2},
          {"fp8", {}, {fp8, fp8}},
          {"int4 by channel, full pages of bf16", CodecSpec{}, grouped(4, group)},
          {"int2 by channel, full pages of bf16", CodecSpec{}, grouped(2, group)},
          {"k4v2, full pages of k8v4", k8v4, k4v2}};
}

Case encoding(const Encoding& of, const std::string& name) {
  Case c{"encode", fmt::format("{}, {} tokens of {} heads of {}", name, of.tokens, of.kv_heads, of.dim)};
  c.make = [of](Place& place, int copies) { return std::make_unique<EncodeScene>(place, of, copies); };
  c.prepared = true;
  c.work.bytes = of.bytes();
  c.work.copy = Work::Copy::in_memory;
  c.copies = 4;
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v;
  for (const Named& n : codecs(8))
    for (const auto& [dim, tokens] : {std::pair{32, 64}, {32, 77}, {16, 40}, {80, 40}, {144, 40}, {256, 40}})
      v.push_back(encoding({n.from, n.to, 3, dim, 8, tokens}, n.name));
  for (const Named& n : codecs(8)) {
    Encoding of{n.from, n.to, 2, 64, 8, 77};
    of.odd_rows = true;
    v.push_back(encoding(of, std::string(n.name) + ", odd rows"));
  }
  const auto e4m3 = [](std::uint16_t group) {
    return CodecSpec{{8, CodeKind::e4m3, CodeAxis::channel, group}, {8, CodeKind::e4m3, CodeAxis::token, group}};
  };
  const std::pair<const char*, Encoding> others[] = {
      {"k2v2, full pages of k8v8", {CodecSpec{{8}, {8}}, {{2}, {2}}, 3, 128, 16, 90}},
      {"k8v2, full pages of k8v4", {k8v4, {{8}, {2}}, 3, 64, 64, 300}},
      {"int4 by channel, full pages of k8v8", {CodecSpec{{8}, {8}}, grouped(4, 8), 2, 64, 16, 90}},
      {"e4m3 by channel, full pages of bf16", {CodecSpec{}, e4m3(16), 3, 128, 16, 90}},
      {"int4 by channel, full pages of bf16", {CodecSpec{}, grouped(4, 16), 3, 128, 16, 90}},
      {"int2 by channel, full pages of bf16", {CodecSpec{}, grouped(2, 32), 3, 128, 32, 190}},
      {"int8 by channel, full pages of f16", {CodecSpec{}, grouped(8, 16), 3, 64, 16, 90, DType::f16}},
      {"int2 by channel, full pages of f32", {CodecSpec{}, grouped(2, 16), 3, 64, 16, 90, DType::f32}},
      {"k8v4 of f16", {{}, k8v4, 3, 64, 16, 90, DType::f16}},
  };
  for (const auto& [name, of] : others)
    for (const bool odd : {false, true}) {
      Encoding e = of;
      e.odd_rows = odd;
      v.push_back(encoding(e, fmt::format("{}, pages of {}{}", name, of.page_size, odd ? ", odd rows" : "")));
    }
  for (const Named& n : codecs(32)) {
    v.push_back(encoding({n.from, n.to, 3, 64, 32, 8192}, n.name));  // SmolLM2-135M's shape
    v.back().timed_cpu = true;
    for (const int tokens : {16384, 131072}) {  // Llama-3.1-8B's shape
      v.push_back(encoding({n.from, n.to, 8, 128, 32, tokens}, n.name));
      v.back().timed_cuda = true;
    }
  }
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
