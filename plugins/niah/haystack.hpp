// The parts of a haystack prompt: facts, sentences, and how many of them fit.
#pragma once
#include <kvlab/task.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace niah {

using Tokens = std::vector<int>;

// SplitMix64: the same numbers with every standard library.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream) : state_(mix(seed) ^ mix(~stream)) {}
  std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15ull); }
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(next() % n); }

 private:
  static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  std::uint64_t state_;
};

struct Fact {
  std::string key, value;
};

// Keys and values of one prompt, no two alike.
inline std::vector<Fact> facts(int count, bool words, Random& random) {
  static constexpr const char* qualities[] = {
      "amber",  "ancient", "bitter", "brisk",  "calm",   "clever", "copper", "crimson", "distant", "eager",
      "faint",  "gentle",  "golden", "hollow", "humble", "icy",    "jolly",  "keen",    "lively",  "lonely",
      "mellow", "misty",   "narrow", "nimble", "pale",   "proud",  "purple", "quiet",   "rapid",   "rusty",
      "silent", "silver",  "sleepy", "smooth", "sturdy", "sudden", "tender", "tiny",    "velvet",  "wicked"};
  static constexpr const char* things[] = {
      "anchor", "apple",  "basket",  "beacon",  "bridge", "candle", "carpet", "castle", "circle", "cousin",
      "desert", "dragon", "engine",  "feather", "forest", "garden", "guitar", "hammer", "harbor", "island",
      "kettle", "ladder", "lantern", "marble",  "meadow", "mirror", "monkey", "needle", "orchid", "pencil",
      "piano",  "pillow", "planet",  "rabbit",  "river",  "saddle", "shadow", "ticket", "violin", "window"};
  const auto pick = [&](const char* joint) {
    return std::string(qualities[random.below(std::size(qualities))]) + joint + things[random.below(std::size(things))];
  };
  std::vector<Fact> out;
  while (static_cast<int>(out.size()) < count) {
    Fact f;
    f.key = pick("-");
    f.value = words ? pick(" ") : std::to_string(1000000 + random.below(9000000));
    if (std::none_of(out.begin(), out.end(), [&](const Fact& o) { return o.key == f.key || o.value == f.value; }))
      out.push_back(f);
  }
  return out;
}

// A text cut after '.', '!' or '?' (with closing quotes and brackets) and at line ends. Each sentence but the first of
// a line begins with a space, that one with a line end.
struct Haystack {
  explicit Haystack(const std::string& text) {
    const std::string space = " \t\r\n\f\v", closing = "\"')]}";
    std::string sentence, joint = "\n";
    const auto finish = [&](const char* next) {
      if (!sentence.empty()) sentences.push_back(joint + sentence);
      if (!sentence.empty() || *next == '\n') joint = next;
      sentence.clear();
    };
    for (std::size_t i = 0; i < text.size(); ++i) {
      const char c = text[i];
      if (c == '\n') {
        finish("\n");
      } else if (space.find(c) == std::string::npos) {
        sentence += c;
      } else if (!sentence.empty()) {
        const std::size_t last = sentence.find_last_not_of(closing);
        const bool end = last != std::string::npos && std::string(".!?").find(sentence[last]) != std::string::npos;
        if (end)
          finish(" ");
        else if (sentence.back() != ' ')
          sentence += ' ';
      }
    }
    finish("\n");
  }
  std::vector<std::string> sentences;
};

// Exactly `count` tokens of the text, sentence by sentence from `start`, from the beginning again after the last one.
// The last sentence is cut where it must be, and then ends in periods.
inline std::vector<Tokens> take(const Haystack& text, std::size_t start, int count, const kvlab::TaskEnv& env) {
  std::vector<Tokens> out;
  for (std::size_t i = start; count > 0; i = (i + 1) % text.sentences.size()) {
    const bool first = out.empty();
    Tokens t = env.encode_next(first ? "\n" + text.sentences[i].substr(1) : text.sentences[i]);
    if (static_cast<int>(t.size()) > count) {
      t.resize(static_cast<std::size_t>(count));
      // Not in the middle of a character of several tokens.
      const auto whole = [&] {
        const std::string s = env.decode(t);
        std::size_t tail = 0;
        while (tail < std::min<std::size_t>(3, s.size()) && (s[s.size() - 1 - tail] & 0xC0) == 0x80) ++tail;
        if (tail == s.size()) return tail == 0;
        const auto lead = static_cast<unsigned char>(s[s.size() - 1 - tail]);
        return tail == (lead < 0xC0 ? 0u : lead < 0xE0 ? 1u : lead < 0xF0 ? 2u : 3u);
      };
      const Tokens period = env.encode_next(".");
      if (period.size() == 1) {
        do t.pop_back();
        while (!t.empty() && !whole());
        t.resize(static_cast<std::size_t>(count), period[0]);
      }
    }
    count -= static_cast<int>(t.size());
    if (!t.empty()) out.push_back(std::move(t));
  }
  return out;
}

// The sentence whose beginning is nearest to token `at` (hay.size() = the end); ties to the earlier one.
inline std::size_t boundary(const std::vector<Tokens>& hay, double at) {
  std::size_t best = 0, i = 0;
  double sum = 0, nearest = at;
  for (const Tokens& t : hay) {
    sum += static_cast<double>(t.size());
    ++i;
    const double away = sum > at ? sum - at : at - sum;
    if (away < nearest) {
      nearest = away;
      best = i;
    }
  }
  return best;
}

}  // namespace niah
