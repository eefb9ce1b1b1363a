// Every codec beside every method, from the same tables as plugins/CODECS.md. The run is short; what each codec and
// method must keep is the business of the other cases.
#include <catch2/catch.hpp>
#include <cstring>
#include <kvlab/error.hpp>
#include <kvlab/row_codec.hpp>
#include <limits>
#include <tuple>

#include "compose/row_coded.hpp"
#include "ops/page/packed.hpp"
#include "ops/page/paged.hpp"
#include "run/codec_matrix.hpp"
#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt_tokens = 60, budget = 48;

struct Run {
  std::shared_ptr<const Model> model = tiny_model("llama-gqa3", DType::bf16);
  std::vector<int> prompt = test_text(prompt_tokens, model->config.vocab),
                   answer = test_text(4, model->config.vocab, 101);
  std::map<std::tuple<std::string, RopeRegime>, Logits> alone;  // of a codec, by its name

  const Logits& codec_alone(const std::optional<PluginUse>& codec, RopeRegime regime) {
    auto& known = alone[{codec ? codec->name : "", regime}];
    if (known.empty()) {
      PolicySpec spec = full_spec();
      spec.codec = codec;
      Play p(model, spec);
      p.replace(std::make_shared<KeepsAll>(p.policy, regime));
      known = p.run(prompt, answer);
    }
    return known;
  }
};

// Whether a method runs on the suite's device.
bool runs_here(const PolicySpec& spec) {
  const Needs needs = subjects().policy(spec)->needs();
  const auto& devices = needs.devices();
  return devices.empty() || std::count(devices.begin(), devices.end(), contract_device()) > 0;
}

// Whether a plugin of the entry is under test.
bool about(const PolicySpec& spec) {
  bool yes = of_the_tree();
  for_each_use(spec,
               [&](const PluginUse& use) { yes = yes || under_test(*subjects().catalog().find(use.role, use.name)); });
  return yes;
}

std::int64_t bytes(const Ledger::Row& row) {
  return row[static_cast<std::size_t>(Tag::keys)] + row[static_cast<std::size_t>(Tag::values)];
}

// The pages have the codecs that the entry names, and no others.
void check_stored(const PolicySpec& spec, const Play& p) {
  const Store& store = p.engine->store();
  const StoreOptions& o = store.options();
  if (spec.codec) {
    const CodecSpec codec = subjects().codec_of(*spec.codec);
    const bool two = o.codecs.size() == 2;
    CHECK(o.codecs.back() == codec);
    CHECK(bytes(store.ledger().held(Tier::device, two ? Stored::second : Stored::first)) > 0);
  } else if (!spec.policy) {
    CHECK(o.codecs == std::vector<CodecSpec>{CodecSpec{}});
  }
  if (spec.placement.codec) CHECK(o.host_codec == subjects().codec_of(*spec.placement.codec));
  if (spec.placement.tier == Tier::host) CHECK(bytes(store.ledger().moved(Tier::host, Stored::host)) > 0);
}

PolicySpec limited(PolicySpec spec) {
  if (takes_budget(spec, subjects().catalog())) spec.budget = {BudgetAmount::tokens, budget};
  return spec;
}

void check_runs(const PolicySpec& spec, Run& run) {
  Play p(run.model, limited(spec));
  CHECK(finite(p.run(run.prompt, run.answer)));
  check_stored(spec, p);
  const Needs needs = p.policy->needs();
  // With all tokens a method gives what its codec gives alone.
  if (spec.placement.tier == Tier::host || needs.own_amount() || needs.functional() || needs.rebuilds_keys()) return;
  Play all(run.model, subjects().as_full(spec));
  const Logits got = all.run(run.prompt, run.answer), &wanted = run.codec_alone(spec.codec, needs.rope());
  CHECK((on_cuda() ? worst(got, wanted) < 0.03 : got == wanted));
}

void check_refused(const CodecCell& cell, const Run& run) {
  try {
    Play p(run.model, cell.spec);
    FAIL("no error");
  } catch (const Error& e) {
    CHECK((e.code() == Errc::config || e.code() == Errc::unsupported));
    CHECK(e.message() == cell.refused);
  }
}

}  // namespace

