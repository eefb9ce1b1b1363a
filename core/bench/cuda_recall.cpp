// Ways to recall pages while decode steps run: what both cost each other.
#include <fmt/format.h>

#include <array>
#include <atomic>
#include <bit>
#include <future>
#include <numeric>

#include "base/cuda_stopwatch.hpp"
#include "base/device_op.hpp"
#include "bench/cuda_timing.hpp"
#include "cases/scattered_copy.hpp"

namespace kvlab::bench {
namespace {

using cases::Recall;

// Recalls slices of the pages one after another, from a host thread of its own, until it is stopped.
class Recalling {
 public:
  Recalling(Recall& recall, int slice)
      : recall_(recall), slice_(slice), work_(std::async(std::launch::async, [this] { return recall_slices(); })) {}
  ~Recalling() {
    stop_ = true;
    if (work_.valid()) work_.wait();
  }
  Recalling(const Recalling&) = delete;
  Recalling& operator=(const Recalling&) = delete;

  void wait_for_first() {
    while (ended_ == 0)
      if (work_.wait_for(std::chrono::milliseconds(1)) == std::future_status::ready) stop();  // throws its error
  }
  std::size_t ended() const { return ended_; }         // slices
  std::size_t next() const { return ended_ + ahead; }  // a slice that starts later than this call
  // Returns the milliseconds of every slice, by events.
  std::vector<double> stop() {
    stop_ = true;
    return work_.get();
  }

 private:
  static constexpr std::size_t ahead = 3;  // slices that the stream has and that may not have ended

  std::vector<double> recall_slices() {
    std::array<CudaStopwatch, ahead> watches;
    std::vector<double> ms;
    int first = 0;
    for (std::size_t i = 0;; ++i) {
      CudaStopwatch& watch = watches[i % ahead];
      if (i >= ahead) {
        ms.push_back(watch.ms());
        ended_ = ms.size();
      }
      if (stop_) break;
      watch.begin(recall_.stream());
      recall_.run(first, slice_);
      watch.end(recall_.stream());
      first = (first + slice_) % recall_.of().pages;
    }
    synchronize(recall_.stream());
    return ms;
  }

  Recall& recall_;
  int slice_;
  std::atomic<bool> stop_ = false;
  std::atomic<std::size_t> ended_ = 0;
  std::future<std::vector<double>> work_;
};

// While it lives, kernels of decode steps leave relays the multiprocessors that they leave to a cache's own copies.
struct RoomForRelays {
  explicit RoomForRelays(bool yes) { only_on_cuda<scattered_copy::relays_beside>(yes); }
  ~RoomForRelays() { only_on_cuda<scattered_copy::relays_beside>(false); }
  RoomForRelays(const RoomForRelays&) = delete;
};

// Pages, a power of two, that take about two milliseconds.
int slice_of(Recall& recall) {
  const int pages = recall.of().pages;
  const double seconds = cuda_seconds(recall.stream(), [&] { recall.run(0, pages); });
  return static_cast<int>(std::bit_floor(static_cast<unsigned>(std::clamp(pages * 2e-3 / seconds, 1., 1. * pages))));
}

}  // namespace

std::string shape_of(const Recall::Of& of) {
  return fmt::format("recall {} pages of {} tokens, {} B each", of.pages, of.page_size, of.page_bytes());
}

std::vector<Recall::Of> recalls_beside_steps() {
  std::vector<Recall::Of> ways;
  for (const int page_size : {16, 32})
    for (const Recall::Way way : Recall::ways) {
      if (!Recall::available(way)) continue;
      Recall::Of of{way, 0, page_size};
      of.pages = static_cast<int>((std::int64_t{64} << 20) / of.page_bytes());
      const int usual = of.blocks;
      const bool more = way == Recall::Way::relay || way == Recall::Way::gather;
      for (const int blocks : {usual / 2, usual, usual * 2}) {
        of.blocks = blocks;
        if (more || blocks == usual) ways.push_back(of);
      }
    }
  return ways;
}

std::vector<Line> cuda_recall_cases(const ModelSetup& s, const std::vector<Recall::Of>& ways) {
  std::vector<Line> lines;
  cuda_steps(s, static_cast<int>(ways.size()), [&](int i, const std::function<double()>& steps) {
    const RoomForRelays room(ways[static_cast<std::size_t>(i)].way == Recall::Way::relay);
    const OwnedStream background(Device::cuda, true);
    Recall recall(ways[static_cast<std::size_t>(i)], background.get());
    recall.require_right();
    const int slice = slice_of(recall);
    const Recall::Of& of = recall.of();
    Line l{"copy", shape_of(of), of.name()};
    l.beside.step = fmt::format("decode, {}, batch {} at {}", s.model, s.shapes[0].batch, s.shapes[0].context);
    l.beside.alone = steps();
    Recalling recalling(recall, slice);
    recalling.wait_for_first();
    const std::size_t first = recalling.next();
    l.beside.beside = steps();
    const std::size_t last = recalling.ended();
    const std::vector<double> ms = recalling.stop();
    l.beside.alone = (l.beside.alone + steps()) / 2;
    if (last <= first)
      throw Error(Errc::device, fmt::format("got no recall of {} pages during the steps, wanted one", slice),
                  "kvlab bench copy, " + of.name());
    const auto begin = ms.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = ms.begin() + static_cast<std::ptrdiff_t>(last);
    const double all = 1e-3 * of.pages / slice;  // milliseconds of a slice to seconds of all pages
    l.seconds = all * std::accumulate(begin, end, 0.) / static_cast<double>(last - first);
    l.best = all * *std::min_element(begin, end);
    l.bytes = static_cast<double>(of.pages * of.page_bytes());
    l.reads = true;
    lines.push_back(std::move(l));
  });
  const CudaTimer timer;
  const double rate = cuda_copy_rate(timer.stream(), true);
  for (Line& l : lines) l.copy_rate = rate;
  return lines;
}

}  // namespace kvlab::bench
