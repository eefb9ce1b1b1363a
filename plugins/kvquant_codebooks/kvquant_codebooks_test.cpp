// Hand vectors of KVQuant's calibration, profiles of caches whose numbers are known, and of a bundled model.
#include "codebooks.hpp"

#include <fstream>
#include <numeric>
#include <random>

#include "ops/page/paged.hpp"
#include "result/profile_file.hpp"
#include "run/policy_profile.hpp"
#include "run/profile.hpp"
#include "support/cell_fixture.hpp"
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
  explicit Prompts(double share, const std::string& weights = "") {
    static Registry registry;
    const PluginInfo& info = registry.require(Role::profiler, "kvquant_codebooks");
    profiler_ = create<Profiler>(
        info, resolve(info, {{"outlier_share", share}, {"rounds", std::int64_t{10000}}, {"fisher", weights}}));
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
  // Weights 3 and 1, and 0 and 2: means .75 and 11. A centre whose numbers weigh nothing stays at its quantile.
  CHECK(kvquant::Fit({10, 0, 11, 3}, {0, 3, 2, 1}).centres(2, 50) == Row{.75, 11});
  CHECK(kvquant::Fit({10, 0, 11, 1}, {0, 1, 0, 1}).centres(2, 50) == Row{.5, 10.25});
  CHECK(kvquant::Fit({10, 0, 11, 1}, {0, 3, 2, 1}).normed({.5, 10.5}) == fit.normed({.5, 10.5}));
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

namespace {

// A file of numpy.save.
std::string npy(const TempDir& folder, const std::string& shape, const std::vector<float>& values,
                const std::string& type = "<f4") {
  std::string header = "{'descr': '" + type + "', 'fortran_order': False, 'shape': (" + shape + "), }";
  header.resize((header.size() + 10 + 64) / 64 * 64 - 10, ' ');
  const std::string path = (folder / "w.npy").string();
  std::ofstream out(path, std::ios::binary);
  out << "\x93NUMPY" << '\x01' << '\0' << static_cast<char>(header.size() % 256)
      << static_cast<char>(header.size() / 256) << header;
  out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(float)));
  return path;
}

// Each of the 4 entries is the weighted mean of the numbers that are nearest to it.
void check_weighted(const std::vector<float>& entries, const Row& numbers, const Row& weights) {
  REQUIRE(numbers.size() == weights.size());
  const Row centres(entries.begin() + 4, entries.begin() + 8);
  Row sum(4), weight(4);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const std::size_t c = nearest(centres, numbers[i]);
    sum[c] += numbers[i] * weights[i], weight[c] += weights[i];
  }
  for (std::size_t c = 0; c < 4; ++c) CHECK(sum[c] / weight[c] == Approx(centres[c]).margin(1e-5));
}

}  // namespace

TEST_CASE("kvquant_codebooks: a file weighs the numbers of k-means, by token and channel or by channel") {
  const TempDir folder;
  constexpr std::size_t tokens = 40, width = Prompts::heads * Prompts::dim;
  const bool by_token = GENERATE(true, false);
  CAPTURE(by_token);
  std::mt19937 rng{3};
  std::vector<float> w((by_token ? tokens : 1) * 2 * width);
  for (float& x : w) x = static_cast<float>(rng() % 1000) / 100;
  Prompts p(0., npy(folder, by_token ? "1, 2, 40, 16" : "1, 2, 16", w));
  p.prompt(tokens);
  const Profile profile = p.profile();
  CHECK(profile.at("weighted").values == std::vector<float>{1});
  Row of_keys, of_values;
  const auto at = [&](std::size_t side, std::size_t t, std::size_t c) {
    return double{w[by_token ? (side * tokens + t) * width + c : side * width + c]};
  };
  for (std::size_t c = 0; c < width; ++c)
    for (std::size_t t = 0; t < tokens; ++t) of_keys.push_back(at(0, t, c));
  for (std::size_t t = 0; t < tokens; ++t)
    for (std::size_t c = 0; c < width; ++c) of_values.push_back(at(1, t, c));
  check_weighted(profile.at("key_codebook").values, normalised(p.keys, 0), of_keys);
  check_weighted(profile.at("value_codebook").values, normalised(p.values, 0), of_values);
  Prompts even(0.);
  even.prompt(tokens);
  CHECK(even.profile().at("weighted").values == std::vector<float>{0});
  CHECK(even.profile().at("key_codebook").values != profile.at("key_codebook").values);
}

TEST_CASE("kvquant_codebooks: weights of another model or other prompts, and other files, are refused") {
  const TempDir folder;
  const auto with = [&](const std::string& shape, std::size_t count, float each = 1, const std::string& type = "<f4") {
    Prompts p(0., npy(folder, shape, std::vector<float>(count, each), type));
    p.prompt(3);
    p.profile();
  };
  CHECK_NOTHROW(with("1, 2, 16", 32));
  CHECK_NOTHROW(with("1, 2, 3, 16", 96));
  CHECK_THROWS_WITH(with("1, 2, 8", 16), Catch::Contains("got weights [1, 2, 8], wanted [1, 2, 16]"));
  CHECK_THROWS_WITH(with("2, 2, 16", 64), Catch::Contains("got weights [2, 2, 16]"));
  CHECK_THROWS_WITH(with("32", 32), Catch::Contains("got weights [32]"));
  CHECK_THROWS_WITH(with("1, 2, 4, 16", 128), Catch::Contains("got weights [1, 2, 4, 16], wanted 3 tokens"));
  CHECK_THROWS_WITH(with("1, 2, 16", 31), Catch::Contains("got 124 bytes of numbers"));
  CHECK_THROWS_WITH(with("1, 2, 16", 32, -1), Catch::Contains("got the weight -1"));
  CHECK_THROWS_WITH(with("1, 2, 16", 32, NAN), Catch::Contains("got the weight"));
  CHECK_THROWS_WITH(with("1, 2, 16", 32, 1, "<f8"), Catch::Contains("wanted float32 in the order of C"));
  CHECK_THROWS_WITH(Prompts(0., (folder / "none.npy").string()), Catch::Contains("got no weights there"));
  std::ofstream(folder / "text.npy") << "no array at all";
  CHECK_THROWS_WITH(Prompts(0., (folder / "text.npy").string()), Catch::Contains("got another kind of file"));
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
      read_policy_profile(out, *load_model(*open_checkpoint(golden("tiny/llama-gqa3")), DType::f32, "tiny"), 16,
                          built_catalog()),
      Catch::Contains("got a profile of model"));
}