TEST_CASE("every codec goes with every method and tier, or is refused by name before the run") {
  Run run;
  const auto tables = codec_tables(subjects().catalog(), *run.model, contract_device(), 8, Subjects::use);
  REQUIRE(tables.size() == 3);
  for (const CodecTable& t : tables)
    for (std::size_t row = 0; row < t.cells.size(); ++row) {
      const std::vector<CodecCell>& cells = t.cells[row];
      const auto runs = [](const CodecCell& c) { return c.refused.empty(); };
      const auto all = static_cast<std::size_t>(std::count_if(cells.begin(), cells.end(), runs));
      std::size_t at = 0;
      for (std::size_t column = 0; column < cells.size(); ++column) {
        const CodecCell& cell = cells[column];
        // On a GPU each method meets one of its codecs, in turn. KVLAB_CONTRACT_PAIRS=all asks every pair.
        if (on_cuda() && !every_pair() && (!runs(cell) || at++ != row % all)) continue;
        if (!about(cell.spec)) continue;
        CAPTURE(t.title, t.row_names[row], t.column_names[column], cell.refused);
        if (!runs(cell))
          check_refused(cell, run);
        else if (runs_here(cell.spec))
          check_runs(cell.spec, run);
      }
    }
}

TEST_CASE("a policy that archives heads takes no other codec on the host, and the tables say so", "[cpu]") {
  if (skip_on_cuda()) return;
  const auto tables = codec_tables(subjects().catalog(), *tiny_model("llama-gqa3"), Device::cpu, 8, Subjects::use);
  const CodecTable &device = tables[0], &host = tables[1];
  int archiving = 0;
  for (std::size_t row = 0; row < device.cells.size() && !device.cells[row].empty(); ++row) {
    PolicySpec spec = device.cells[row][0].spec;
    spec.codec.reset();
    if (!spec.policy || !about(spec) || !subjects().policy(spec)->needs().archive()) continue;
    CAPTURE(device.row_names[row]);
    ++archiving;
    const auto found = std::find(host.row_names.begin(), host.row_names.end(), device.row_names[row]);
    REQUIRE(found != host.row_names.end());
    const std::vector<CodecCell>& cells = host.cells[static_cast<std::size_t>(found - host.row_names.begin())];
    CHECK(cells[0].refused.empty());
    for (std::size_t column = 1; column < cells.size(); ++column)
      CHECK_THAT(cells[column].refused, Catch::Contains("a policy plugin that archives heads there, wanted none"));
  }
  if (of_the_tree()) CHECK(archiving > 0);
}

// Core decides nothing by the tier: pages on the host have the same rows. Tokens that wait for their codes stay exact.
TEST_CASE("a codec with a format of its own gives the same where pages lie on the host") {
  Run run;
  const std::vector<int> longer = test_text(90, run.model->config.vocab),
                         answer = test_text(40, run.model->config.vocab, 7);
  int ran = 0;
  for (const CodecTable& t : codec_tables(subjects().catalog(), *run.model, contract_device(), 8, Subjects::use))
    for (const auto& cells : t.cells)
      for (const CodecCell& cell : cells) {
        PolicySpec spec = cell.spec;
        if (!spec.codec || spec.policy || spec.pruner || spec.placement.tier == Tier::host || !cell.refused.empty() ||
            !about(spec) || !runs_here(spec))
          continue;
        if (!codes_rows(*create<Codec>(*subjects().catalog().find(Role::codec, spec.codec->name), spec.codec->params)))
          continue;
        spec = limited(spec);
        PolicySpec below = spec;
        below.placement.tier = Tier::host;
        CAPTURE(spec.name, spec.codec->name);
        try {
          subjects().policy(below);
        } catch (const Error& e) {
          CHECK(e.message().find("got an oracle and placement on the host") == 0);
          continue;
        }
        Play here(run.model, spec), there(run.model, below);
        const Logits wanted = here.run(longer, answer), got = there.run(longer, answer);
        CHECK((on_cuda() ? worst(got, wanted) < 0.03 : got == wanted));
        check_stored(below, there);
        // Another codec of the host takes what leaves.
        ++ran;
        const PluginInfo* int8 = subjects().catalog().find(Role::codec, "int8");
        if (!int8) continue;
        below.placement.codec = Subjects::use(*int8);
        Play coded(run.model, below);
        const Logits other = coded.run(longer, answer);
        CHECK(finite(other));
        CHECK(other != wanted);
        check_stored(below, coded);
      }
  if (of_the_tree()) CHECK(ran > 0);
}

