// Bytes held and moved, per tier, codec and tag. Compression ratios are always derived from here.
#pragma once
#include <kvlab/kv.hpp>

#include <algorithm>
#include <array>
#include <cstdint>

namespace kvlab {

enum class Tag : std::uint8_t { keys, values, codec_metadata, positions, scores, summaries, tables, workspace };
inline constexpr int tag_count = 8, tier_count = 3;
constexpr const char* name_of(Tag t) {
  constexpr const char* names[tag_count] = {"keys",   "values",    "codec_metadata", "positions",
                                            "scores", "summaries", "tables",         "workspace"};
  return names[static_cast<int>(t)];
}

// What frames are stored in: StoreOptions::codecs[0] or [1], or StoreOptions::host_codec. A sequence that was set aside
// has frames of the device's codecs on the host. none: bytes outside of frames, such as summaries and tables.
enum class Stored : std::uint8_t { first, second, host, none };
inline constexpr int stored_count = 4;
inline constexpr Stored all_stored[stored_count] = {Stored::first, Stored::second, Stored::host, Stored::none};

class Ledger {
 public:
  using Row = std::array<std::int64_t, tag_count>;
  using Rows = std::array<Row, stored_count>;

  void hold(Tier tier, Tag tag, std::int64_t bytes, Stored as = Stored::none) {
    held_[index(tier)][static_cast<int>(tag)] += bytes;
    held_as_[index(tier)][static_cast<std::size_t>(as)][static_cast<int>(tag)] += bytes;
    if (tag != Tag::workspace) {
      total_[index(tier)] += bytes;
      peak_[index(tier)] = std::max(peak_[index(tier)], total_[index(tier)]);
    }
  }
  // Counts bytes that arrived on `tier`.
  void move(Tier tier, Tag tag, std::int64_t bytes, Stored as = Stored::none) {
    moved_[index(tier)][static_cast<int>(tag)] += bytes;
    moved_as_[index(tier)][static_cast<std::size_t>(as)][static_cast<int>(tag)] += bytes;
  }

  // Of all codecs, and of one.
  const Row& held(Tier tier) const { return held_[index(tier)]; }
  const Row& moved(Tier tier) const { return moved_[index(tier)]; }
  const Row& held(Tier tier, Stored as) const { return held_as_[index(tier)][static_cast<std::size_t>(as)]; }
  const Row& moved(Tier tier, Stored as) const { return moved_as_[index(tier)][static_cast<std::size_t>(as)]; }
  std::int64_t total(Tier tier) const { return total_[index(tier)]; }  // bytes held of all tags but workspace
  std::int64_t peak(Tier tier) const { return peak_[index(tier)]; }    // of total
  std::int64_t moved_total(Tier tier) const {
    std::int64_t sum = 0;
    for (auto b : moved_[index(tier)]) sum += b;
    return sum;
  }
  void raise_peak(Tier tier, std::int64_t bytes) { peak_[index(tier)] = std::max(peak_[index(tier)], bytes); }
  void reset_peak() { peak_ = total_; }

 private:
  static std::size_t index(Tier t) { return static_cast<std::size_t>(t); }
  std::array<Row, tier_count> held_{}, moved_{};
  std::array<Rows, tier_count> held_as_{}, moved_as_{};
  std::array<std::int64_t, tier_count> total_{}, peak_{};
};

}  // namespace kvlab
