// Pages that cross a link without loss in fewer bytes.
#include <fmt/format.h>

#include <cstring>
#include <numeric>
#include <random>

#include "cases/case.hpp"
#include "cases/numbers.hpp"
#include "cases/recall.hpp"
#include "ops/page/lossless.hpp"
#include "ops/page/paged.hpp"
#include "ops/page/reference.hpp"

namespace kvlab::cases {
namespace {

using Numbers16 = std::vector<std::uint16_t>;

enum class Kind {
  normal,    // of one size
  channels,  // a few channels are 30 times as large, as in keys
  zeros,
  few,     // numbers of a few exponents, none of them an exception
  random,  // any bits: NaN, infinities, subnormal numbers; no page gets smaller
};
constexpr const char* names[] = {"normal numbers", "large channels", "zeros", "few exponents", "random bits"};

struct Crossing {
  Kind kind;
  int pages, page_size, dim, columns;
  bool pinned = false;  // the packed frames lie in pinned memory
};

// Raw frames are packed into others, and these unpacked into a third set.
class LosslessScene final : public Scene {
 public:
  enum class Way { pack, unpack };
  LosslessScene(Place& place, const Crossing& of, Way way)
      : place_(place),
        of_(of),
        way_(way),
        layout_(ops::make_layout(DType::bf16, {}, of.page_size, of.dim, of.columns)),
        raw_(bytes_of_frames()) {
    std::mt19937 rng(static_cast<unsigned>(of.page_size + of.dim));
    for (int page = 0; page < of.pages; ++page) {
      std::byte* frame = raw_.data() + page * layout_.bytes;
      for (std::int64_t i = 0; i < layout_.bytes; ++i) frame[i] = static_cast<std::byte>(rng());
      for (const std::int64_t at : {layout_.k, layout_.v}) {
        const Numbers16 side = numbers(rng);
        std::memcpy(frame + at, side.data(), 2 * side.size());
      }
    }
    Ints there(static_cast<std::size_t>(of.pages));
    std::iota(there.begin(), there.end(), 0);
    for (auto& frame : there) frame *= static_cast<std::int32_t>(layout_.bytes / granule_bytes);
    Ints shuffled = there;
    std::shuffle(shuffled.begin(), shuffled.end(), rng);
    order_ = shuffled;
    const std::vector<std::byte> blank(bytes_of_frames(), std::byte{0xA5});
    std::byte* packed;
    std::int32_t* bytes;
    if (of.pinned) {
      packed_ = Recall::pinned(bytes_of_frames() + sizeof(std::int32_t) * 2 * there.size());
      packed = packed_.get();
      bytes = reinterpret_cast<std::int32_t*>(packed + bytes_of_frames());
      std::memcpy(packed, blank.data(), blank.size());
    } else {
      packed = place.put(blank), bytes = place.take<std::int32_t>(2 * there.size());
    }
    const std::int32_t *first = place.put(there), *second = place.put(shuffled);
    pack_ = {layout_, of.pages, place.put(raw_), first, packed, second, bytes};
    unpack_ = {layout_, of.pages, packed, second, place.put(blank), first, bytes};
    if (way == Way::unpack) ops::lossless_pack(pack_, place.stream());
    place.synchronize();
  }

  void run(int) override {
    way_ == Way::pack ? ops::lossless_pack(pack_, place_.stream()) : ops::lossless_unpack(unpack_, place_.stream());
  }
  void check(Check& check) override {
    ops::lossless_pack(pack_, place_.stream());
    ops::lossless_unpack(unpack_, place_.stream());
    check.that("every bit comes back", bytes_at(unpack_.to) == raw_);
    const std::vector<std::byte> packed = bytes_at(unpack_.from);
    const Ints bytes = place_.get(View<const std::int32_t, 1>::dense(pack_.bytes, {2 * of_.pages}));
    bool equal = true, as_counted = true;
    std::size_t all = 0;
    for (int of = 0; of < 2 * of_.pages; ++of) {
      const std::byte* frame = raw_.data() + of / 2 * layout_.bytes;
      const std::int64_t at = of % 2 ? layout_.v : layout_.k;
      Numbers16 side(static_cast<std::size_t>(n()));
      std::memcpy(side.data(), frame + at, 2 * side.size());
      const std::vector<std::uint8_t> wanted = ops::lossless_side_reference(side);
      const std::byte* got =
          packed.data() + std::int64_t{order_[static_cast<std::size_t>(of / 2)]} * granule_bytes + at;
      equal = equal && std::memcmp(got, wanted.data(), wanted.size()) == 0;
      as_counted = as_counted &&
                   bytes[static_cast<std::size_t>(of)] == static_cast<std::int32_t>((wanted.size() + 15) / 16 * 16);
      all += static_cast<std::size_t>(bytes[static_cast<std::size_t>(of)]);
    }
    check.that("sides are packed as in plain loops", equal);
    check.that("the bytes are those of plain loops", as_counted);
    const double rate = 4. * n() * of_.pages / static_cast<double>(all);
    if (of_.kind == Kind::random) check.that("random bits stay as they are", rate == 1);
    if (of_.kind == Kind::normal && n() >= 1024)
      check.that("normal numbers take less than three quarters", rate > 4. / 3);
  }

