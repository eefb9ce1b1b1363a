#include "base/backend.hpp"

#include <dlfcn.h>

#include <filesystem>
#include <kvlab/error.hpp>
#include <mutex>

namespace kvlab {
namespace {

struct Loaded {
  CudaBackend table;
  bool usable = false;
  std::string state;

  Loaded() {
    // Without a driver the library need not even be looked for.
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!driver) {
      state = "no CUDA driver found";
      return;
    }
    Dl_info self;
    if (!dladdr(reinterpret_cast<void*>(&cuda_backend), &self)) {
      state = "the path of libkvlab.so could not be found";
      return;
    }
    const auto path = std::filesystem::path(self.dli_fname).parent_path() / "libkvlab_cuda.so";
    if (std::error_code ec; !std::filesystem::exists(path, ec)) {
      state = "a CUDA driver is there, but kvlab was built without nvcc (no " + path.string() + ")";
      return;
    }
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      state = std::string("a CUDA driver is there, but libkvlab_cuda.so does not load: ") + dlerror();
      return;
    }
    const auto entry = reinterpret_cast<CudaEntry>(dlsym(library, "kvlab_cuda_backend"));
    if (!entry) {
      state = "libkvlab_cuda.so has no entry kvlab_cuda_backend: build kvlab again";
      return;
    }
    usable = entry(&table, &state);
    if (usable && table.table_version != CudaBackend::version) {
      usable = false;
      state = "got libkvlab_cuda.so of table version " + std::to_string(table.table_version) + ", wanted " +
              std::to_string(CudaBackend::version) + ": build kvlab again";
    }
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
  if (!loaded().usable) throw Error(Errc::device, "got a CUDA request, wanted a usable GPU: " + loaded().state, who);
  return loaded().table;
}

const std::string& cuda_state() { return loaded().state; }

}  // namespace kvlab