TEST_CASE("splits go with codecs on both tiers, or are refused by name before the run", "[cpu]") {
  if (skip_on_cuda()) return;
  Run run;
  const auto tables = codec_tables(subjects().catalog(), *run.model, contract_device(), 8, Subjects::use);
  const CodecTable& t = tables[0];
  std::size_t turn = 0;
  int ran = 0;
  for (std::size_t row = 0; row < t.cells.size(); ++row)
    for (std::size_t column = 0; column < t.cells[row].size(); ++column) {
      PolicySpec spec = t.cells[row][column].spec;
      if (!spec.split) break;
      // Each codec of the device meets one of the host, another one with each split.
      spec.placement.tier = Tier::host;
      spec.placement.codec = t.cells[0][(column + turn) % t.cells[0].size()].spec.codec;
      turn += column + 1 == t.cells[row].size();
      if (!about(spec)) continue;
      CAPTURE(t.row_names[row], spec.codec->name, spec.placement.codec->name);
      try {
        subjects().policy(spec);
      } catch (const Error& e) {
        CHECK(e.code() == Errc::config);
        continue;
      }
      check_runs(spec, run);
      ++ran;
    }
  if (of_the_tree()) CHECK(ran > 0);
}

namespace {

constexpr int page_tokens = 8, dim = 16;
using Page = std::vector<float>;  // [token, dim]

// A side of a full page as attention reads it.
Page through(const PluginInfo& info, KvSide side, const Page& x) {
  const PluginUse use = Subjects::use(info);
  const auto codec = create<Codec>(info, use.params);
  Page out(x.size(), 0.f);
  if (auto* rows = dynamic_cast<RowCodec*>(codec.get())) {
    Shape shape;
    shape.head_dim = dim;
    rows->attach(shape);
    // As many tokens as become codes at once, at least a page of them.
    const std::int64_t tokens = rows->coded(side, 128);
    REQUIRE(tokens >= page_tokens);
    Page all;
    for (std::int64_t i = 0; i < tokens * dim; ++i) all.push_back(x[static_cast<std::size_t>(i) % x.size()]);
    const auto codes = rows->encode(side, View<const float, 2>::dense(all.data(), {tokens, dim}));
    rows->decode(side, codes, View<float, 2>::dense(all.data(), {tokens, dim}));
    std::copy_n(all.begin(), out.size(), out.begin());
    return out;
  }
  const CodecSpec spec = codec->spec();
  const DType dtype = spec.packs ? DType::bf16 : DType::f32;
  const PageLayout plain = ops::make_layout(dtype, {}, page_tokens, dim, 0),
                   coded = ops::make_layout(dtype, spec, page_tokens, dim, 0);
  std::vector<std::byte> frame(static_cast<std::size_t>(plain.bytes)), to(static_cast<std::size_t>(coded.bytes));
  for (int t = 0; t < page_tokens; ++t)
    ops::write_token(frame.data(), plain, t, x.data() + t * dim, x.data() + t * dim, t);
  if (!spec.packs)
    ops::copy_page(frame.data(), plain, to.data(), coded);
  else if (ops::pack_page(frame.data(), plain, to.data()) > 0) {
    std::vector<std::byte> back(frame.size());
    ops::unpack_page(to.data(), plain, back.data());
    CHECK(std::memcmp(back.data(), frame.data(), static_cast<std::size_t>(plain.positions)) == 0);
    to = back;
  } else {
    to = frame;
  }
  for (int t = 0; t < page_tokens; ++t) ops::read_row(to.data(), coded, side, t, out.data() + t * dim);
  return out;
}

}  // namespace

