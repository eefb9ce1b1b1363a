#include <kvlab/row_codec.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>

#include "base/half.hpp"
#include "engine/engine.hpp"
#include "engine/store_options.hpp"
#include "experiment/build_policy.hpp"
#include "experiment/describe.hpp"
#include "model/bundled.hpp"
#include "model/checkpoint.hpp"
#include "ops/page/paged.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"
#include "support/codecs_golden.hpp"
#include "support/golden.hpp"
#include "support/stored_rows.hpp"

using namespace kvlab;

namespace {

using ParamMap = std::map<std::string, ParamValue>;
using Rows = std::vector<std::vector<float>>;  // [token][d]

Instance<Codec> codec(const std::string& name, const ParamMap& given = {}) {
  Registry registry;
  const PluginInfo& plugin = registry.require(Role::codec, name);
  return create<Codec>(plugin, resolve(plugin, given));
}

ParamMap sized(int residual, int group) {
  return {{"residual", std::int64_t{residual}}, {"group", std::int64_t{group}}};
}

PolicySpec full_with(const std::string& name, const ParamMap& given) {
  static Registry registry;
  PolicySpec spec;
  spec.name = "mine";
  spec.codec = PluginUse{Role::codec, name, resolve(registry.require(Role::codec, name), given)};
  return spec;
}

// Rows through a codec with a format of its own.
Rows through(const Codec& made, KvSide side, const Rows& rows) {
  const auto& codes = dynamic_cast<const RowCodec&>(made);
  std::vector<float> x;
  for (const auto& row : rows) x.insert(x.end(), row.begin(), row.end());
  const auto tokens = static_cast<std::int64_t>(rows.size()), dim = static_cast<std::int64_t>(rows[0].size());
  const auto bytes = codes.encode(side, View<const float, 2>::dense(x.data(), {tokens, dim}));
  std::vector<float> out(x.size(), -7);
  codes.decode(side, bytes, View<float, 2>::dense(out.data(), {tokens, dim}));
  Rows back;
  for (std::size_t t = 0; t < rows.size(); ++t)
    back.emplace_back(out.begin() + static_cast<std::ptrdiff_t>(t * rows[0].size()),
                      out.begin() + static_cast<std::ptrdiff_t>((t + 1) * rows[0].size()));
  return back;
}

// A run of the full cache, with the rows that the model made and those that the cache holds.
class Run final : public EngineObserver {
 public:
  Run(const std::string& path, const PolicySpec& spec)
      : model_(load_model(*open_model(path, "", ""), DType::f32, "m")) {
    static Registry registry;
    EngineOptions o;
    o.max_tokens = 256;
    o.page_size = 8;
    engine_ = std::make_unique<Engine>(model_, build_policy(spec, RegistryCatalog(registry)), o);
    engine_->observe(this);
    made_.resize(static_cast<std::size_t>(model_->config.layers) * 2);
    slot_ = engine_->open();
  }
  void prompt(const PromptLayer& l, const Store&) override { add(l.layer, l.keys, l.values); }
  void attended(const DecodeLayer& l, const Store&) override { add(l.layer, l.keys, l.values); }

  void prefill(int tokens) {
    std::vector<int> ids;
    for (int i = 0; i < tokens; ++i) ids.push_back(next());
    const Fit fit = engine_->prefill(slot_, ids, true, {});
    REQUIRE(fit == Fit::ok);
  }
  void step() {
    const int token = next();
    const Fit fit = engine_->step({slot_}, {&token, 1}, {});
    REQUIRE(fit == Fit::ok);
  }
  const ModelConfig& config() const { return model_->config; }
  Rows made(KvSide side, int layer, int head) const {
    Rows out;
    for (const Rows& heads : made_[static_cast<std::size_t>(layer * 2 + (side == KvSide::value))])
      out.push_back(heads[static_cast<std::size_t>(head)]);
    return out;
  }
  Rows stored(KvSide side, int layer, int head) const {
    return test::stored_rows(engine_->store(), layer, slot_, head, side);
  }

