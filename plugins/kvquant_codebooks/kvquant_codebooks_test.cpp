// Hand vectors of KVQuant's calibration, profiles of caches whose numbers are known, and of a bundled model.
#include "codebooks.hpp"

#include <fstream>
#include <numeric>
#include <random>

#include "ops/page/paged.hpp"
#include "result/profile_file.hpp"
#include "run/policy_profile.hpp"
#include "run/profile.hpp"
#include "support/on_text.hpp"
#include "support/quantile.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Row = std::vector<double>;

// Prompts of a model with one layer and 2 KV heads of 8 elements.
class Prompts {
 public:
  explicit Prompts(double share) {
    static Registry registry;
    const PluginInfo& info = registry.require(Role::profiler, "kvquant_codebooks");
    profiler_ = create<Profiler>(info, resolve(info, {{"outlier_share", share}, {"rounds", std::int64_t{10000}}}));
    shape_.layers = 1, shape_.query_heads = shape_.kv_heads = heads, shape_.head_dim = dim;
    shape_.page_size = 4, shape_.max_slots = 1, shape_.max_tokens = 256;
    profiler_->attach(shape_, workspace_);
    begin();
  }
  // A sequence of its own.
  void begin() {
    profiler_->release(0);
    cache_ = std::make_unique<PagedFixture>(PagedOptions{1, heads, dim, 4, 64});
    tokens_ = 0;
  }
  // Appends tokens. A chunk before a prompt's last one counts with it.
  void prompt(int tokens, bool last = true) {
    for (int t = 0; t < tokens; ++t, ++tokens_) {
      values.emplace_back();
      for (int h = 0; h < heads; ++h) {
        std::vector<float> key(dim), value(dim);
        for (std::size_t d = 0; d < dim; ++d) {
          key[d] = normal_(rng_) * static_cast<float>(d + 1) + 3, value[d] = normal_(rng_) + beside;
          keys[h * dim + d].push_back(key[d]), values.back().push_back(value[d]);
        }
        ops::rotate(key.data(), cache_->view().rope_table, tokens_);
        cache_->append(0, h, key, value, tokens_);
      }
    }
    const std::int32_t slot = 0, position = tokens_;
    const PagedKv pages = cache_->view();
    LayerPrefill layer;
    layer.shape = &shape_, layer.pages = pages, layer.workspace = &workspace_;
    layer.keys = {&pages, KvSide::key}, layer.values = {&pages, KvSide::value};
    layer.slots = &slot, layer.position = &position, layer.last = &last;
    layer.max_length = tokens_;
    profiler_->prefill(layer, Stream::cpu());
  }
  Profile profile() {
    Profile out;
    profiler_->finish(out);
    return out;
  }

  static constexpr int heads = 2, dim = 8;
  float beside = 0;                                   // is added to values
  std::vector<std::vector<float>> keys{heads * dim};  // before RoPE, by channel
  std::vector<std::vector<float>> values;             // by token

 private:
  std::unique_ptr<PagedFixture> cache_;
  HeapWorkspace workspace_;
  Shape shape_;
  Instance<Profiler> profiler_;
  std::int32_t tokens_ = 0;
  std::mt19937 rng_{7};
  std::normal_distribution<float> normal_;
};

// The numbers between the thresholds, normalised.
Row normalised(const std::vector<std::vector<float>>& vectors, double share) {
  Row out;
  for (const auto& x : vectors) {
    const double lower = plain_quantile(x, share / 2), upper = plain_quantile(x, 1 - share / 2);
    for (const float y : x)
      if (double{y} >= lower && double{y} <= upper) out.push_back((2 * double{y} - upper - lower) / (upper - lower));
  }
  return out;
}

std::size_t nearest(const Row& centres, double x) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < centres.size(); ++i)
    if (std::abs(x - centres[i]) < std::abs(x - centres[best])) best = i;
  return best;
}

