// Random numbers, words and identifiers that are the same on every machine and with every standard library.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvlab/error.hpp"

namespace kvlab {

// SplitMix64 (Steele, Lea and Flood 2014). One stream per sample: two streams of a seed have nothing in common.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream) : state_(mix(seed) ^ mix(~stream)) {}

  std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15ull); }
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(next() % n); }  // n > 0
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }              // [0, 1)

  template <class T>
  void shuffle(std::vector<T>& values) {  // Fisher-Yates
    for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
  }

  std::string digits(int count) {  // the first is not 0
    std::string out;
    for (int i = 0; i < count; ++i) out += static_cast<char>(i == 0 ? '1' + below(9) : '0' + below(10));
    return out;
  }
  std::string letters(int count, char first) {  // of 26 from `first` on: 'a' or 'A'
    std::string out;
    for (int i = 0; i < count; ++i) out += static_cast<char>(first + static_cast<int>(below(26)));
    return out;
  }
  std::string uuid() {  // version 4
    std::string out = "00000000-0000-4000-8000-000000000000";
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (out[i] == '-' || i == 14) continue;
      out[i] = "0123456789abcdef"[i == 19 ? 8 + below(4) : below(16)];
    }
    return out;
  }
  // A quality and a thing, 10,000 pairs: "amber-anchor".
  std::string two_words(std::string_view joint);

 private:
  static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  std::uint64_t state_;
};

inline std::string Random::two_words(std::string_view joint) {
  static constexpr const char* qualities[] = {
      "amber",   "ancient", "bitter", "brisk",  "calm",    "clever",  "copper", "crimson", "distant", "eager",
      "faint",   "gentle",  "golden", "hollow", "humble",  "icy",     "jolly",  "keen",    "lively",  "lonely",
      "mellow",  "misty",   "narrow", "nimble", "pale",    "proud",   "purple", "quiet",   "rapid",   "rusty",
      "silent",  "silver",  "sleepy", "smooth", "sturdy",  "sudden",  "tender", "tiny",    "velvet",  "wicked",
      "able",    "absent",  "bold",   "brave",  "bright",  "broken",  "busy",   "careful", "cheap",   "clumsy",
      "common",  "curious", "damp",   "dark",   "deep",    "dusty",   "early",  "empty",   "famous",  "fancy",
      "final",   "flat",    "foggy",  "fresh",  "frozen",  "giant",   "grand",  "gray",    "green",   "happy",
      "heavy",   "honest",  "hungry", "late",   "lazy",    "light",   "little", "loud",    "lucky",   "modern",
      "mute",    "noisy",   "odd",    "old",    "patient", "polite",  "quick",  "rare",    "rough",   "royal",
      "shallow", "sharp",   "shy",    "simple", "steep",   "strange", "sweet",  "tall",    "warm",    "young"};
  static constexpr const char* things[] = {
      "anchor",   "apple",   "basket",  "beacon",   "bridge",  "candle", "carpet",  "castle", "circle",  "cousin",
      "desert",   "dragon",  "engine",  "feather",  "forest",  "garden", "guitar",  "hammer", "harbor",  "island",
      "kettle",   "ladder",  "lantern", "marble",   "meadow",  "mirror", "monkey",  "needle", "orchid",  "pencil",
      "piano",    "pillow",  "planet",  "rabbit",   "river",   "saddle", "shadow",  "ticket", "violin",  "window",
      "acorn",    "arrow",   "badge",   "barrel",   "blanket", "bottle", "bucket",  "button", "cabin",   "camera",
      "canyon",   "cherry",  "clock",   "compass",  "corner",  "cradle", "curtain", "daisy",  "drum",    "eagle",
      "envelope", "fiddle",  "flag",    "fountain", "glacier", "glove",  "grape",   "helmet", "hotel",   "jacket",
      "jungle",   "kitchen", "lemon",   "library",  "magnet",  "market", "medal",   "mitten", "museum",  "novel",
      "oyster",   "palace",  "parrot",  "pepper",   "pocket",  "puzzle", "quarry",  "rocket", "sailor",  "school",
      "spider",   "station", "temple",  "thunder",  "tractor", "tunnel", "valley",  "wallet", "whistle", "zebra"};
  static_assert(std::size(qualities) == 100 && std::size(things) == 100);
  // Two statements fix the order of the draws; the compiler chooses the order of the operands of +.
  std::string out = qualities[below(std::size(qualities))];
  out += joint;
  return out += things[below(std::size(things))];
}

// `count` texts from make(), no two alike. Errc::config when make() does not know so many.
template <class Make>
std::vector<std::string> distinct(int count, Make make) {
  std::vector<std::string> out, sorted;
  for (int misses = 0; static_cast<int>(out.size()) < count;) {
    std::string s = make();
    const auto at = std::lower_bound(sorted.begin(), sorted.end(), s);
    if (at == sorted.end() || *at != s) {
      sorted.insert(at, s);
      out.push_back(std::move(s));
      misses = 0;
    } else if (++misses == 1000) {
      throw Error(Errc::config, "got " + std::to_string(count) + " different names to make up, wanted about " +
                                    std::to_string(out.size()) + " at most");
    }
  }
  return out;
}

}  // namespace kvlab
