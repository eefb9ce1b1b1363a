#include "ops/linear/onednn.hpp"

#include <dlfcn.h>

#include <filesystem>

namespace kvlab::ops::gemm {
namespace {

struct Loaded {
  OneDnn table;
  bool there = false;

  Loaded() {
    Dl_info self;
    if (!dladdr(reinterpret_cast<void*>(&onednn), &self)) return;
    const auto path = std::filesystem::path(self.dli_fname).parent_path() / "libkvlab_onednn.so";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    const auto entry = reinterpret_cast<void (*)(OneDnn*)>(dlsym(library, "kvlab_onednn"));
    if (!entry) return;
    entry(&table);
    there = true;
  }
};

}  // namespace

const OneDnn* onednn() {
  static const Loaded once;
  return once.there ? &once.table : nullptr;
}

}  // namespace kvlab::ops::gemm