// Each entry is the mean of the numbers that are nearest to it: where k-means ends.
void check_codebook(const std::vector<float>& entries, const Row& numbers) {
  REQUIRE(entries.size() == 32);
  for (const std::ptrdiff_t k : {4, 8, 16}) {
    CAPTURE(k);
    const Row centres(entries.begin() + k, entries.begin() + 2 * k);
    CHECK(std::is_sorted(centres.begin(), centres.end()));
    Row sum(centres.size()), count(centres.size());
    for (const double x : numbers) sum[nearest(centres, x)] += x, count[nearest(centres, x)] += 1;
    for (std::size_t i = 0; i < centres.size(); ++i) CHECK(sum[i] / count[i] == Approx(centres[i]).margin(1e-5));
    if (k > 4) continue;
    // Q-Norm: rounded numbers have the mean and the spread of the numbers.
    const Row levels(entries.begin(), entries.begin() + k);
    double mean[2] = {}, square[2] = {};
    for (const double x : numbers) {
      const double both[] = {x, levels[nearest(centres, x)]};
      for (const int i : {0, 1}) mean[i] += both[i], square[i] += both[i] * both[i];
    }
    CHECK(mean[1] == Approx(mean[0]).margin(1e-3));
    CHECK(square[1] == Approx(square[0]).epsilon(1e-4));
  }
}

}  // namespace

TEST_CASE("kvquant_codebooks: quantiles, k-means and Q-Norm by hand") {
  CHECK(kvquant::quantile({1, 2, 3, 5}, .5) == 2.5);
  CHECK(kvquant::quantile({1, 2, 3, 5}, 0) == 1);
  CHECK(kvquant::quantile({1, 2, 3, 5}, 1) == 5);
  CHECK(kvquant::quantile({1, 2, 3, 5}, .75) == 3.5);
  CHECK(kvquant::quantile({4}, .3) == 4);

  const kvquant::Fit fit({10, 0, 11, 1});
  CHECK(fit.centres(2, 50) == Row{.5, 10.5});
  CHECK(fit.centres(4, 50) == Row{.5, 2.125, 8.875, 10.5});  // two centres never get a number
  // The spread of the numbers is 25.25, that of the rounded ones 25.
  const double scale = std::sqrt(25.25 / 25);
  const Row normed = fit.normed({.5, 10.5});
  CHECK(normed[0] == Approx(5.5 - 5 * scale));
  CHECK(normed[1] == Approx(5.5 + 5 * scale));
  // The quantiles .25 and .75 are 1 and 2, so 2 and 9 go together first. Then 2 is nearer to 1 than to 5.5.
  CHECK(kvquant::Fit({1, 1, 1, 2, 9}).centres(2, 1) == Row{1, 5.5});
  CHECK(kvquant::Fit({1, 1, 1, 2, 9}).centres(2, 50) == Row{1.25, 9});
  CHECK(kvquant::Fit({3, 3, 3}).centres(2, 50) == Row{3, 3});
  CHECK(kvquant::Fit({3, 3, 3}).normed({3, 3}) == Row{3, 3});
  const Row uniform = kvquant::Fit({}).centres(4, 50);
  for (std::size_t i = 0; i < 4; ++i) CHECK(uniform.at(i) == Approx(-1 + 2. * static_cast<double>(i) / 3));
}

