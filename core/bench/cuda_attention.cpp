#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "bench/cuda_timing.hpp"
#include "ops/attend/attend_prompt.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::bench {
namespace {

// One layer in Llama-3.1-8B's shape.
constexpr int query_heads = 32, kv_heads = 8, head_dim = 128;

class NoWorkspace final : public Workspace {
 public:
  void* scratch(const char*, std::size_t) override { return nullptr; }
  void* state(const char*, std::size_t, int) override { return nullptr; }
};

// Layers of sequences of the given lengths. Contents are random, and so are positions unless `ordered`. Pages lie in a
// shuffled order, the same in all layers. A graph attends to one layer after the other, as a decode step does. Together
// the layers are several times the L2 cache.
class DevicePages {
 public:
  DevicePages(const CudaTimer& timer, const std::vector<int>& tokens, int page_size, CodecSpec codec = {},
              bool ordered = false)
      : rows_(static_cast<int>(tokens.size())),
        page_size_(page_size),
        layout_(ops::make_layout(DType::bf16, codec, page_size, head_dim, 0)) {
    std::mt19937 rng(7);
    const int longest = *std::max_element(tokens.begin(), tokens.end());
    pages_ = (longest + page_size - 1) / page_size;
    std::vector<std::int32_t> lengths;
    std::int64_t frames = 0;
    for (const int n : tokens)
      for (int h = 0; h < kv_heads; ++h) {
        lengths.push_back(n);
        frames += (n + page_size - 1) / page_size;
      }
    std::vector<std::int32_t> order(static_cast<std::size_t>(frames));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<PageEntry> table(static_cast<std::size_t>(rows_) * kv_heads * static_cast<std::size_t>(pages_));
    std::size_t next = 0;
    for (int r = 0; r < rows_; ++r)
      for (int h = 0; h < kv_heads; ++h)
        for (int p = 0; p * page_size < tokens[static_cast<std::size_t>(r)]; ++p) {
          PageEntry& e = table[(static_cast<std::size_t>(r) * kv_heads + static_cast<std::size_t>(h)) *
                                   static_cast<std::size_t>(pages_) +
                               static_cast<std::size_t>(p)];
          e.frame = order[next++] * static_cast<std::int32_t>(layout_.bytes / granule_bytes);
          e.tokens =
              static_cast<std::uint16_t>(std::min(page_size, tokens[static_cast<std::size_t>(r)] - p * page_size));
        }
    std::vector<bf16> block(std::size_t{16} << 20);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < block.size(); ++i)
      block[i] = i < 65536 ? bf16(normal(rng)) : block[(i * 2654435761u + 12345) % 65536];
    layer_bytes_ = frames * layout_.bytes;
    layers_ = static_cast<int>(std::clamp<std::int64_t>((std::int64_t{320} << 20) / layer_bytes_ + 1, 4, 32));
    const std::int64_t bytes = layer_bytes_ * layers_;
    frames_ = std::make_unique<DeviceBuffer>(static_cast<std::size_t>(bytes));
    for (std::int64_t at = 0; at < bytes; at += static_cast<std::int64_t>(block.size() * 2))
      cuda_backend()->runtime.copy(frames_->as<std::byte>() + at, block.data(),
                                   static_cast<std::size_t>(std::min<std::int64_t>(bytes - at, block.size() * 2)),
                                   timer.handle());
    if (ordered) {
      std::vector<std::byte> image(static_cast<std::size_t>(layer_bytes_));
      for (std::size_t at = 0; at < image.size(); at += block.size() * 2)
        std::memcpy(image.data() + at, block.data(), std::min(image.size() - at, block.size() * 2));
      for (std::size_t i = 0; i < table.size(); ++i)
        for (int t = 0; t < table[i].tokens; ++t) {
          const std::int32_t position = static_cast<std::int32_t>(i % static_cast<std::size_t>(pages_)) * page_size + t;
          std::memcpy(image.data() + table[i].frame * granule_bytes + layout_.positions + t * 4, &position, 4);
        }
      for (int l = 0; l < layers_; ++l)
        cuda_backend()->runtime.copy(frames_->as<std::byte>() + l * layer_bytes_, image.data(), image.size(),
                                     timer.handle());
      cuda_backend()->runtime.synchronize(timer.handle());
    }
    cuda_backend()->runtime.synchronize(timer.handle());
    std::vector<std::int32_t> slots(static_cast<std::size_t>(rows_));
    std::iota(slots.begin(), slots.end(), 0);
    table_ = timer.put(table);
    lengths_ = timer.put(lengths);
    slots_ = timer.put(slots);
  }

