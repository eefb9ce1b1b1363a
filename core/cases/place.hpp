// Where a case's inputs and outputs lie: the CPU's memory or a GPU's, with a stream. Everything that a place took is
// freed with it.
#pragma once
#include <kvlab/kv.hpp>

#include <array>
#include <deque>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/stream_memory.hpp"

namespace kvlab::cases {

class Place {
 public:
  explicit Place(Device device) : stream_(device) {}  // Errc::device without a usable GPU
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  Stream stream() const { return stream_.get(); }
  void synchronize() const { kvlab::synchronize(stream()); }

  // Uninitialised memory.
  template <class T>
  T* take(std::size_t count) {
    return reinterpret_cast<T*>(take_bytes(count * sizeof(T)));
  }
  // Memory full of NaN, for outputs.
  template <std::size_t Rank>
  View<float, static_cast<int>(Rank)> unwritten(const std::array<std::int64_t, Rank>& extent) {
    auto v = View<float, static_cast<int>(Rank)>::dense(nullptr, extent);
    v.data = put(std::vector<float>(count(v), std::numeric_limits<float>::quiet_NaN()));
    return v;
  }
  template <class T>
  std::remove_const_t<T>* put(T* from, std::size_t count) {
    auto* to = take<std::remove_const_t<T>>(count);
    copy_memory(to, from, count * sizeof(T), stream());
    synchronize();
    return to;
  }
  template <class T>
  T* put(const std::vector<T>& from) {
    return put(from.data(), from.size());
  }
  // Copies a whole dense view. The copy has the same extents.
  template <class T, int Rank>
  View<T, Rank> put(View<T, Rank> dense) {
    if (!dense) return {};
    return View<T, Rank>::dense(put(dense.data, count(dense)), dense.extent);
  }
  template <class T, int Rank>
  std::vector<std::remove_const_t<T>> get(View<T, Rank> dense) const {
    std::vector<std::remove_const_t<T>> out(count(dense));
    copy_memory(out.data(), dense.data, out.size() * sizeof(T), stream());
    synchronize();
    return out;
  }
  // Copies the cache with its frames (`arena_bytes` from kv.base on), tables and slots.
  PagedKv put(PagedKv kv, std::size_t arena_bytes);
  template <class List>
  List put(List list) {
    list.index = put(list.index);
    list.count = put(list.count);
    return list;
  }

  // False if something was written in front of or behind what the place holds in the CPU's memory.
  bool margins_intact() const;

 private:
  struct Block {
    StreamMemory memory;
    std::size_t bytes;  // without margins
  };
  std::byte* take_bytes(std::size_t bytes);
  template <class T, int Rank>
  static std::size_t count(const View<T, Rank>& v) {
    std::size_t n = 1;
    for (const auto e : v.extent) n *= static_cast<std::size_t>(e);
    return n;
  }

  OwnedStream stream_;
  std::deque<Block> blocks_;
};

class OnHost final : public Place {
 public:
  OnHost() : Place(Device::cpu) {}
};
class OnDevice final : public Place {
 public:
  OnDevice() : Place(Device::cuda) {}
};

}  // namespace kvlab::cases
