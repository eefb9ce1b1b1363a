#include "cases/recall.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <kvlab/error.hpp>
#include <numeric>
#include <random>
#include <utility>

#include "base/backend.hpp"
#include "base/device_op.hpp"
#include "base/log.hpp"
#include "base/threads.hpp"
#include "cases/case.hpp"
#include "cases/scattered_copy.hpp"

namespace kvlab::cases {
namespace {

// Half of the threads, so that a decode step beside them has a core.
int gathering_threads() {
  static const int threads = std::max(1, usable_cores() / 2);
  return threads;
}

std::vector<std::int64_t> some_of(int count, int of, unsigned seed) {
  std::vector<std::int64_t> v(static_cast<std::size_t>(of));
  std::iota(v.begin(), v.end(), 0);
  std::shuffle(v.begin(), v.end(), std::mt19937(seed));
  v.resize(static_cast<std::size_t>(count));
  return v;
}

}  // namespace

std::string Recall::Of::name() const {
  switch (way) {
    case Way::relay: return fmt::format("relay, {} warps", blocks);
    case Way::gather: return fmt::format("gather, {} blocks", blocks);
    case Way::memcpy_page: return "memcpy a page";
    case Way::memcpy_batch: return "batched memcpy";
    case Way::nhd_gather: return "NHD, gather";
    case Way::nhd_memcpy: return "NHD, 2D memcpy";
    case Way::staging: return "staging";
    case Way::double_buffers: return "double buffers";
  }
  return "?";
}

bool Recall::available(Way way) {
  if (way != Way::memcpy_batch || only_on_cuda<scattered_copy::has_batch>()) return true;
  log::warn("batched memcpy is left out: kvlab was built with a CUDA toolkit older than 13.0");
  return false;
}

Recall::Pinned Recall::pinned(std::size_t bytes) {
  const CudaRuntime& r = require_cuda("a recall of pages").runtime;
  auto* p = static_cast<std::byte*>(r.allocate_pinned(bytes));
  if (!p) throw NoRoom(fmt::format("got no pinned memory of {} bytes", bytes));
  return {p, r.free_pinned};
}

Recall::Recall(const Of& of, Stream s)
    : of_(of),
      stream_(s),
      pieces_(of.nhd() ? 2 * of.page_size : 1),
      piece_bytes_(static_cast<int>(of.page_bytes() / pieces_)),
      stride_(std::int64_t{piece_bytes_} * of.kv_heads),
      from_(some_of(of.pages, 2 * of.pages, 1)),
      to_(some_of(of.pages, 2 * of.pages, 2)),
      host_(pinned(static_cast<std::size_t>(2 * of.pages * of.page_bytes()))),
      host_stage_(nullptr, [](void*) {}),
      frames_(s, static_cast<std::size_t>(2 * of.pages * of.page_bytes())) {
  const std::int64_t unit = of.page_bytes();
  std::mt19937_64 random(3);
  auto* words = reinterpret_cast<std::uint64_t*>(host_.get());
  std::generate_n(words, 2 * of.pages * unit / 8, std::ref(random));
  for (std::int64_t& id : from_)
    id = of.nhd() ? id / of.kv_heads * of.kv_heads * unit + id % of.kv_heads * piece_bytes_ : id * unit;
  for (std::int64_t& id : to_) id *= unit;
  bytes_.assign(from_.size(), static_cast<std::size_t>(unit));
  for (std::size_t i = 0; i < from_.size(); ++i) {
    sources_.push_back(host_.get() + from_[i]);
    targets_.push_back(frames_.as<>() + to_[i]);
  }
  const auto on_device = [&](const std::vector<std::int64_t>& list) {
    StreamMemory m(s, list.size() * sizeof(std::int64_t));
    copy_memory(m.as<>(), list.data(), m.bytes(), s);
    return m;
  };
  from_list_ = on_device(from_), to_list_ = on_device(to_);
  if (of.way != Way::staging && of.way != Way::double_buffers) return;
  const auto staged = static_cast<std::size_t>(of.way == Way::staging ? of.pages * unit : 2 * of.chunk_bytes);
  host_stage_ = pinned(staged);
  stage_ = StreamMemory(s, staged);
  if (of.way == Way::double_buffers)
    for (int i = 0; i < 2; ++i) lanes_.emplace_back(s);
}

void Recall::stage(int first, int count, std::int64_t at, Stream s) {
  const std::int64_t unit = of_.page_bytes();
  std::byte* host = host_stage_.get() + at;
#pragma omp parallel for num_threads(gathering_threads())
  for (int i = 0; i < count; ++i)
    std::memcpy(host + i * unit, sources_[static_cast<std::size_t>(first + i)], static_cast<std::size_t>(unit));
  copy_memory(stage_.as<>() + at, host, static_cast<std::size_t>(count * unit), s);
  only_on_cuda<scattered_copy::gather>(
      ScatteredCopy{stage_.as<>() + at, frames_.as<>(), nullptr, to_list_.as<std::int64_t>() + first, count, 1,
                    static_cast<int>(unit), 0},
      of_.blocks, s);
}

void Recall::run(int first, int count) {
  const auto begin = static_cast<std::size_t>(first), end = begin + static_cast<std::size_t>(count);
  switch (of_.way) {
    case Way::relay:
      only_on_cuda<scattered_copy::relay>(
          ScatteredCopy{host_.get(), frames_.as<>(), from_list_.as<std::int64_t>() + first,
                        to_list_.as<std::int64_t>() + first, count, 1, piece_bytes_, 0},
          of_.blocks, stream_);
      break;
    case Way::gather:
    case Way::nhd_gather:
      only_on_cuda<scattered_copy::gather>(
          ScatteredCopy{host_.get(), frames_.as<>(), from_list_.as<std::int64_t>() + first,
                        to_list_.as<std::int64_t>() + first, count, pieces_, piece_bytes_, stride_},
          of_.blocks, stream_);
      break;
    case Way::memcpy_page:
      for (std::size_t i = begin; i < end; ++i) copy_memory(targets_[i], sources_[i], bytes_[i], stream_);
      break;
    case Way::memcpy_batch:
      only_on_cuda<scattered_copy::batch>(targets_.data() + begin, sources_.data() + begin, bytes_.data() + begin,
                                          count, stream_);
      break;
    case Way::nhd_memcpy:
      for (std::size_t i = begin; i < end; ++i)
        only_on_cuda<scattered_copy::page_2d>(host_.get() + from_[i], frames_.as<>() + to_[i], pieces_, piece_bytes_,
                                              stride_, stream_);
      break;
    case Way::staging:
      synchronize(stream_);  // the copy before has left the buffer
      stage(first, count, 0, stream_);
      break;
    case Way::double_buffers: {
      const int chunk = static_cast<int>(of_.chunk_bytes / of_.page_bytes());
      for (SideStream& lane : lanes_) lane.begin();
      for (int at = 0; at < count; at += chunk) {
        const int turn = at / chunk % 2;
        const Stream lane = lanes_[static_cast<std::size_t>(turn)].stream();
        synchronize(lane);
        stage(first + at, std::min(chunk, count - at), turn * of_.chunk_bytes, lane);
      }
      for (SideStream& lane : lanes_) {
        lane.end(SideStream::no_lane);
        lane.join();
      }
      break;
    }
  }
}

bool Recall::right() {
  std::vector<std::byte> got(frames_.bytes()), wanted(frames_.bytes());
  zero_memory(frames_.as<>(), frames_.bytes(), stream_);
  const int part = of_.pages / 3;
  run(0, part);
  run(part, of_.pages - part);
  copy_memory(got.data(), frames_.as<>(), got.size(), stream_);
  synchronize(stream_);
  for (std::size_t i = 0; i < from_.size(); ++i)
    for (int p = 0; p < pieces_; ++p)
      std::memcpy(wanted.data() + to_[i] + p * piece_bytes_, host_.get() + from_[i] + p * stride_,
                  static_cast<std::size_t>(piece_bytes_));
  return got == wanted;
}

void Recall::require_right() {
  if (!right()) throw Error(Errc::internal, "got other bytes, wanted those of the pages", "recall by " + of_.name());
}

namespace {

class RecallScene final : public Scene {
 public:
  RecallScene(const Recall::Of& of, Stream s) : recall_(of, s) {}
  void prepare() override {
    if (!std::exchange(checked_, true)) recall_.require_right();
  }
  void run(int) override { recall_.run(0, recall_.of().pages); }
  void check(Check& check) override {
    check.that("every frame has its page's bytes, and the others have none", recall_.right());
  }

