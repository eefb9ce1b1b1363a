#include "result/memory_report.hpp"

#include <catch2/catch.hpp>

#include "result/results_sample.hpp"

using namespace kvlab::results;
using Catch::Contains;

namespace {

std::string file_of(const TemporaryFolder& dir, std::vector<LedgerRow> ledger) {
  CellResult c;
  c.id = c.summary.cell = "c1";
  c.summary.policy = "mixed", c.summary.model = "m", c.summary.task = "t";
  c.ledger = std::move(ledger);
  std::string out = dir / "o.h5";
  write_part(out, c, sample_info());
  REQUIRE(rebuild(out, sample_info(), {"c1"}).empty());
  return out;
}

}  // namespace

TEST_CASE("the memory report has a row for each tier, codec and tag; a step without a row held nothing") {
  const TemporaryFolder dir;
  const std::string out = file_of(dir, {{0, "device", "keys", 4000, 0, 400, "k8v4"},
                                        {0, "device", "keys", 1000, 0, 0, "k4v2"},
                                        {0, "device", "tables", 96, 0, 0, ""},
                                        {1, "device", "keys", 2000, 600, 200, "k8v4"},
                                        {1, "device", "tables", 96, 0, 0, ""},
                                        {1, "host", "values", 8, 8, -1, "bf16"}});
  CHECK(memory_report(out, Format::csv) ==
        "cell,policy,tier,codec,tag,held,most held,without a token,moved a step\n"
        "c1,mixed,device,k8v4,keys,3000,4000,300,300\n"
        "c1,mixed,device,k4v2,keys,500,1000,0,0\n"
        "c1,mixed,device,,tables,96,96,0,0\n"
        "c1,mixed,host,bf16,values,4,8,-,4\n");
  CHECK_THAT(memory_report(out, Format::md),
             Contains("### m, t: mixed (cell c1)") &&
                 Contains("| device | k8v4 | keys | 0.003 | 0.004 | 0.0003 | 0.0003 |") &&
                 Contains("| device | - | tables |"));
}

TEST_CASE("the memory report names a cell without a ledger, as a failed one is") {
  const TemporaryFolder dir;
  CHECK_THAT(memory_report(file_of(dir, {}), Format::table), Contains("cell c1 has no ledger"));
}
