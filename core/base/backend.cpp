#include "base/backend.hpp"

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <kvlab/error.hpp>
#include <memory>

#include "base/cuda_build.hpp"
#include "base/cuda_warn.hpp"
#include "base/device_op.hpp"
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
    const auto build = reinterpret_cast<CudaBuild>(dlsym(library, "kvlab_cuda_build"));
    if (!build || std::strcmp(build(), KVLAB_CUDA_BUILD) != 0) {
      state = "got " + path + " of another build, wanted that of libkvlab.so: build kvlab again";
      return;
    }
    if (const auto warn_through = reinterpret_cast<cuda::WarnThrough>(dlsym(library, "kvlab_cuda_warn_through")))
      warn_through([](const char* text) { log::warn(text); });
    usable = entry(&table, &state);
  }

  // Sets the path of the library beside libkvlab.so. Returns false, with the reason in state, without a driver or file.
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

// Returns "top_pages" for the key of kvlab::ops::top_pages.
std::string op_of(const char* key) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> whole(abi::__cxa_demangle(key, nullptr, nullptr, &status), std::free);
  const std::string text = whole ? whole.get() : key;  // kvlab::CudaOpKey<&kvlab::ops::top_pages>
  const std::size_t begin = text.rfind(':') + 1;
  return text.substr(begin, text.rfind('>') - begin);
}

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

AnyFunction find_cuda_op(const char* key) {
  const CudaBackend* b = cuda_backend();
  for (const CudaOpEntry* e = b ? b->announced : nullptr; e; e = e->next)
    if (std::strcmp(e->key, key) == 0) {
      if (e->function) return e->function;
      break;
    }
  const std::string who = "op " + op_of(key);
  require_cuda(who.c_str());
  throw Error(Errc::device, "got a CUDA stream, wanted a CPU stream: this op has no CUDA version", who);
}

bool cuda_backend_replaced() { return replacement != nullptr; }

void (*cuda_reach_from_host())(bool) { return replacement ? replacement->reach_from_host : nullptr; }

const std::string& cuda_state() { return loaded().state; }

}  // namespace kvlab
