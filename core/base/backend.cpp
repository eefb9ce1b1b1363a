#include "base/backend.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <kvlab/error.hpp>
#include <mutex>

#include "base/cuda_warn.hpp"
#include "base/log.hpp"

namespace kvlab {
namespace {

struct Loaded {
  CudaBackend table;
  bool usable = false;
  std::string state;

  Loaded() {
    std::string path;
    if (const char* chosen = std::getenv("KVLAB_CUDA_LIBRARY"); chosen && *chosen) {
      path = chosen;
    } else if (!find_beside_us(path)) {
      return;
    }
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      state = "the CUDA part of kvlab does not load: " + std::string(dlerror());
      return;
    }
    const auto entry = reinterpret_cast<CudaEntry>(dlsym(library, "kvlab_cuda_backend"));
    if (!entry) {
      state = path + " has no entry kvlab_cuda_backend: build kvlab again";
      return;
    }
    if (const auto warn_through = reinterpret_cast<cuda::WarnThrough>(dlsym(library, "kvlab_cuda_warn_through")))
      warn_through([](const char* text) { log::warn(text); });
    usable = entry(&table, &state);
    if (usable && table.table_version != CudaBackend::version) {
      usable = false;
      state = "got " + path + " of table version " + std::to_string(table.table_version) + ", wanted " +
              std::to_string(CudaBackend::version) + ": build kvlab again";
    }
  }

  // The library beside libkvlab.so, where there is a driver: without one it need not even be looked for.
  bool find_beside_us(std::string& path) {
    if (!dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL)) {
      state = "no CUDA driver found";
      return false;
    }
    Dl_info self;
    if (!dladdr(reinterpret_cast<void*>(&cuda_backend), &self)) {
      state = "the path of libkvlab.so could not be found";
      return false;
    }
    path = (std::filesystem::path(self.dli_fname).parent_path() / "libkvlab_cuda.so").string();
    if (std::error_code ec; !std::filesystem::exists(path, ec)) {
      state = "a CUDA driver is there, but kvlab was built without nvcc (no " + path + ")";
      return false;
    }
    return true;
  }
};

const Loaded& loaded() {
  static const Loaded once;
  return once;
}

const CudaBackend* replacement = nullptr;

}  // namespace

void replace_cuda_backend(const CudaBackend* table) { replacement = table; }

const CudaBackend* cuda_backend() {
  if (replacement) return replacement;
  return loaded().usable ? &loaded().table : nullptr;
}

const CudaBackend& require_cuda(const char* who) {
  if (replacement) return *replacement;
  if (!loaded().usable) throw Error(Errc::device, "got backend cuda, wanted a usable GPU: " + loaded().state, who);
  return loaded().table;
}

const CudaBackend& require_cuda_for_models(const char* who) {
  const CudaBackend& b = require_cuda(who);
  if (const LibraryState& blas = b.ops.cublaslt_state(); !blas.there)
    throw Error(Errc::device, "got backend cuda without cuBLASLt, wanted it for models' products: " + blas.text, who);
  return b;
}

const std::string& cuda_state() { return loaded().state; }

}  // namespace kvlab