TEST_CASE("codecs take equal numbers, NaN and infinities", "[cpu]") {
  if (skip_on_cuda()) return;
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  Page any(page_tokens * dim);
  for (std::size_t i = 0; i < any.size(); ++i) any[i] = static_cast<float>(static_cast<int>(i * 37 % 64) - 32) / 16;
  for (const std::string& name : subjects().catalog().names(Role::codec)) {
    const PluginInfo& info = *subjects().catalog().find(Role::codec, name);
    if (!under_test(info)) continue;
    const Instance<Codec> codec = create<Codec>(info, Subjects::use(info).params);
    const bool own = codes_rows(*codec);
    // Atom's zero is a code, so a row of numbers of one sign saturates.
    const auto saturates = [&](KvSide side) {
      return (side == KvSide::key ? codec->spec().k : codec->spec().v).kind == CodeKind::whole_zero;
    };
    for (const KvSide side : {KvSide::key, KvSide::value}) {
      CAPTURE(name, side == KvSide::key);
      INFO("usual cause: a division by max - min, which is 0 or infinite.");
      const auto finite_page = [](const Page& x) {
        return std::all_of(x.begin(), x.end(), [](float y) { return std::isfinite(y); });
      };
      for (const float x : {0.f, 3.25f, -120.f})
        for (const float y : through(info, side, Page(any.size(), x))) {
          REQUIRE(std::isfinite(y));
          if (!own && !saturates(side)) REQUIRE(std::abs(y - x) <= std::abs(x) * 0x1p-9f);
        }
      const Page plain = through(info, side, any);
      CHECK(finite_page(plain));
      // What lies beside NaN or an infinity stays finite. A format of its own need not promise that.
      for (const float odd : {nan, inf, -inf}) {
        Page with = any;
        with[19] = with[100] = odd;
        const Page got = through(info, side, with);
        for (std::size_t i = 0; !own && i < got.size(); ++i)
          if (i != 19 && i != 100) REQUIRE(std::isfinite(got[i]));
      }
      // NaN does not count: the others are as if it were a number between them.
      Page with = any, between = any;
      with[19] = with[100] = nan, between[19] = between[100] = 0;
      const Page got = through(info, side, with), wanted = through(info, side, between);
      for (std::size_t i = 0; !own && i < got.size(); ++i)
        if (i != 19 && i != 100) REQUIRE(got[i] == wanted[i]);
      through(info, side, Page(any.size(), nan));
    }
  }
}

namespace {

class Fixed final : public PluginCatalog {
 public:
  const PluginInfo* find(Role, const std::string&) const override { return nullptr; }
  std::vector<std::string> names(Role) const override { return {}; }
};

}  // namespace

TEST_CASE("without plugins the tables have the full cache alone", "[cpu]") {
  const auto tables = codec_tables(Fixed(), *tiny_model("llama-gqa3"), Device::cpu, 8);
  REQUIRE(tables.size() == 3);
  CHECK(tables[0].row_names == std::vector<std::string>{"full"});
  CHECK(tables[0].cells[0].empty());
  CHECK(tables[1].column_names == std::vector<std::string>{"as on the device"});
  CHECK(tables[1].cells[0][0].refused.empty());
}

TEST_CASE("a page of tables numbers each reason once, names left out", "[cpu]") {
  CodecTable t{"T", "method", "codec", {"a", "b"}, {"x", "y"}, {{{}, {}}, {{}, {}}}};
  t.cells[0][1].refused = "got codec 'y' beside 'a', wanted none";
  t.cells[1][0].refused = "got codec 'x' beside 'b', wanted none";
  t.cells[1][1].refused = "other";
  CHECK_THAT(codec_page(Fixed(), {t}, "for this"),
             Catch::Contains("## T\n\n| method | x | y |\n|---|---|---|\n| `a` | ok | 1 |\n| `b` | 1 | 2 |\n") &&
                 Catch::Contains("\n1. got codec beside, wanted none\n2. other\n") && Catch::Contains("\nfor this.\n"));
}
