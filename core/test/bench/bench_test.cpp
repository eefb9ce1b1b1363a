#include "bench/bench.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <kvlab/error.hpp>
#include <nlohmann/json.hpp>

using namespace kvlab;

TEST_CASE("bench holds a reading case against the read rate and a computing one against the GEMM rate") {
  bench::Report r;
  r.ceilings.read_bytes_per_s = 10e9;
  r.ceilings.read_before = 10e9;
  r.ceilings.read_after = 9.5e9;
  r.ceilings.gemm = {200e9, "some kernel"};
  r.ceilings.threads = 2;
  bench::Line gemv{"gemv", "m=1", "k", 0.002, 0.001}, gemm{"gemm", "m=64", "k", 0.01, 0.01};
  gemv.bytes = 15e6;
  gemv.flops = 1e9;
  gemv.reads = true;
  gemm.bytes = 1;
  gemm.flops = 1e9;
  r.lines = {gemv, gemm};
  CHECK(r.lines[0].rate() == Approx(7.5e9));
  CHECK(r.lines[0].percent(r.ceilings) == Approx(75));
  CHECK(r.lines[1].percent(r.ceilings) == Approx(50));
  const nlohmann::json j = bench::to_json(r);
  CHECK(j["ops"].size() == 2);
  CHECK(j["ops"][0]["percent"] == Approx(75));
  CHECK(j["ops"][1]["ceiling"] == "gemm");
  CHECK(j["gemm_kernel"] == "some kernel");
  const std::string text = bench::table(r);
  CHECK_THAT(text, Catch::Contains("7.5 GB/s") && Catch::Contains("75.0%") && Catch::Contains("some kernel"));
  CHECK_THAT(text, !Catch::Contains("something else"));
  r.lines[0].beside = {"decode", 0.004, 0.005};
  CHECK_THAT(bench::table(r), Catch::Contains("beside decode: 5.000 ms, alone 4.000 ms, slowdown 25.0%"));
  CHECK(bench::to_json(r)["ops"][0]["beside"]["slowdown_percent"] == Approx(25));
  CHECK(!bench::to_json(r)["ops"][1].contains("beside"));
  r.ceilings.read_after = 5e9;
  CHECK_THAT(bench::table(r), Catch::Contains("something else"));
}

TEST_CASE("bench names the ops it knows") {
  const std::vector<std::string>& names = bench::op_names();
  for (const char* name : {"attend", "gemv", "select", "decode", "prefill"})
    CHECK(std::count(names.begin(), names.end(), name) == 1);
  CHECK_THROWS_WITH(bench::run({"gemv", "sort"}), Catch::Contains("'sort'") && Catch::Contains("gemm"));
  const auto said = [](const auto&...) {};
  CHECK_THROWS_WITH(bench::check({"append"}, false, said, "no such shape"), Catch::Contains("'no such shape'"));
  std::vector<std::string> shapes;
  CHECK(bench::check(
      {"copy"}, false,
      [&](const std::string& op, const std::string& shape, const std::string& differs) {
        CHECK(op == "copy");
        CHECK(differs.empty());
        shapes.push_back(shape);
      },
      "append 1 of 1024"));
  CHECK(shapes == std::vector<std::string>{"append 1 of 1024 tokens", "append 1 of 1024 tokens, state"});
}
