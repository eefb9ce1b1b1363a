#include "result/plugin_report.hpp"

#include <catch2/catch.hpp>
#include <kvlab/error.hpp>

#include "result/profile_file.hpp"
#include "result/results_sample.hpp"

using namespace kvlab::results;
using Catch::Contains;

namespace {

const std::string a64(64, 'a'), b64(64, 'b');

CellResult cell(const std::string& id, std::vector<PluginRow> plugins) {
  CellResult c;
  c.id = c.summary.cell = id;
  c.plugins = std::move(plugins);
  return c;
}

}  // namespace

TEST_CASE("the plugins of a result file, each with its cells, from OUT and from newer parts") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  const PluginRow task{"task", "niah", "0.1.0", a64}, old{"scorer", "my_own", "1", a64},
      rebuilt{"scorer", "my_own", "1", b64};
  write_part(out, cell("c1", {task, old}), sample_info());
  write_part(out, cell("c2", {task, old}), sample_info());
  CHECK(rebuild(out, sample_info(), {"c1", "c2"}).empty());
  CHECK(plugin_report(out, Format::csv) ==
        "role,name,version,sha256,cells\nscorer,my_own,1," + a64 + ",2\ntask,niah,0.1.0," + a64 + ",2\n");
  write_part(out, cell("c2", {task, rebuilt}), sample_info());
  write_part(out, cell("c3", {task}), sample_info());
  CHECK(read_plugins(out).at("c2") == std::vector<PluginRow>{task, rebuilt});
  CHECK(plugin_report(out, Format::csv) == "role,name,version,sha256,cells\nscorer,my_own,1," + a64 +
                                               ",1\nscorer,my_own,1," + b64 + ",1\ntask,niah,0.1.0," + a64 + ",3\n");
}

TEST_CASE("a table of plugins is well-formed in every format, whatever the plugins say of themselves") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  write_part(out, cell("c1", {{"codec", "my_own", "1,\"2\"|\n3", ""}}), sample_info());
  CHECK(plugin_report(out, Format::csv) == "role,name,version,sha256,cells\ncodec,my_own,\"1,\"\"2\"\"|\n3\",,1\n");
  CHECK(plugin_report(out, Format::md) ==
        "1 cell\n\n### plugins\n\n| role | name | version | sha256 | cells |\n|---|---|---|---|---:|\n"
        "| codec | my\\_own | 1,\"2\"\\|\\\\n3 | - | 1 |\n\n");
  CHECK_THAT(
      plugin_report(out, Format::latex),
      Contains("\\begin{tabular}{llllr}") && Contains("codec & my\\_own & 1,\"2\"|\\textbackslash{}n3 & - & 1 \\\\\n"));
  CHECK_THAT(plugin_report(out, Format::table), Contains("role   name    version    sha256  cells\n") &&
                                                    Contains("codec  my_own  1,\"2\"|\\n3  -           1\n"));
}

TEST_CASE("a profile file keeps the plugins that wrote it; one of an earlier version has none") {
  const TemporaryFolder dir;
  ProfileFile profile{"bundled/recall", "0123456789abcdef", {{"head_stats", "{}", {}}}, {}};
  write_profile(dir / "p.h5", sample_info(), profile);
  CHECK(read_profile(dir / "p.h5").plugins.empty());
  CHECK_THAT(plugin_report(dir / "p.h5", Format::table), Contains("warning: the file does not name its plugins"));
  profile.plugins = {{"task", "text", "0.1.0", a64}, {"profiler", "head_stats", "0.1.0", b64}};
  write_profile(dir / "p.h5", sample_info(), profile);
  CHECK(read_profile(dir / "p.h5").plugins == profile.plugins);
  CHECK(plugin_report(dir / "p.h5", Format::csv) ==
        "role,name,version,sha256\ntask,text,0.1.0," + a64 + "\nprofiler,head_stats,0.1.0," + b64 + "\n");
  CHECK_THAT(plugin_report(dir / "p.h5", Format::table), Contains("bundled/recall\n") && !Contains("warning"));
}

TEST_CASE("a result file of an earlier version says that its cells name no plugins") {
  const TemporaryFolder dir;
  write_part(dir / "o.h5", cell("c1", {}), sample_info());
  CHECK_THAT(plugin_report(dir / "o.h5", Format::md),
             Contains("warning: the file does not name the plugins of 1 cell"));
  CHECK_THROWS_AS(plugin_report(dir / "missing.h5", Format::md), kvlab::Error);
}