 private:
  int next() {
    ++fed_;
    return (fed_ * 37 + fed_ / 5) % model_->config.vocab;
  }
  void add(int layer, const View<const float, 3>& k, const View<const float, 3>& v) {
    for (const auto& [side, x] : {std::pair{0, k}, {1, v}})
      for (std::int64_t t = 0; t < x.extent[0]; ++t) {
        Rows& heads = made_[static_cast<std::size_t>(layer * 2 + side)].emplace_back();
        for (std::int64_t h = 0; h < x.extent[1]; ++h) heads.emplace_back(&x(t, h, 0), &x(t, h, 0) + x.extent[2]);
      }
  }

  std::shared_ptr<const Model> model_;
  std::unique_ptr<Engine> engine_;
  std::vector<std::vector<Rows>> made_;  // [layer, side][token][head][d]
  int slot_ = -1, fed_ = 0;
};

double half(double x) { return half_to_float(float_to_half(static_cast<float>(x))); }

// The paper's quantizer of one group, in f64 but for the stored scale and minimum. *unsure: a number lies so near to
// the middle between two codes that rounding may decide otherwise.
std::vector<double> plain_group(const std::vector<double>& x, int bits, std::vector<bool>* unsure) {
  const double most = (1 << bits) - 1, mn = *std::min_element(x.begin(), x.end()),
               mx = *std::max_element(x.begin(), x.end()), scale = half((mx - mn) / most), zero = half(mn);
  std::vector<double> out;
  for (const double v : x) {
    const double y = scale > 0 ? (v - zero) / scale : 0, code = std::clamp(std::nearbyint(y), 0., most);
    unsure->push_back(std::abs(std::abs(y - std::floor(y)) - .5) < 1e-3);
    out.push_back(code * scale + zero);
  }
  return out;
}

struct Counts {
  int keys, values;  // tokens that are codes
};

// Compares what the cache holds with the plain implementation. Groups of keys are `group` tokens of a channel, those of
// values `group` channels of a token.
void compare(const Run& run, int bits, std::size_t group, Counts coded) {
  std::size_t unsure_numbers = 0, numbers = 0;
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head)
      for (const KvSide side : {KvSide::key, KvSide::value}) {
        const bool key = side == KvSide::key;
        const Rows made = run.made(side, layer, head), got = run.stored(side, layer, head);
        REQUIRE(got.size() == made.size());
        const std::size_t dim = made[0].size(), end = static_cast<std::size_t>(key ? coded.keys : coded.values),
                          tokens = key ? group : 1, channels = key ? 1 : group;
        CAPTURE(layer, head, key, end);
        bool exact = true, right = true;
        for (std::size_t t = end; t < got.size(); ++t) exact = exact && got[t] == made[t];
        CHECK(exact);
        for (std::size_t t = 0; t < end; t += tokens)
          for (std::size_t d = 0; d < dim; d += channels) {
            std::vector<double> x;
            for (std::size_t i = 0; i < group; ++i) x.push_back(made[t + (key ? i : 0)][d + (key ? 0 : i)]);
            std::vector<bool> unsure;
            const auto wanted = plain_group(x, bits, &unsure);
            for (std::size_t i = 0; i < group; ++i, ++numbers) {
              unsure_numbers += unsure[i];
              right = right && (unsure[i] || std::abs(got[t + (key ? i : 0)][d + (key ? 0 : i)] - wanted[i]) < 1e-5);
            }
          }
        CHECK(right);
      }
  CHECK(numbers > 0);
  CHECK(unsure_numbers * 50 < numbers);
}

}  // namespace

TEST_CASE("kivi: the card's group by hand") {
  // Channel 0 of 4 tokens is (0, 1, 2, 6): the scale is 2, and 1 / 2 goes to the even code 0.
  const auto made = codec("kivi2", sized(4, 4));
  const Rows got = through(*made, KvSide::key, {{0, 3, 0, 0}, {1, 3, 0, 0}, {2, 3, 0, 0}, {6, 3, 0, 9}});
  CHECK(got == Rows{{0, 3, 0, 0}, {0, 3, 0, 0}, {2, 3, 0, 0}, {6, 3, 0, 9}});
  // The same numbers as one token's value.
  CHECK(through(*made, KvSide::value, {{0, 1, 2, 6}}) == Rows{{0, 0, 2, 6}});
  // Without `channels` keys share scales by token.
  ParamMap by_token = sized(4, 4);
  by_token["channels"] = false;
  CHECK(through(*codec("kivi2", by_token), KvSide::key, {{0, 1, 2, 6}}) == Rows{{0, 0, 2, 6}});
}

