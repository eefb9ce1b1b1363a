#include "run/sampling.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <kvlab/random.hpp>
#include <limits>
#include <set>
#include <utility>

using namespace kvlab;

TEST_CASE("argmax takes the lowest of equals") {
  CHECK(argmax(std::vector<float>{1, 3, 3, 2}) == 1);
  CHECK(argmax(std::vector<float>{-5}) == 0);
}

TEST_CASE("loss and divergence of known distributions") {
  // softmax(ln 1, ln 2, ln 5) = 1/8, 2/8, 5/8.
  const std::vector<float> p{0.f, std::log(2.f), std::log(5.f)}, q{0.f, 0.f, 0.f};
  CHECK(negative_log_likelihood(p, 2) == Approx(std::log(8. / 5)));
  CHECK(negative_log_likelihood(q, 0) == Approx(std::log(3.)));
  const double kl = 0.125 * std::log(3. / 8) + 0.25 * std::log(6. / 8) + 0.625 * std::log(15. / 8);
  CHECK(kl_divergence(p, q) == Approx(kl));
  CHECK(kl_divergence(p, p) == 0);
  const std::vector<float> shifted{1000.f, 1000.f, 1000.f};  // no overflow
  CHECK(kl_divergence(p, shifted) == Approx(kl));
}

TEST_CASE("the divergence is of the first from the second") {
  // p = (1/2, 1/2) and q = (1/5, 4/5), whose divergences from each other differ.
  const std::vector<float> p{0.f, 0.f}, q{0.f, std::log(4.f)};
  CHECK(kl_divergence(p, q) == Approx(0.5 * std::log(5. / 2) + 0.5 * std::log(5. / 8)));  // 0.2231
  CHECK(kl_divergence(q, p) == Approx(0.2 * std::log(2. / 5) + 0.8 * std::log(8. / 5)));  // 0.1927
  CHECK(kl_divergence(p, q) == Approx(0.22314).margin(1e-5));
  CHECK(kl_divergence(q, p) == Approx(0.19274).margin(1e-5));
}

TEST_CASE("logits that are not finite are never a good number") {
  constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> good{3, 1, 2, 0, 1};
  CHECK(top1_agreement(good, good) == 1);
  CHECK(top1_agreement(good, std::vector<float>{0, 1, 2, 0, 1}) == 0);
  for (const float bad : {nan, inf, -inf})
    for (std::size_t at = 0; at <= good.size(); ++at) {
      std::vector<float> x = good;
      at < x.size() ? void(x[at] = bad) : x.assign(x.size(), bad);  // at the end: all of them
      CAPTURE(bad, at);
      CHECK(argmax(x) == -1);
      CHECK(sample(x, {0, 1}, 0.5) == -1);
      CHECK(sample(x, {1, 0.9}, 0.5) == -1);
      CHECK(std::isnan(negative_log_likelihood(x, 1)));
      CHECK(std::isnan(kl_divergence(x, good)));
      CHECK(std::isnan(kl_divergence(good, x)));
      CHECK(std::isnan(kl_divergence(x, x)));
      CHECK(std::isnan(top1_agreement(x, good)));
      CHECK(std::isnan(top1_agreement(x, x)));
    }
}

namespace {

// The token at `unit` with nothing but sorts and sums over all tokens.
int sample_plainly(const std::vector<float>& logits, const Sampling& how, double unit) {
  if (how.temperature == 0) return argmax(logits);
  std::vector<std::pair<double, int>> tokens;  // by falling logit, then by id
  const double most = *std::max_element(logits.begin(), logits.end());
  for (std::size_t id = 0; id < logits.size(); ++id) tokens.emplace_back(-double{logits[id]}, static_cast<int>(id));
  std::sort(tokens.begin(), tokens.end());
  if (how.top_k > 0 && static_cast<std::size_t>(how.top_k) < tokens.size())
    tokens.resize(static_cast<std::size_t>(how.top_k));
  const auto weight = [&](int id) { return std::exp((logits[static_cast<std::size_t>(id)] - most) / how.temperature); };
  double total = 0, sum = 0;
  std::set<int> left, kept;
  for (const auto& [key, id] : tokens) left.insert(id);
  for (const int id : left) total += weight(id);
  for (const auto& [key, id] : tokens) {
    if (!kept.empty() && how.top_p < 1 && sum >= how.top_p * total) break;
    kept.insert(id);
    sum += weight(id);
  }
  total = sum = 0;
  for (const int id : kept) total += weight(id);
  for (const int id : kept)
    if (unit * total < (sum += weight(id))) return id;
  return *kept.rbegin();
}

// Draws' counts of each token.
std::vector<int> counts(const std::vector<float>& logits, const Sampling& how, int draws, std::uint64_t seed) {
  Random random(seed, 0);
  std::vector<int> out(logits.size());
  for (int i = 0; i < draws; ++i) ++out[static_cast<std::size_t>(sample(logits, how, random.unit()))];
  return out;
}

// Pearson's statistic of counts against expected shares. A token without a share must have no count.
double chi_square(const std::vector<int>& counts, const std::vector<double>& shares) {
  double all = 0, out = 0;
  for (const int n : counts) all += n;
  for (std::size_t id = 0; id < counts.size(); ++id) {
    const double expected = all * shares[id];
    if (shares[id] == 0)
      CHECK(counts[id] == 0);
    else
      out += (counts[id] - expected) * (counts[id] - expected) / expected;
  }
  return out;
}

constexpr double last_unit = 1 - 0x1p-53;

}  // namespace