TEST_CASE("kvquant_codebooks: thresholds are those of keys before RoPE, and entries those of k-means") {
  const double share = GENERATE(.01, .2);
  Prompts p(share);
  p.prompt(30, false);
  p.prompt(50);
  p.prompt(21);  // of the same sequence
  p.begin();
  p.prompt(60);
  const Profile profile = p.profile();
  for (const std::string which : {"", "_all"}) {
    const double outside = which.empty() ? share : 0;
    CAPTURE(share, outside);
    const ProfileArray &lower = profile.at("key_lower" + which), &upper = profile.at("key_upper" + which);
    CHECK(lower.extent == std::vector<std::int64_t>{1, Prompts::heads, Prompts::dim});
    for (std::size_t c = 0; c < p.keys.size(); ++c) {
      REQUIRE(p.keys[c].size() == 161);
      CHECK(double{lower.values[c]} == Approx(plain_quantile(p.keys[c], outside / 2)).margin(1e-5));
      CHECK(double{upper.values[c]} == Approx(plain_quantile(p.keys[c], 1 - outside / 2)).margin(1e-5));
    }
    check_codebook(profile.at("value_codebook" + which).values, normalised(p.values, outside));
    check_codebook(profile.at("key_codebook" + which).values, normalised(p.keys, outside));
  }
  CHECK(profile.at("outlier_share").values == std::vector<float>{static_cast<float>(share)});
}

TEST_CASE("kvquant_codebooks: channels that never change have no entries of their own") {
  Prompts p(.01);
  p.prompt(1);
  const Profile profile = p.profile();
  CHECK(profile.at("key_lower").values == profile.at("key_upper").values);
  for (std::size_t i = 0; i < 4; ++i)
    CHECK(double{profile.at("key_codebook").values[4 + i]} == Approx(-1 + 2. * static_cast<double>(i) / 3));
  p.beside = INFINITY;
  CHECK_THROWS_WITH(p.prompt(1), Catch::Contains("got inf in a value of layer 0, wanted finite numbers"));
  p.begin();
  p.beside = NAN;
  CHECK_THROWS_WITH(p.prompt(1), Catch::Contains("got nan in a value of layer 0, wanted finite numbers"));
  CHECK_THROWS_WITH(Prompts(1), Catch::Contains("got outlier_share 1, wanted less"));
}

TEST_CASE("kvquant with a profile of its model: more bits come nearer, and fitted entries nearer than uniform ones") {
  const TempDir folder;
  Registry registry;
  const RegistryCatalog catalog(registry);
  const std::string out = (folder / "p.h5").string();
  std::ofstream(folder / "e.yaml") << "model: {path: bundled/recall, dtype: f32}\nbackend: cpu\ntasks: [text: {file: "
                                   << golden("text/english.txt").string()
                                   << ", prefix: 300, forced: 1, samples: 2}]\nprofilers: [kvquant_codebooks]\noutput: "
                                   << out << "\n";
  REQUIRE(run_profile(load_experiment((folder / "e.yaml").string(), {}, catalog), catalog, {"test", false, true}) == 0);
  const Profile profile = results::read_profile(out).profilers.at(0).profile;
  const auto error = [&](int bits, bool nonuniform, bool outliers = true) {
    OnText run(Role::policy, "kvquant",
               {{"bits", std::int64_t{bits}}, {"nonuniform", nonuniform}, {"q_norm", false}, {"outliers", outliers}}, 0,
               200, 16, [&](int, int) { return profile; });
    run.prefill(200);
    double sum = 0;
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head)
        for (const KvSide side : {KvSide::key, KvSide::value}) {
          const auto got = run.stored(side, layer, head);
          const auto& seen = (side == KvSide::key ? run.layer(layer).keys : run.layer(layer).values).at;
          for (std::size_t t = 0; t < got.size(); ++t)
            for (std::size_t d = 0; d < got[t].size(); ++d)
              sum += std::pow(double{got[t][d]} - seen[t][static_cast<std::size_t>(head)][d], 2);
        }
    return sum;
  };
  const double two = error(2, true), three = error(3, true), four = error(4, true);
  CHECK(four > 0);
  CHECK(four < three);
  CHECK(three < two);
  for (const int bits : {2, 3, 4}) CHECK(error(bits, true) < error(bits, false));
  CHECK(three < error(3, true, false));
  CHECK_THROWS_WITH(
      read_policy_profile(out, *load_model(*open_checkpoint(golden("tiny/llama-gqa3")), DType::f32, "tiny"), 16),
      Catch::Contains("got a profile of model"));
}