TEST_CASE("kivi: keys become codes by the residual at once, values one by one") {
  const auto counts = [](const Codec& made, int tokens) {
    const auto& codes = dynamic_cast<const RowCodec&>(made);
    return std::pair{codes.coded(KvSide::key, tokens), codes.coded(KvSide::value, tokens)};
  };
  const auto made = codec("kivi2", sized(4, 4));
  CHECK(counts(*made, 10) == std::pair{8, 6});  // the card's hand test
  CHECK(counts(*made, 11) == std::pair{8, 7});
  CHECK(counts(*made, 12) == std::pair{12, 8});
  CHECK(counts(*made, 3) == std::pair{0, 0});
  CHECK(counts(*made, 4) == std::pair{4, 0});
  CHECK(counts(*codec("kivi4"), 300) == std::pair{256, 172});
  CHECK(counts(*codec("kivi4", {{"keys", false}}), 300) == std::pair{0, 172});
  CHECK(counts(*codec("kivi4", {{"values", false}}), 300) == std::pair{256, 0});
}

TEST_CASE("kivi: the cache holds what a plain implementation gives, after prompts and after each step") {
  for (const int bits : {2, 4}) {
    CAPTURE(bits);
    const std::string name = "kivi" + std::to_string(bits);
    Run card(test::golden("tiny/llama-gqa3"), full_with(name, sized(4, 4)));
    card.prefill(10);
    compare(card, bits, 4, {8, 6});
    card.step();
    compare(card, bits, 4, {8, 7});
    card.step();
    compare(card, bits, 4, {12, 8});
    Run longer("bundled/recall", full_with(name, sized(32, 16)));
    longer.prefill(150);
    compare(longer, bits, 16, {128, 118});
    for (int i = 0; i < 9; ++i) longer.step();
    compare(longer, bits, 16, {128, 127});
    longer.step();
    compare(longer, bits, 16, {160, 128});
    longer.prefill(40);  // a second prompt goes on
    compare(longer, bits, 16, {192, 168});
    longer.step();
    compare(longer, bits, 16, {192, 169});
  }
}

TEST_CASE("kivi: bytes of a token as on the card") {
  const auto bytes = [](const char* name, int group) {
    const auto made = codec(name, {{"group", std::int64_t{group}}});
    const std::vector<float> x(128 * 128, 1);
    const auto rows = View<const float, 2>::dense(x.data(), {128, 128});
    const auto& codes = dynamic_cast<const RowCodec&>(*made);
    return (codes.encode(KvSide::key, rows).size() + codes.encode(KvSide::value, rows).size()) / 128;
  };
  CHECK(bytes("kivi2", 32) == 96);
  CHECK(bytes("kivi2", 64) == 80);
  CHECK(bytes("kivi4", 32) == 160);
}

TEST_CASE("kivi: equal numbers, NaN and infinities") {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const char* name : {"kivi2", "kivi4"}) {
    CAPTURE(name);
    const auto made = codec(name, sized(8, 8));
    const auto value = [&](std::vector<float> x) { return through(*made, KvSide::value, {std::move(x)})[0]; };
    CHECK(value(std::vector<float>(8, 3.25f)) == std::vector<float>(8, 3.25f));
    CHECK(value(std::vector<float>(8, 0.f)) == std::vector<float>(8, 0.f));
    const auto plain = value({0, 1, 2, 3, 0, 1, 2, 3}), with = value({0, 1, nan, 3, 0, 1, 2, 3});
    for (std::size_t i = 0; i < 8; ++i) CHECK(with[i] == (i == 2 ? 0 : plain[i]));  // code 0
    CHECK(value(std::vector<float>(8, nan)) == std::vector<float>(8, 0.f));
    for (const auto& x : {std::vector<float>{inf, 0, 0, 0, 0, 0, 0, 0},
                          {-inf, 0, 0, 0, 0, 0, 0, 0},
                          {inf, -inf, nan, 0, 1, 2, 3, 4},
                          std::vector<float>(8, inf),
                          std::vector<float>(8, -inf)})
      for (const float y : value(x)) CHECK(std::isfinite(y));
    // A key's NaN and infinity stay in the group of their channel.
    Rows keys(8, std::vector<float>(4, 1.f));
    keys[3][1] = inf, keys[4][2] = nan;
    const Rows got = through(*made, KvSide::key, keys);
    for (const auto& row : got) CHECK((row[0] == 1 && row[3] == 1));
  }
}

