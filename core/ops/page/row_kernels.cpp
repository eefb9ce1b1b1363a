#include "ops/page/row_kernels.hpp"

#include <kvlab/error.hpp>

#include <cstdlib>
#include <string>

#include "base/cpu.hpp"

namespace kvlab::ops {

namespace {

// KVLAB_ROWS names the widest instructions, for comparisons.
const RowKernels& chosen() {
  const RowKernels* const wide = has_avx512_bf16() ? row_kernels_avx512() : nullptr;
  const RowKernels* const narrow = has_avx2() ? row_kernels_avx2() : nullptr;
  const char* value = std::getenv("KVLAB_ROWS");
  const std::string word = value ? value : "";
  if (word == "portable") return row_kernels_portable();
  if (!word.empty() && word != "avx2" && word != "avx512")
    throw Error(Errc::config, "got KVLAB_ROWS=" + word + ", wanted avx512, avx2 or portable");
  if ((word == "avx512" && !wide) || (word == "avx2" && !narrow))
    throw Error(Errc::unsupported, "got KVLAB_ROWS=" + word + ", wanted kernels that this CPU has");
  if (wide && word != "avx2") return *wide;
  return narrow ? *narrow : row_kernels_portable();
}

}  // namespace

const RowKernels& row_kernels() {
  static const RowKernels& best = chosen();
  return best;
}

}  // namespace kvlab::ops