 private:
  Recall recall_;
  bool checked_ = false;
};

std::vector<Case> list() {
  std::vector<Case> v;
  const auto add = [&](const Recall::Of& of) {
    Case c{"copy", fmt::format("recall {} pages of {} tokens, {} B each", of.pages, of.page_size, of.page_bytes())};
    c.make = [of](Place& place, int) -> std::unique_ptr<Scene> {
      if (!Recall::available(of.way)) return nullptr;
      return std::make_unique<RecallScene>(of, place.stream());
    };
    c.cpu = false;
    c.kernel = of.name();
    c.prepared = true;
    c.runs = 9;
    c.work.bytes = static_cast<double>(of.pages * of.page_bytes());
    c.work.copy = Work::Copy::to_device;
    v.push_back(std::move(c));
  };
  using Way = Recall::Way;
  for (const Way way : Recall::ways) {
    add({way, 30, 4, 3, 3, 24, 4 * 384});
    add({way, 24, 16, 5, 8, 128, 3 * 8192});
  }
  add({Way::relay, 60, 16, 1, 8, 128, 0});  // one block has more pieces than stages
  for (const int page_size : {16, 32})
    for (const Way way : Recall::ways) {
      add({way, (64 << 20) / (page_size * 512), page_size});
      v.back().timed_cuda = true;
    }
  // A page of one token: each token's key and value travel alone. They lie side by side here, as in no store, and as
  // NHD apart, as a store's fetch finds them.
  for (const Way way : {Way::relay, Way::gather, Way::nhd_gather})
    for (const bool timed : {false, true}) {
      const Recall::Of of{way, timed ? 131072 : 60, 1, way == Way::relay ? 4 : 64, timed ? 8 : 3, timed ? 128 : 24};
      add(of);
      v.back().shape = fmt::format("fetch {} tokens of {} B, K and V {}", of.pages, of.page_bytes(),
                                   of.nhd() ? "apart" : "side by side");
      v.back().timed_cuda = timed;
    }
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
