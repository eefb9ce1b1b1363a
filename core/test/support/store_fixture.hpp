// A small store whose tokens are known: K and V of a token follow from layer, head and text position.
#pragma once
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/page/packed.hpp"
#include "ops/page/paged.hpp"
#include "store/cpu_store.hpp"

namespace kvlab::test {

inline std::vector<float> test_inv_freq(int head_dim) {
  std::vector<float> out;
  for (int i = 0; i < head_dim / 2; ++i) out.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / head_dim)));
  return out;
}

struct StoreFixture {
  StoreOptions options;
  std::vector<float> inv_freq;
  bool wild = false;

  StoreFixture() {
    options.shape.layers = 2;
    options.shape.query_heads = 4;
    options.shape.kv_heads = 2;
    options.shape.head_dim = 8;
    options.shape.page_size = 4;
    options.shape.max_slots = 3;
    options.shape.max_tokens = 64;
    options.shape.dtype = DType::f32;
    inv_freq = test_inv_freq(8);
    options.rope_table = {inv_freq.data(), 8, 1.f};
  }

  // A value of a token's key (side 0) or value (side 1), exact in bf16.
  static float element(int side, int layer, int slot, int head, int position, int d) {
    const unsigned mixed =
        static_cast<unsigned>(((((side * 7 + layer) * 5 + slot) * 3 + head) * 131 + position) * 17 + d);
    return static_cast<float>(static_cast<int>(mixed * 2654435761u >> 25) - 64) / 16.f;
  }
  std::vector<float> row(int side, int layer, int slot, int head, int position) const {
    std::vector<float> out(static_cast<std::size_t>(options.shape.head_dim));
    for (int d = 0; d < options.shape.head_dim; ++d)
      out[static_cast<std::size_t>(d)] = element(side, layer, slot, head, position, d);
    // Exponents far apart, as a page that packs badly has.
    if (wild && position / 24 % 2)
      for (float& x : out) x = std::ldexp(x, (position * 37 + static_cast<int>(&x - out.data()) * 11) % 121 - 60);
    return out;
  }

  // Appends `tokens` tokens to every layer, then advances the slot's position.
  Fit fill(CpuStore& store, int slot, int tokens, bool decode = false) const {
    const Shape& s = options.shape;
    const int first = store.position(slot);
    for (int layer = 0; layer < s.layers; ++layer) {
      std::vector<float> k, v;
      for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < s.kv_heads; ++h) {
          const auto a = row(0, layer, slot, h, first + t), b = row(1, layer, slot, h, first + t);
          k.insert(k.end(), a.begin(), a.end());
          v.insert(v.end(), b.begin(), b.end());
        }
      if (const Fit fit = store.append(layer, slot, k.data(), v.data(), tokens, first); fit != Fit::ok) return fit;
    }
    return store.advance(slot, tokens, decode).fit;
  }
};

using PerHead = std::vector<std::vector<std::int32_t>>;

// Owned lists for one slot, the same for every head unless given per head.
class Lists {
 public:
  Lists(int heads, const std::vector<std::int32_t>& same) : Lists(PerHead(static_cast<std::size_t>(heads), same)) {}
  explicit Lists(const PerHead& per_head) {
    std::size_t room = 1;
    for (const auto& l : per_head) room = std::max(room, l.size());
    index_.resize(per_head.size() * room);
    for (std::size_t h = 0; h < per_head.size(); ++h) {
      std::copy(per_head[h].begin(), per_head[h].end(), index_.begin() + static_cast<std::ptrdiff_t>(h * room));
      count_.push_back(static_cast<std::int32_t>(per_head[h].size()));
    }
    const auto heads = static_cast<std::int64_t>(per_head.size());
    list_.index = View<std::int32_t, 3>::dense(index_.data(), {1, heads, static_cast<std::int64_t>(room)});
    list_.count = View<std::int32_t, 2>::dense(count_.data(), {1, heads});
  }
  Lists(const Lists&) = delete;
  TokenList tokens() const { return {list_}; }
  PageList pages() const { return {list_}; }
  void scribble() {  // as a later callback may overwrite borrowed memory
    std::fill(index_.begin(), index_.end(), -77);
    std::fill(count_.begin(), count_.end(), 99);
  }

 private:
  std::vector<std::int32_t> index_, count_;
  IndexList list_;
};

// Pages of the device in another codec of the store.
inline std::vector<Edit> encode(const PageList& pages, int codec, int layer = 0) {
  Edits e(layer);
  e.encode(pages, codec);
  return e.all();
}

struct StoredToken {
  std::int32_t position = 0;
  std::vector<float> k, v, state;
  bool operator==(const StoredToken& o) const {
    return position == o.position && k == o.k && v == o.v && state == o.state;
  }
};

// A head's tokens in stored order. Each page is read on the device if it is there, else on the host.
inline std::vector<StoredToken> stored_tokens(const Store& store, int layer, int slot, int head) {
  const Shape& s = store.shape();
  const std::vector<std::int32_t> slots{slot};
  const PagedKv tiers[] = {store.view(layer, slots), store.view(layer, slots, Tier::host)};
  std::vector<StoredToken> out;
  for (int t = 0; t < store.length(layer, slot, head); ++t) {
    const int page = t / s.page_size, offset = t % s.page_size;
    const PagedKv& kv = tiers[0].entry(0, head, page).frame != null_frame ? tiers[0] : tiers[1];
    const PageEntry& e = kv.entry(0, head, page);
    const PageLayout& l = kv.layout(e);
    std::vector<std::byte> plain;
    const std::byte* frame = kv.frame(e);
    if (e.packed) {
      plain.resize(static_cast<std::size_t>(l.bytes));
      ops::unpack_page(kv.frame(e), l, plain.data());
      frame = plain.data();
    }
    StoredToken token;
    token.k.resize(static_cast<std::size_t>(s.head_dim));
    token.v.resize(static_cast<std::size_t>(s.head_dim));
    ops::read_row(frame, l, KvSide::key, offset, token.k.data());
    ops::read_row(frame, l, KvSide::value, offset, token.v.data());
    std::memcpy(&token.position, frame + l.positions + offset * 4, 4);
    for (int c = 0; c < l.state_columns; ++c) {
      float x;
      std::memcpy(&x, frame + l.state + (c * l.page_size + offset) * 4, 4);
      token.state.push_back(x);
    }
    out.push_back(std::move(token));
  }
  return out;
}

inline bool on(const Store& store, Tier tier, int layer, int slot, int head, int page) {
  const std::vector<std::int32_t> slots{slot};
  return store.view(layer, slots, tier).entry(0, head, page).frame != null_frame;
}

}  // namespace kvlab::test