TEST_CASE("draws have the distribution of the temperature, of top_k and of top_p") {
  // Weights 1 to 12, in an order that is none. 31.26, 14.07 ... are the 99.9 % points of chi-square.
  const int weights[] = {7, 1, 12, 4, 9, 2, 11, 5, 3, 10, 8, 6};
  const auto shares = [&](double power, int least) {
    std::vector<double> out;
    double sum = 0;
    for (const int w : weights) out.push_back(w < least ? 0 : std::pow(w, power)), sum += out.back();
    for (double& share : out) share /= sum;
    return out;
  };
  std::vector<float> logits;
  for (const int w : weights) logits.push_back(std::log(static_cast<float>(w)) - 3);
  CHECK(chi_square(counts(logits, {1}, 40000, 1), shares(1, 0)) < 31.26);        // 11 degrees of freedom
  CHECK(chi_square(counts(logits, {0.5}, 40000, 2), shares(2, 0)) < 31.26);      // squares of the weights
  CHECK(chi_square(counts(logits, {2}, 40000, 3), shares(0.5, 0)) < 31.26);      // their roots
  CHECK(chi_square(counts(logits, {1, 1, 8}, 40000, 4), shares(1, 5)) < 24.32);  // 7
  // 12 + 11 + 10 + 9 of 78 are 0.538, and the three of them 0.423.
  CHECK(chi_square(counts(logits, {1, 0.5}, 40000, 5), shares(1, 9)) < 16.27);  // 3
  // Of the best three, 12 + 11 of 33 are 0.697: top_p is a share of what top_k leaves.
  CHECK(chi_square(counts(logits, {1, 0.69, 3}, 40000, 6), shares(1, 11)) < 10.83);  // 1
  // A wrong distribution does not pass.
  CHECK(chi_square(counts(logits, {0.9}, 40000, 7), shares(1, 0)) > 31.26);
}

TEST_CASE("a draw is that of the plain version, with ties, in small and large vocabularies") {
  Random random(3, 0);
  for (const std::size_t n : {1, 2, 3, 63, 64, 65, 700, 5000})
    for (const int steps : {0, 3, 1000}) {  // equal logits, many ties, few
      std::vector<float> logits;
      for (std::size_t i = 0; i < n; ++i)
        logits.push_back(steps == 0 ? 1.f
                                    : static_cast<float>(random.below(static_cast<std::size_t>(steps))) * 8.f /
                                          static_cast<float>(steps));
      for (const double temperature : {0., 0.05, 0.6, 1., 30.})
        for (const double top_p : {1e-9, 0.3, 0.5, 0.95, 0.999999, 1.})
          for (const int top_k : {0, 1, 2, 64, 100, 6000})
            for (const double unit : {0., 0.25, random.unit(), random.unit(), last_unit}) {
              const Sampling how{temperature, top_p, top_k};
              CAPTURE(n, steps, temperature, top_p, top_k, unit);
              REQUIRE(sample(logits, how, unit) == sample_plainly(logits, how, unit));
            }
    }
}

TEST_CASE("edges of top_p, top_k and the temperature") {
  const float two = std::log(2.f);
  const std::vector<float> halves{0, 0}, ties{0, two, 0, two, two}, four{0, 0, 0, 0};
  for (const double unit : {0., 0.5, last_unit}) {
    CHECK(sample(halves, {1, 0.5}, unit) == 0);  // half of the probability is there with the first of two equal ones
    CHECK(sample(ties, {1, 1, 1}, unit) == 1);
    CHECK(sample(ties, {1, 0.25}, unit) == 1);  // one of them has 2 of 8
    CHECK(sample(ties, {1, 0}, unit) == 1);
    CHECK(sample(ties, {0, 1}, unit) == 1);
    CHECK(sample(four, {5, 1, 1}, unit) == 0);
  }
  CHECK(sample(halves, {1, 0.5 + 1e-12}, last_unit) == 1);
  CHECK(sample(ties, {1, 0.25 + 1e-6}, last_unit) == 3);
  CHECK(sample(ties, {1, 1, 2}, last_unit) == 3);
  CHECK(sample(ties, {1, 1, 4}, 0) == 0);  // the lower id of the two small ones
  CHECK(sample(ties, {1, 1, 4}, last_unit) == 4);
  CHECK(sample(ties, {1, 1, 100}, last_unit) == 4);
  CHECK(sample(four, {1}, 0.5) == 2);
  CHECK(sample(four, {1}, 0.5 - 1e-12) == 1);
  // Tokens whose weight is 0 in double are never drawn.
  const std::vector<float> far{-1e30f, 5, -1e30f};
  for (const double unit : {0., last_unit}) {
    CHECK(sample(far, {1}, unit) == 1);
    CHECK(sample({{1.f, 2.f, 1.999f}}, {1e-5}, unit) == 1);
    CHECK(sample({{1.f, 2.f, 2.f}}, {1e-300}, unit) == (unit == 0 ? 1 : 2));
  }
}
