#include "run/device.hpp"

#include <catch2/catch.hpp>
#include <kvlab/error.hpp>

#include "base/backend.hpp"
#include "base/device_op.hpp"
#include "ops/linear/linear.hpp"

using namespace kvlab;

TEST_CASE("backend: what the words mean on this machine") {
  const CudaBackend* gpu = cuda_backend();
  const Device usual = gpu && ops::cublaslt_state().there ? Device::cuda : Device::cpu;
  CHECK(choose_device("cpu", {DType::bf16}, "x.yaml:1:1") == Device::cpu);
  CHECK(choose_device("auto", {DType::bf16}, "x.yaml:1:1") == usual);
  CHECK(choose_device("auto", {DType::bf16, DType::f32}, "x.yaml:1:1") == Device::cpu);
  Experiment e;
  e.models.resize(1);
  CHECK(with_backend(e).backend == (usual == Device::cuda ? "cuda" : "cpu"));
  CHECK(device_of(with_backend(e)) == usual);
  e.backend = "cuda";
  e.backend_where = "x.yaml:7:10";
  if (cuda_backend()) return;
  try {
    with_backend(e);
    FAIL("not refused");
  } catch (const Error& error) {
    CHECK(error.code() == Errc::device);
    CHECK(error.where() == "x.yaml:7:10");
    CHECK_THAT(error.what(), Catch::Contains("wanted a usable GPU"));
  }
}

TEST_CASE("backend: a GPU without cuBLASLt is refused, and auto goes past it") {
  CudaBackend gpu;
  const OnCuda<ops::cublaslt_state> no_blas(
      []() -> const LibraryState& {
        static const LibraryState missing{false, false, "not found: libsome.so (KVLAB_CUBLASLT=PATH names another)"};
        return missing;
      },
      gpu.announced);
  replace_cuda_backend(&gpu);
  CHECK(choose_device("auto", {DType::bf16}, "x.yaml:1:1") == Device::cpu);
  try {
    choose_device("cuda", {DType::bf16}, "x.yaml:7:10");
    FAIL("not refused");
  } catch (const Error& error) {
    CHECK(error.code() == Errc::device);
    CHECK(error.where() == "x.yaml:7:10");
    CHECK_THAT(error.what(), Catch::Contains("libsome.so") && Catch::Contains("KVLAB_CUBLASLT=PATH"));
  }
  replace_cuda_backend(nullptr);
}
