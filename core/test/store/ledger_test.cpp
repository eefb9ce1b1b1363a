// Bytes of each codec in the ledger, against the formulas of the methods' papers.
#include "store/ledger.hpp"

#include <catch2/catch.hpp>

#include "store/codec_name.hpp"
#include "support/store_fixture.hpp"

using namespace kvlab;
using test::Lists;
using test::StoreFixture;

namespace {

constexpr int dim = 128;

StoreFixture fixture(std::vector<CodecSpec> codecs, int page_size) {
  StoreFixture f;
  f.options.shape.head_dim = dim;
  f.options.shape.dtype = DType::bf16;
  f.options.shape.page_size = page_size;
  f.options.shape.max_tokens = 256;
  f.options.codecs = std::move(codecs);
  return f;
}

// Bytes of keys, values and their metadata alone.
std::int64_t kv_bytes(const Store& store, Stored as) {
  const Ledger::Row& held = store.ledger().held(Tier::device, as);
  return held[static_cast<int>(Tag::keys)] + held[static_cast<int>(Tag::values)] +
         held[static_cast<int>(Tag::codec_metadata)];
}
std::int64_t all_bytes(const Store& store, Tier tier, Stored as) {
  std::int64_t sum = 0;
  for (const std::int64_t bytes : store.ledger().held(tier, as)) sum += bytes;
  return sum;
}

}  // namespace

TEST_CASE("a token of a codec takes the bytes of the papers' formulas") {
  constexpr int tokens = 64, page = 16;
  struct Case {
    const char* name;
    CodecSpec codec;
    std::int64_t kv, leankv;  // bytes of a token and KV head; the second with LeanKV's score and position
  };
  const CodecSide fp8{8, CodeKind::e4m3};
  for (const Case& c : {Case{"bf16", {}, 512, 520}, Case{"k8v8", {{8}, {8}}, 264, 272},
                        Case{"k8v4", {{8}, {4}}, 200, 208}, Case{"k4v4", {{4}, {4}}, 136, 144},
                        Case{"k4v2", {{4}, {2}}, 104, 112}, Case{"kfp8vfp8", {fp8, fp8}, 264, 272}}) {
    CAPTURE(c.name);
    StoreFixture f = fixture({c.codec}, page);
    f.options.token_state = {"significance"};
    CpuStore store(f.options);
    f.fill(store, store.open(), tokens);
    const std::int64_t heads = f.options.shape.layers * f.options.shape.kv_heads;
    CHECK(codec_name(c.codec, DType::bf16) == c.name);
    CHECK(kv_bytes(store, Stored::first) == tokens * heads * c.kv);
    CHECK(all_bytes(store, Tier::device, Stored::first) == tokens * heads * c.leankv);
    CHECK(all_bytes(store, Tier::device, Stored::second) == 0);
    CHECK(store.ledger().held(Tier::device, Stored::none)[static_cast<int>(Tag::keys)] == 0);
  }
}

TEST_CASE("a cache of two codecs has the bytes of each, as LeanKV counts them: 208 a high token, 112 a low one") {
  StoreFixture f = fixture({{{8}, {4}}, {{4}, {2}}}, 16);
  f.options.token_state = {"significance"};
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 80);
  const Lists low(2, {0, 2, 3});  // pages of layer 0
  REQUIRE(store.apply(test::encode(low.pages(), 1), {slot}).fit == Fit::ok);
  CHECK(all_bytes(store, Tier::device, Stored::second) == 2 * 48 * 112);
  CHECK(all_bytes(store, Tier::device, Stored::first) == (2 * 80 + 2 * 32) * 208);
  const Ledger& ledger = store.ledger();
  for (int tag = 0; tag < tag_count; ++tag) {
    std::int64_t sum = 0;
    for (const Stored as : all_stored) sum += ledger.held(Tier::device, as)[static_cast<std::size_t>(tag)];
    CHECK(sum == ledger.held(Tier::device)[static_cast<std::size_t>(tag)]);
  }
  store.close(slot);
  for (const Stored as : {Stored::first, Stored::second}) CHECK(all_bytes(store, Tier::device, as) == 0);
}

// KIVI's card: dim * bits / 8 * 2 + 2 * (dim / group) * 4 bytes; its residual has 16 bits.
TEST_CASE("pages of KIVI and its residual have the bytes of the card") {
  for (const auto& [bits, bytes] : {std::pair{2, 96}, {4, 160}}) {
    const auto b = static_cast<std::uint8_t>(bits);
    const CodecSpec kivi{{b, CodeKind::integer, CodeAxis::channel, 32}, {b, CodeKind::integer, CodeAxis::token, 32}};
    StoreFixture f = fixture({{}, kivi}, 32);
    CpuStore store(f.options);
    const int slot = store.open();
    f.fill(store, slot, 224);
    const Lists aged(2, {0, 1, 2});  // 96 tokens; 128 are the residual
    for (int layer = 0; layer < 2; ++layer)
      REQUIRE(store.apply(test::encode(aged.pages(), 1, layer), {slot}).fit == Fit::ok);
    CHECK(kv_bytes(store, Stored::second) == 4 * 96 * bytes);
    CHECK(kv_bytes(store, Stored::first) == 4 * 128 * 512);
    CHECK(codec_name(kivi, DType::bf16) == "k" + std::to_string(bits) + "c32v" + std::to_string(bits) + "t32");
  }
}

TEST_CASE("pages on the host are in the host's codec, which the ledger keeps apart") {
  StoreFixture f = fixture({{{8}, {8}}}, 16);
  f.options.host_codec = {{4}, {4}};
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 64);
  const Lists down(2, {0, 1});
  Edits e;
  e.offload(down.pages());
  e.drop(Tier::device, down.pages());
  REQUIRE(store.apply(e.all(), {slot}).fit == Fit::ok);
  const Ledger& ledger = store.ledger();
  const auto of = [](const Ledger::Row& row) {
    return row[static_cast<int>(Tag::keys)] + row[static_cast<int>(Tag::values)] +
           row[static_cast<int>(Tag::codec_metadata)];
  };
  CHECK(of(ledger.held(Tier::host, Stored::host)) == 2 * 32 * 136);
  CHECK(of(ledger.moved(Tier::host, Stored::host)) == 2 * 32 * 136);
  CHECK(of(ledger.held(Tier::host, Stored::first)) == 0);
  CHECK(of(ledger.held(Tier::device, Stored::first)) == (2 * 32 + 2 * 64) * 264);
  Edits up;
  up.recall(down.pages());
  REQUIRE(store.apply(up.all(), {slot}).fit == Fit::ok);
  CHECK(of(ledger.moved(Tier::device, Stored::first)) == 2 * 32 * 264);
}

TEST_CASE("names of codecs say bits and groups") {
  const CodecSide plain, page{4, CodeKind::integer, CodeAxis::channel},
      groups{8, CodeKind::integer, CodeAxis::token, 16};
  CHECK(codec_name({}, DType::f32) == "f32");
  CHECK(codec_name({plain, plain, true}, DType::bf16) == "bf16 packed");
  CHECK(codec_name({plain, {8}}, DType::bf16) == "k16v8");
  CHECK(codec_name({{4}, plain}, DType::f32) == "k4v32");
  CHECK(codec_name({page, groups}, DType::bf16) == "k4cv8t16");
}
