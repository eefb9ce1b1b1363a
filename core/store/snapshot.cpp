// Saving a sequence's cache and taking it back.
#include <kvlab/error.hpp>

#include <cstring>

#include "store/store.hpp"

namespace kvlab {
namespace {

constexpr std::uint64_t magic = 0x31766b62616c766bULL;  // "kvlabkv1"

class Writer {
 public:
  explicit Writer(std::vector<std::byte>& out) : out_(out) {}
  void bytes(const void* p, std::size_t n) {
    const auto* b = static_cast<const std::byte*>(p);
    out_.insert(out_.end(), b, b + n);
  }
  template <class T>
  void put(const T& v) {
    bytes(&v, sizeof v);
  }

 private:
  std::vector<std::byte>& out_;
};

class Reader {
 public:
  explicit Reader(const std::vector<std::byte>& in) : in_(in) {}
  const std::byte* bytes(std::size_t n) {
    if (n > in_.size() - at_)
      throw Error(Errc::data, "got a saved cache that ends at byte " + std::to_string(in_.size()) + ", wanted more");
    const std::byte* p = in_.data() + at_;
    at_ += n;
    return p;
  }
  template <class T>
  T get() {
    T v;
    std::memcpy(&v, bytes(sizeof v), sizeof v);
    return v;
  }

 private:
  const std::vector<std::byte>& in_;
  std::size_t at_ = 0;
};

}  // namespace

std::vector<std::byte> Store::save(int slot) const {
  const Shape& s = options_.shape;
  std::vector<std::byte> out;
  Writer w(out);
  w.put(magic);
  for (int v :
       {s.layers, s.kv_heads, s.head_dim, s.page_size, static_cast<int>(s.dtype), static_cast<int>(layouts_.size())})
    w.put(std::int32_t{v});
  for (const auto& l : layouts_) w.put(l.bytes);
  w.put(host_layout_.bytes);
  w.put(summary_bytes_);
  w.put(static_cast<std::uint64_t>(workspace_.slot_bytes()));
  w.put(position(slot));
  w.put(steps(slot));
  for (int layer = 0; layer < s.layers; ++layer)
    for (int head = 0; head < s.kv_heads; ++head) {
      const int n = length(layer, slot, head), pages = (n + s.page_size - 1) / s.page_size;
      w.put(std::int32_t{n});
      for (int page = 0; page < pages; ++page) {
        for (Tier tier : {Tier::device, Tier::host}) {
          const PageEntry& e = entries(tier, layer, slot, head)[page];
          w.put(static_cast<std::uint8_t>(e.frame == null_frame ? 0xff : e.codec));
          if (e.frame == null_frame) continue;
          w.put(e.tokens);
          w.bytes(arena(tier).at(e.frame), static_cast<std::size_t>(layout(tier, e).bytes));
        }
        if (summary_bytes_)
          w.bytes(const_cast<Store*>(this)->summary_at(layer, slot, head, page),
                  static_cast<std::size_t>(summary_bytes_));
      }
    }
  const std::size_t at = out.size();
  out.resize(at + workspace_.slot_bytes());
  workspace_.save_slot(slot, out.data() + at);
  return out;
}

Fit Store::restore(int slot, const std::vector<std::byte>& snapshot) {
  const Shape& s = options_.shape;
  Reader r(snapshot);
  auto expect = [](auto got, auto wanted, const char* what) {
    if (got != wanted)
      throw Error(Errc::data, std::string("saved cache: got ") + what + " " + std::to_string(got) + ", wanted " +
                                  std::to_string(wanted));
  };
  expect(r.get<std::uint64_t>(), magic, "magic");
  expect(r.get<std::int32_t>(), s.layers, "layers");
  expect(r.get<std::int32_t>(), s.kv_heads, "KV heads");
  expect(r.get<std::int32_t>(), s.head_dim, "head dim");
  expect(r.get<std::int32_t>(), s.page_size, "page size");
  expect(r.get<std::int32_t>(), static_cast<int>(s.dtype), "dtype");
  expect(r.get<std::int32_t>(), static_cast<int>(layouts_.size()), "codecs");
  for (const auto& l : layouts_) expect(r.get<std::int64_t>(), l.bytes, "frame bytes");
  expect(r.get<std::int64_t>(), host_layout_.bytes, "host frame bytes");
  expect(r.get<std::int64_t>(), summary_bytes_, "summary bytes");
  expect(r.get<std::uint64_t>(), static_cast<std::uint64_t>(workspace_.slot_bytes()), "state bytes");

  close(slot);
  used_[static_cast<std::size_t>(slot)] = true;
  position_[static_cast<std::size_t>(slot)] = r.get<std::int32_t>();
  step_[static_cast<std::size_t>(slot)] = r.get<std::int32_t>();
  for (int layer = 0; layer < s.layers; ++layer)
    for (int head = 0; head < s.kv_heads; ++head) {
      const std::int32_t n = r.get<std::int32_t>();
      if (n < 0 || n > static_cast<int>(pages_per_head_) * s.page_size)
        throw Error(Errc::data, "saved cache: got a head of " + std::to_string(n) + " tokens, wanted at most " +
                                    std::to_string(pages_per_head_ * static_cast<std::size_t>(s.page_size)));
      const int pages = (n + s.page_size - 1) / s.page_size;
      // First, so that close() frees a sequence whose snapshot ends early.
      lengths_[head_index(layer, slot, head)] = n;
      if (summary_bytes_) ledger_.hold(Tier::device, Tag::summaries, pages * summary_bytes_);
      for (int page = 0; page < pages; ++page) {
        for (Tier tier : {Tier::device, Tier::host}) {
          const std::uint8_t codec = r.get<std::uint8_t>();
          if (codec == 0xff) continue;
          if (tier == Tier::device && codec >= layouts_.size())
            throw Error(Errc::data, "saved cache: got codec " + std::to_string(codec) + ", wanted a declared one");
          PageEntry& e = entries(tier, layer, slot, head)[page];
          const std::uint16_t tokens = r.get<std::uint16_t>();
          if (!take(tier, e, codec)) return Fit::out_of_memory;
          e.tokens = tokens;
          const std::size_t bytes = static_cast<std::size_t>(layout(tier, e).bytes);
          std::memcpy(arena(tier).at(e.frame), r.bytes(bytes), bytes);
        }
        if (summary_bytes_) {
          const std::size_t bytes = static_cast<std::size_t>(summary_bytes_);
          std::memcpy(summary_at(layer, slot, head, page), r.bytes(bytes), bytes);
        }
      }
    }
  workspace_.load_slot(slot, r.bytes(workspace_.slot_bytes()));
  return Fit::ok;
}

}  // namespace kvlab