TEST_CASE("kivi: what it cannot do is refused before a run") {
  CHECK_THROWS_WITH(codec("kivi2", sized(12, 8)),
                    Catch::Contains("got groups of 8 tokens with residual 12, wanted a residual that they divide"));
  CHECK_THROWS_AS(codec("kivi2", sized(0, 8)), Error);
  CHECK(codec("kivi2", sized(8, 32))->residual() == 8);  // a group is at most the residual
  static Registry registry;
  const RegistryCatalog catalog(registry);
  const auto model = load_model(*open_model(test::golden("tiny/llama-gqa3"), "", ""), DType::f32, "m");
  const auto check = [&](PolicySpec spec) {
    EngineOptions o;
    o.max_tokens = 64;
    o.page_size = 16;
    const auto policy = build_policy(spec, catalog);
    Engine::check(*model, *policy, o);
  };
  check(full_with("kivi2", sized(8, 8)));
  // Head dimension 16 has no groups of 12.
  CHECK_THROWS_WITH(check(full_with("kivi2", sized(24, 12))),
                    Catch::Contains("got groups of 12, wanted a number that divides the head dimension 16"));
  CHECK_THROWS_WITH(check(full_with("kivi2_pages", sized(24, 12))),
                    Catch::Contains("got groups of 12, wanted ") && Catch::Contains("a number that divides"));
  const auto refused = [&](const PolicySpec& spec, const char* what) {
    CHECK_THROWS_WITH(build_policy(spec, catalog), Catch::Contains(what));
  };
  const auto use = [&](Role role, const std::string& name) {
    return PluginUse{role, name, resolve(registry.require(role, name), {})};
  };
  PolicySpec spec = full_with("kivi2", {});
  spec.scorer = use(Role::scorer, "snapkv");
  refused(spec, "mine: got a codec with a format of its own beside a scorer, wanted full or a selector");
  spec = full_with("kivi2", {});
  spec.placement.tier = Tier::host;
  CHECK(build_policy(spec, catalog)->needs().functional());
  spec.selector = use(Role::selector, "quest");
  CHECK(build_policy(spec, catalog)->needs().functional());
  spec.placement.codec = use(Role::codec, "lossless");
  refused(spec, "got a codec beside one that packs pages on the host, wanted pages in the run's dtype");
  spec.placement.codec = use(Role::codec, "int4");
  CHECK(build_policy(spec, catalog)->host_codec().k.bits == 4);
  std::swap(spec.codec, spec.placement.codec);
  refused(spec, "got a codec with a format of its own for pages on the host, wanted one that core stores as codes");
  spec = full_with("kivi2", {});
  spec.policy = use(Role::policy, "freekv");
  refused(spec, "got a codec with a format of its own beside a policy plugin, wanted full, a selector, or a policy");
  for (const char* name : {"kivi2", "kivi2_pages"}) {
    spec = full_with(name, {});
    spec.policy = use(Role::policy, "sparq");
    CHECK(build_policy(spec, catalog)->needs().functional() == (name == std::string("kivi2")));
  }
}

TEST_CASE("kivi: what is functional is called so") {
  Registry registry;
  const std::string codecs = list_text(registry, "codecs");
  CHECK_THAT(codecs, Catch::Matches("[^]*\nkivi2 +codec, functional [^]*"));
  CHECK_THAT(codecs, Catch::Matches("[^]*\nkivi2_pages +codec  [^]*"));
  CHECK_THAT(list_json(registry, "codecs"), Catch::Contains("\"functional\": true"));
  CHECK_THAT(describe_text(registry, "kivi2"), Catch::Contains("it saves no bytes"));
}

