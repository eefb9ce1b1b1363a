// Cells of policies that change stored values.
#include <catch2/catch.hpp>

#include "support/cell_fixture.hpp"
#include "support/labels.hpp"

using namespace kvlab;

namespace {

struct Cells : test::CellFixture {
  explicit Cells(const std::string& policy)
      : CellFixture(test::tiny_model("llama-gqa3"), test::policy_of(policy, 16), {Metric::score, Metric::memory}) {
    for (unsigned i = 0; i < 3; ++i)
      add(test::test_text(100 + 5 * static_cast<int>(i), model->config.vocab, i + 1), {}, 8);
  }
};

const char* const chunks_read = "shadowkv: {offload: false, rank: 8, outliers: 1, budget: {tokens: 56}}";

}  // namespace

TEST_CASE("cells of policies that change stored values are functional, act, and hold the bytes of the full cache") {
  const results::CellResult full = Cells("full").run();
  REQUIRE(full.summary.status == "ok");
  CHECK(test::lasting_labels(full.summary).empty());
  for (const char* policy : {"think", "minicache", "{kvquant: {calibration: false}}", chunks_read,
                             "{name: rows, policy: full, codec: {kivi2: {residual: 16}}}"}) {
    CAPTURE(policy);
    const results::CellResult result = Cells(policy).run();
    CAPTURE(result.summary.error);
    REQUIRE(result.summary.status == "ok");
    CHECK(test::lasting_labels(result.summary) == "functional");
    CHECK(result.summary.fired > 0);
    // minicache keeps room for a layer beside the cache, kvquant a number of each KV head, and shadowkv has landmarks.
    if (policy != chunks_read)
      CHECK(result.summary.compression == Approx(full.summary.compression).epsilon(1e-3));
    else
      CHECK(result.summary.compression < full.summary.compression);
    if (policy == std::string("think"))
      CHECK(result.summary.device_bytes_decode == Approx(full.summary.device_bytes_decode));
  }
}

TEST_CASE("keys that are made from factors where their pages come from the host are no functional cell") {
  const auto summary = [](const std::string& offload) {
    Cells cells("shadowkv: {offload: " + offload +
                ", chunk: 16, rank: 8, outliers: 1, local_chunks: 1, budget: {tokens: 48}}");
    cells.experiment.spill = "always";
    const results::CellResult result = cells.run();
    CAPTURE(offload, result.summary.error);
    REQUIRE(result.summary.status == "ok");
    return result.summary;
  };
  const auto away = summary("true"), here = summary("false");
  CHECK(test::lasting_labels(away).empty());
  CHECK(test::lasting_labels(here) == "functional");
  CHECK(away.device_bytes_decode < here.device_bytes_decode);
}

TEST_CASE("a cap on device memory leaves a functional policy the scratch that it needs") {
  for (const char* policy : {"think", "minicache", "{kvquant: {calibration: false}}", chunks_read,
                             "shadowkv: {rank: 8, outliers: 1, budget: {tokens: 56}}"}) {
    Cells cells(policy);
    cells.leave_for_pages(std::int64_t{1} << 22, 1);
    const results::CellResult result = cells.run();
    CAPTURE(policy, result.summary.error);
    CHECK(result.summary.status == "ok");
  }
}
