// Checks a linear layer's arguments and chooses between linear_stream and linear_blas.
#include <algorithm>
#include <string>

#include "base/scratch.cuh"
#include "ops/linear/linear.cuh"

namespace kvlab::ops {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(Errc::unsupported, message, "op linear (CUDA)"); }

bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

void check(const LinearArgs& a) {
  const bool gated = a.gated != nullptr;
  if (a.dtype != DType::bf16 && a.dtype != DType::f16)
    refuse(std::string("got weights of ") + name_of(a.dtype) + ", wanted bf16 or f16");
  if (a.x_dtype != DType::f32 && a.x_dtype != a.dtype)
    refuse(std::string("got activations of ") + name_of(a.x_dtype) + " for weights of " + name_of(a.dtype) +
           ", wanted f32 or the weights' type");
  if (a.n < 1 || a.k < 8 || a.k % 8 || a.x_stride < a.k || a.x_stride % 8 || a.n > 0x7fffff00 || a.k > 0x7fffff00)
    refuse("got a " + std::to_string(a.n) + " x " + std::to_string(a.k) + " matrix and rows " +
           std::to_string(a.x_stride) + " apart, wanted multiples of 8 for the columns and the distance");
  if (a.weight_stride && (a.weight_stride < a.k || a.weight_stride % 8 || a.left.weight || a.taken.squares))
    refuse("got a matrix of " + std::to_string(a.k) + " columns with rows " + std::to_string(a.weight_stride) +
           " apart, wanted a multiple of 8 of at least the columns, and no norm");
  if (!aligned(a.weight) || !aligned(a.x)) refuse("got weights or activations off a multiple of 16 bytes");
  if (gated ? a.n % 2 || a.gated_stride < a.n / 2 || a.bias || a.y || a.add : !a.y || a.y_stride < a.n)
    refuse("got outputs that are neither y [m, " + std::to_string(a.n) + "] nor the gated half of it alone");
  if (!a.left.weight && !a.taken.squares) return;
  if (a.m > linear_stream_rows || a.dtype != DType::bf16)
    refuse("got " + std::to_string(a.m) + " rows of " + name_of(a.dtype) + " with a norm, wanted up to " +
           std::to_string(linear_stream_rows) + " of bf16");
  if (!aligned(a.left.squares) || !aligned(a.taken.squares)) refuse("got sums of squares off a multiple of 16 bytes");
  if (a.taken.squares && (a.k % (4 * norm_piece) || a.x_dtype != a.dtype))
    refuse("got a norm of " + std::to_string(a.k) + " elements of " + name_of(a.x_dtype) +
           ", wanted a multiple of 64 of bf16");
  if (a.left.weight && (gated || a.n % (4 * norm_piece) || a.left.out_stride < a.n || !a.left.out || !a.left.squares))
    refuse("got a norm of " + std::to_string(a.n) + " outputs, wanted one of y, of a multiple of 64, with room for it");
}

std::byte* advance(void* p, std::int64_t elements, DType t) {
  return static_cast<std::byte*>(p) + elements * static_cast<std::int64_t>(size_of(t));
}

}  // namespace

static void linear_cuda(const LinearArgs& in, Stream s) {
  check(in);
  constexpr std::int64_t most_rows = 4096;  // rows of one product; it bounds scratch
  for (std::int64_t begin = 0; begin < in.m; begin += most_rows) {
    LinearArgs a = in;
    a.m = std::min(most_rows, in.m - begin);
    a.x = advance(const_cast<void*>(in.x), begin * in.x_stride, in.x_dtype);
    if (in.y) a.y = in.y + begin * in.y_stride;
    if (in.gated) a.gated = advance(in.gated, begin * in.gated_stride, in.dtype);
    if (a.x_dtype == DType::f32) {
      NormArgs round;
      round.x = static_cast<const float*>(a.x);
      round.rows = a.m, round.n = a.k, round.x_stride = a.x_stride;
      round.dtype = a.dtype;
      round.out = cuda::fixed_scratch(s.handle(), "linear x", static_cast<std::size_t>(a.m * a.k * 2));
      round.out_stride = a.k;
      rms_norm_cuda(round, s);
      a.x = round.out, a.x_dtype = a.dtype, a.x_stride = a.k;
    }
    in.m <= linear_stream_rows && !in.weight_stride ? linear_stream_cuda(a, s) : linear_blas_cuda(a, s);
  }
}
KVLAB_ON_CUDA(linear, linear_cuda);

}  // namespace kvlab::ops
