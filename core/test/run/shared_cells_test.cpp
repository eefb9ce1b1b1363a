// What several processes share beside an output.
#include "run/shared_cells.hpp"

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>

#include "run/gpus.hpp"
#include "support/temporary_folder.hpp"

using namespace kvlab;
namespace fs = std::filesystem;

TEST_CASE("what workers needed beside the parts goes, the rest stays") {
  const test::TemporaryFolder folder;
  const std::string parts = folder / "out.h5.parts";
  fs::create_directories(parts + "/gpus");
  std::ofstream(parts + "/gpus/0123.claim");  // its owner was killed
  for (const char* name : {"old_parts", "mpi.sh", "slurm.sh", "slurm.job", "a.h5", "slurm-12_0.log"})
    std::ofstream(parts + "/" + name) << "text";
  const SharedCells shared(folder / "out.h5", false, {"a"});
  {
    const Claim held = claim_gpu("4567", parts);
    shared.tidy();
    CHECK(fs::exists(parts + "/gpus/4567.claim"));
  }
  shared.tidy();
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(parts)) left.push_back(entry.path().filename().string());
  std::sort(left.begin(), left.end());
  CHECK(left == std::vector<std::string>{"a.h5", "slurm-12_0.log"});
  fs::remove(parts + "/a.h5"), fs::remove(parts + "/slurm-12_0.log");
  shared.tidy();
  CHECK_FALSE(fs::exists(parts));
}
