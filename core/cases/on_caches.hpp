// Cases that run on caches of every kind.
#pragma once
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "cases/case.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/quick.hpp"

namespace kvlab::cases {

// The op and its reference must leave the same numbers, each in its own copy of `start`.
template <int Rank, class Op, class Plain>
void same(Place& place, Check& check, const std::string& what, View<float, Rank> start, double most, const Op& op,
          const Plain& plain) {
  const auto got = place.put(start);
  std::vector<float> wanted = Guarded<Rank>::copy(start);
  plain(View<float, Rank>::dense(wanted.data(), start.extent));
  op(got);
  check.equal(what, place.get(got), wanted, most);
}

// The n-th RandomCache. References work on `kv`, ops on its copy `there`.
struct OnCache {
  unsigned n;
  Check& check;
  Place place;
  RandomCache c;
  PagedKv kv, there;

  OnCache(unsigned number, Device device, Check& to)
      : n(number),
        check(to),
        place(device),
        c(number),
        kv(c.cache.view()),
        there(place.put(kv, c.cache.arena_bytes())) {}
  Stream stream() const { return place.stream(); }
  bool intact() const {
    const auto bytes = static_cast<std::int64_t>(c.cache.arena_bytes());
    return place.margins_intact() &&
           c.cache.guards_intact(place.get(View<const std::byte, 1>::dense(there.base, {bytes})).data());
  }
  template <int Rank, class Op, class Plain>
  void same(const std::string& what, View<float, Rank> start, double most, const Op& op, const Plain& plain) {
    cases::same(place, check, what, start, most, op, plain);
  }
};

// Random numbers for an op and for its reference.
template <int Rank>
class Numbers {
 public:
  Numbers(OnCache& x, std::array<std::int64_t, Rank> extent, float factor = 1) : place_(x.place) {
    std::int64_t n = 1;
    for (const auto e : extent) n *= e;
    values_ = x.c.normal(n);
    for (float& v : values_) v *= factor;
    view_ = View<float, Rank>::dense(values_.data(), extent);
  }
  Numbers(const Numbers&) = delete;
  View<float, Rank> own() const { return view_; }
  View<const float, Rank> view() const { return view_; }
  View<const float, Rank> put() const { return place_.put(view()); }

 private:
  Place& place_;
  std::vector<float> values_;
  View<float, Rank> view_;
};

// A case of `caches` random caches, each at a place of its own.
template <class F>
Case on_caches(std::string op, std::string shape, unsigned caches, F check) {
  return checked(std::move(op), std::move(shape), [check, caches](Place& place, Check& to) {
    for (unsigned n = 0; n < caches; n += quick() ? 5 : 1) {
      const auto scope = to.in(fmt::format("cache {}", n));
      OnCache x(n, place.stream().device(), to);
      check(x);
      to.that("memory around frames, inputs and outputs is as it was", x.intact());
    }
  });
}

}  // namespace kvlab::cases
