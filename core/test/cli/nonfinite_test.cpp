// The command line meets numbers that are not finite. It says where they began and exits with a failure's code.
#include <catch2/catch.hpp>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "support/child.hpp"
#include "support/golden.hpp"

using namespace kvlab;
using Catch::Contains;
using test::Ended;
using test::Folder;

namespace {

// A float32 copy of the tiny model in which every number of one tensor is `value`.
std::string model_with(const Folder& folder, const std::string& tensor, float value) {
  const std::string copy = folder / "model";
  std::filesystem::copy(test::golden("tiny/llama-gqa3"), copy, std::filesystem::copy_options::recursive);
  std::fstream file(copy + "/model.safetensors", std::ios::binary | std::ios::in | std::ios::out);
  std::uint64_t header = 0;
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  std::string text(header, ' ');
  file.read(text.data(), static_cast<std::streamsize>(header));
  const auto entry = nlohmann::json::parse(text).at(tensor);
  REQUIRE(entry.at("dtype") == "F32");
  const std::uint64_t begin = entry.at("data_offsets")[0], end = entry.at("data_offsets")[1];
  file.seekp(static_cast<std::streamoff>(sizeof header + header + begin));
  for (std::uint64_t at = begin; at < end; at += sizeof value)
    file.write(reinterpret_cast<const char*>(&value), sizeof value);
  return copy;
}

// Large finite numbers in this tensor make products overflow.
const char* const keys = "model.layers.1.self_attn.k_proj.weight";

}  // namespace

TEST_CASE("generate: numbers that are not finite end it with 1 and the layer and token where they began") {
  const Folder folder;
  const Ended ended = test::run_kvlab({"generate", "Count.", "--raw", "--dtype", "f32", "--backend", "cpu", "--model",
                                       model_with(folder, keys, 3e38f)});
  INFO(ended.said);
  CHECK(ended.code == 1);
  CHECK_THAT(ended.said,
             Contains("token ") && Contains("(of the prompt)") && Contains(" of the keys") && Contains("in layer 1"));
}

TEST_CASE("generate: weights that are not finite are refused with 2") {
  const Folder folder;
  const Ended ended = test::run_kvlab({"generate", "Count.", "--raw", "--dtype", "f32", "--backend", "cpu", "--model",
                                       model_with(folder, keys, std::numeric_limits<float>::infinity())});
  INFO(ended.said);
  CHECK(ended.code == 2);
  CHECK_THAT(ended.said, Contains(keys));
}

TEST_CASE("profile: numbers that are not finite end it with 1 and the layer and token where they began") {
  const Folder folder;
  const std::string file = folder.write("p.yaml", "model: {path: " + model_with(folder, keys, 3e38f) +
                                                      ", dtype: f32}\n"
                                                      "tasks: [text: {prefix: 40, forced: 8, samples: 2}]\n"
                                                      "profilers: [head_stats: {top_pages: 2, apart: 2}]\n"
                                                      "backend: cpu\nthreads: 1\n");
  const Ended ended = test::run_kvlab({"profile", file, "-o", folder / "p.h5"});
  INFO(ended.said);
  CHECK(ended.code == 1);
  CHECK_THAT(ended.said, Contains("sample 0, token ") && Contains("(of the prompt)") && Contains(" of the keys") &&
                             Contains("in layer 1") && Contains("nothing is written"));
  CHECK(!std::filesystem::exists(folder / "p.h5"));
  CHECK(folder.files("", ".tmp") == 0);
}
