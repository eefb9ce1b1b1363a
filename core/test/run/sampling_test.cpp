#include "run/sampling.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

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
  std::mt19937_64 random(1);
  const std::vector<float> good{3, 1, 2, 0, 1};
  CHECK(top1_agreement(good, good) == 1);
  CHECK(top1_agreement(good, std::vector<float>{0, 1, 2, 0, 1}) == 0);
  for (const float bad : {nan, inf, -inf})
    for (std::size_t at = 0; at <= good.size(); ++at) {
      std::vector<float> x = good;
      at < x.size() ? void(x[at] = bad) : x.assign(x.size(), bad);  // at the end: all of them
      CAPTURE(bad, at);
      CHECK(argmax(x) == -1);
      CHECK(sample(x, {0, 1}, random) == -1);
      CHECK(sample(x, {1, 0.9}, random) == -1);
      CHECK(std::isnan(negative_log_likelihood(x, 1)));
      CHECK(std::isnan(kl_divergence(x, good)));
      CHECK(std::isnan(kl_divergence(good, x)));
      CHECK(std::isnan(kl_divergence(x, x)));
      CHECK(std::isnan(top1_agreement(x, good)));
      CHECK(std::isnan(top1_agreement(x, x)));
    }
}

TEST_CASE("sampling follows the distribution, the nucleus and the seed") {
  const std::vector<float> logits{std::log(1.f), std::log(2.f), std::log(5.f)};
  std::mt19937_64 random(1);
  CHECK(sample(logits, {0, 1}, random) == 2);
  std::vector<int> count(3);
  for (int i = 0; i < 8000; ++i) ++count[static_cast<std::size_t>(sample(logits, {1, 1}, random))];
  CHECK(count[0] == Approx(1000).margin(150));
  CHECK(count[1] == Approx(2000).margin(200));
  for (int i = 0; i < 200; ++i) CHECK(sample(logits, {1, 0.7}, random) != 0);  // 5/8 + 2/8 pass 0.7
  for (int i = 0; i < 200; ++i) CHECK(sample(logits, {1, 0.5}, random) == 2);
  std::mt19937_64 a(7), b(7);
  for (int i = 0; i < 50; ++i) CHECK(sample(logits, {1.5, 0.9}, a) == sample(logits, {1.5, 0.9}, b));
}