  int layers() const { return layers_; }
  PagedKv layer(int l) const {
    PagedKv kv;
    kv.base = frames_->as<std::byte>() + l * layer_bytes_;
    kv.layouts = &layout_;
    kv.table = View<const PageEntry, 3>::dense(table_->as<PageEntry>(), {rows_, kv_heads, pages_});
    kv.length = View<const std::int32_t, 2>::dense(lengths_->as<std::int32_t>(), {rows_, kv_heads});
    kv.slots = slots_->as<std::int32_t>();
    kv.rows = rows_, kv.kv_heads = kv_heads, kv.head_dim = head_dim, kv.page_size = page_size_;
    return kv;
  }
  int pages() const { return pages_; }
  bool coded() const { return layout_.codec.k.bits != 0; }
  int token_bytes() const {  // of one head's key and value
    const auto side = [](const CodecSide& c) { return c.bits ? head_dim + 4 : head_dim * 2; };
    return side(layout_.codec.k) + side(layout_.codec.v);
  }

 private:
  int rows_, page_size_, pages_ = 0, layers_ = 1;
  std::int64_t layer_bytes_ = 0;
  PageLayout layout_;
  std::unique_ptr<DeviceBuffer> frames_, table_, lengths_, slots_;
};

// Measures one layer of a chunk after `past` tokens with our own kernel, and with cuDNN where it is installed.
void prompt_lines(const CudaTimer& timer, int past, int tokens, std::vector<Line>& lines) {
  const int total = past + tokens;
  const DevicePages cache(timer, {total}, 16);
  std::vector<std::int32_t> lengths, rows(static_cast<std::size_t>(tokens));
  for (int t = 0; t < tokens; ++t) lengths.insert(lengths.end(), kv_heads, past + t + 1);
  std::iota(rows.begin(), rows.end(), 0);
  const auto device_lengths = timer.put(lengths), device_rows = timer.put(rows);
  const std::int64_t elements = std::int64_t{tokens} * query_heads * head_dim;
  const auto queries = timer.put(randoms(elements));
  const DeviceBuffer out(static_cast<std::size_t>(elements) * sizeof(float)),
      sums(std::size_t{query_heads} * static_cast<std::size_t>(total) * sizeof(float));
  ops::PromptArgs a;
  a.kv = cache.layer(0);
  a.kv.rows = tokens;
  a.kv.table.extent[0] = tokens, a.kv.table.stride[0] = 0;
  a.kv.length = View<const std::int32_t, 2>::dense(device_lengths->as<std::int32_t>(), {tokens, kv_heads});
  a.kv.slots = device_rows->as<std::int32_t>();
  a.queries = View<const float, 3>::dense(queries->as<float>(), {tokens, query_heads, head_dim});
  a.out = View<float, 3>::dense(out.as<float>(), {tokens, query_heads, head_dim});
  a.longest = total;
  NoWorkspace w;
  for (const bool with_sums : {false, true})
    for (const auto& [kernel, name] : {std::pair{ops::PromptKernel::own, "own"}, {ops::PromptKernel::cudnn, "cudnn"}}) {
      a.kernel = kernel;
      if (with_sums) a.sums = View<float, 2>::dense(sums.as<float>(), {query_heads, total});
      if (!ops::attend_prompt(a, w, timer.stream())) continue;
      const Times t = timer.time([&] { ops::attend_prompt(a, w, timer.stream()); }, 10);
      Line l{"prefill_attention",
             fmt::format("bf16 32/8 heads of 128, {} tokens{}{}", tokens, past ? fmt::format(" after {}", past) : "",
                         with_sums ? ", sums" : ""),
             name, t.median, t.best};
      l.flops = (with_sums ? 6. : 4.) * query_heads * head_dim * (past + 0.5 * (tokens + 1)) * tokens;
      lines.push_back(l);
    }
}

}  // namespace

std::vector<Line> cuda_prefill_attention_cases() {
  const CudaTimer timer;
  std::vector<Line> lines;
  for (const auto& [past, tokens] : {std::pair{0, 2048}, {0, 8192}, {0, 8000}, {0, 32768}, {28672, 4096}})
    prompt_lines(timer, past, tokens, lines);
  return lines;
}

}  // namespace kvlab::bench