 private:
  using Ints = std::vector<std::int32_t>;
  int n() const { return of_.page_size * of_.dim; }
  std::size_t bytes_of_frames() const { return static_cast<std::size_t>(of_.pages * layout_.bytes); }
  std::vector<std::byte> bytes_at(const std::byte* from) const {
    return place_.get(View<const std::byte, 1>::dense(from, {static_cast<std::int64_t>(bytes_of_frames())}));
  }
  Numbers16 numbers(std::mt19937& rng) const {
    std::normal_distribution<float> normal;
    Numbers16 out;
    for (int i = 0; i < n(); ++i) {
      const bool large = of_.kind == Kind::channels && i % of_.dim < 3;
      const float x = of_.kind == Kind::few ? 1.f + static_cast<float>(rng() % 100) / 10 : normal(rng);
      out.push_back(of_.kind == Kind::random  ? static_cast<std::uint16_t>(rng())
                    : of_.kind == Kind::zeros ? std::uint16_t{0}
                                              : to_16(large ? 30 * x : x, DType::bf16));
    }
    return out;
  }

  Place& place_;
  Crossing of_;
  Way way_;
  PageLayout layout_;
  std::vector<std::byte> raw_;
  Ints order_;  // frames of the packed pages
  Recall::Pinned packed_{nullptr, nullptr};
  ops::LosslessPages pack_, unpack_;
};

using Way = LosslessScene::Way;

Case crossing(const Crossing& of, Way way, std::string shape) {
  Case c{"lossless", std::move(shape)};
  c.make = [of, way](Place& place, int) { return std::make_unique<LosslessScene>(place, of, way); };
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v;
  for (const Kind kind : {Kind::normal, Kind::channels, Kind::zeros, Kind::few, Kind::random})
    for (const auto& [page_size, dim, columns] : {std::tuple{16, 64, 0}, {4, 64, 1}, {32, 128, 2}, {8, 96, 0}})
      v.push_back(crossing({kind, 7, page_size, dim, columns}, Way::pack,
                           fmt::format("{} of {} x {}", names[static_cast<int>(kind)], page_size, dim)));
  // 64 MiB of pages to pinned memory and back. The rate is of the bytes before packing, so it may pass the link's.
  for (const Kind kind : {Kind::normal, Kind::channels, Kind::random})
    for (const Way way : {Way::pack, Way::unpack}) {
      const Crossing of{kind, 4096, 32, 128, 0, true};
      v.push_back(crossing(of, way,
                           fmt::format("{} {} pages, {}", way == Way::pack ? "pack" : "unpack", of.pages,
                                       names[static_cast<int>(kind)])));
      v.back().timed_cuda = true;
      v.back().work.bytes = 4096. * 2 * 2 * 32 * 128;
      v.back().work.copy = way == Way::pack ? Work::Copy::to_host : Work::Copy::to_device;
      v.back().kernel = "pinned memory";
      v.back().runs = 9;
      Crossing small = of;
      small.pages = 512, small.pinned = false;
      v.push_back(crossing(small, way,
                           fmt::format("{} {} pages, {}", way == Way::pack ? "pack" : "unpack", small.pages,
                                       names[static_cast<int>(kind)])));
      v.back().timed_cpu = true;
      v.back().work.bytes = 512. * 2 * 2 * 32 * 128 * 2;
      v.back().work.copy = Work::Copy::in_memory;
    }
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