TEST_CASE("kivi pages: keys by channel, values by token, and the newest tokens exact") {
  for (const int bits : {2, 4}) {
    CAPTURE(bits);
    const std::string name = "kivi" + std::to_string(bits) + "_pages";
    const auto wide = static_cast<std::uint8_t>(bits);
    const CodecSide keys{wide, CodeKind::integer, CodeAxis::channel, 32},
        values{wide, CodeKind::integer, CodeAxis::token, 32};
    CHECK(codec(name)->spec() == CodecSpec{keys, values});
    CHECK(codec(name)->residual() == 128);
    CHECK(codec(name, {{"channels", false}})->spec() == CodecSpec{values, values});
    CHECK(codec(name, {{"keys", false}})->spec() == CodecSpec{{}, values});
    CHECK(codec(name, {{"values", false}})->spec() == CodecSpec{keys, {}});
  }
}

TEST_CASE("kivi pages: bytes of a token as on the card, its position beside") {
  const auto bytes = [](const char* name, std::int64_t group) {
    const CodecSpec spec = codec(name, {{"group", group}})->spec();
    return ops::make_layout(DType::bf16, spec, 64, 128, 0).bytes / 64 - 4;
  };
  CHECK(bytes("kivi2_pages", 32) == 96);
  CHECK(bytes("kivi2_pages", 64) == 80);
  CHECK(bytes("kivi4_pages", 32) == 160);
}

// Of a group: f16 scale and minimum, then the codes, the first one in the lowest bits.
TEST_CASE("kivi: the format of its own is numpy's, bit by bit") {
  const test::CodecsGolden golden;
  int sides = 0;
  for (const test::GoldenCodes& of : golden.sides()) {
    const bool key = of.side.axis == CodeAxis::channel;
    if (of.side.kind != CodeKind::integer || of.side.bits > 4 || of.side.group == 0) continue;
    CAPTURE(of.name);
    ++sides;
    const int bits = of.side.bits, group = of.side.group;
    const auto made = codec("kivi" + std::to_string(bits), sized(golden.tokens, group));
    const auto got = dynamic_cast<const RowCodec&>(*made).encode(
        key ? KvSide::key : KvSide::value,
        View<const float, 2>::dense(golden.x.data(), {golden.tokens, golden.channels}));
    std::vector<std::byte> wanted;
    const auto add = [&](int t, int d) {
      const std::uint16_t meta[] = {of.scale[of.group(t, d)], of.zero[of.group(t, d)]};
      const auto* bytes = reinterpret_cast<const std::byte*>(meta);
      wanted.insert(wanted.end(), bytes, bytes + sizeof meta);
      for (int i = 0; i < group; ++i) {
        const int at = key ? (t + i) * golden.channels + d : t * golden.channels + d + i;
        if (i * bits % 8 == 0) wanted.emplace_back();
        wanted.back() |= static_cast<std::byte>(of.codes[static_cast<std::size_t>(at)] << i * bits % 8);
      }
    };
    for (int t = 0; t < golden.tokens; t += key ? group : 1)
      for (int d = 0; d < golden.channels; d += key ? 1 : group) add(t, d);
    CHECK(got == wanted);
  }
  CHECK(sides == 4);
}

TEST_CASE("kivi: pages and the format of its own give the same numbers for the same groups") {
  // A page of 16 tokens, groups of 8 tokens and of 8 channels.
  std::vector<float> x(16 * 16);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(std::sin(3. * static_cast<double>(i))) * 5;
  for (const int bits : {2, 4}) {
    const std::string name = "kivi" + std::to_string(bits);
    const PageLayout plain = ops::make_layout(DType::f32, {}, 16, 16, 0),
                     layout = ops::make_layout(DType::f32, codec(name + "_pages", sized(16, 8))->spec(), 16, 16, 0);
    std::vector<std::byte> page(static_cast<std::size_t>(plain.bytes)), codes(static_cast<std::size_t>(layout.bytes));
    Rows rows;
    for (int t = 0; t < 16; ++t) {
      const float* row = x.data() + t * 16;
      rows.emplace_back(row, row + 16);
      ops::write_token(page.data(), plain, t, row, row, t);
    }
    ops::copy_page(page.data(), plain, codes.data(), layout);
    const auto made = codec(name, sized(16, 8));
    for (const KvSide side : {KvSide::key, KvSide::value}) {
      Rows wanted;
      for (int t = 0; t < 16; ++t)
        ops::read_row(codes.data(), layout, side, t, wanted.emplace_back(std::size_t{16}).data());
      CHECK(through(*made, side, rows) == wanted);
    }
  }
}
