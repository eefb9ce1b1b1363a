// Argument checks that the ops share.
#pragma once
#include <kvlab/error.hpp>
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <string>

namespace kvlab::ops {

[[noreturn]] inline void fail(Errc code, const char* op, const std::string& message) {
  throw Error(code, message, std::string("op ") + op);
}

// Of an op that CUDA alone has.
inline void require_cuda_stream(Stream s, const char* op) {
  if (s.device() != Device::cuda)
    fail(Errc::unsupported, op, "got a CPU stream, wanted a CUDA stream: this op has no CPU version");
}

// What the host knows of a cache: rows of a multiple of 8 up to 256 elements, a complete view. Errc::internal or
// unsupported.
void check_view(const PagedKv& kv, const char* op);
// Sane slots and counts; host memory only.
void check_tables(const PagedKv& kv, const char* op);
// Both; with a CUDA stream the view alone.
void check_kv(const PagedKv& kv, const char* op, Stream s = Stream::cpu());

// Every page of this head has a device frame of a fitting layout. Errc::internal.
void check_resident(const PagedKv& kv, int row, int head, const char* op);
// The cache of a view, checked; on the CPU its pages too. Pages of a CUDA stream are not looked at.
const PagedKv& resident_cache(const PagedKv* kv, const char* op, Stream s);
void check_page(const PagedKv& kv, int row, int head, int page, const char* op);

// `scores` [row, heads, >= longest head of each row], contiguous along tokens, heads = kv_heads times a whole group.
// With a CUDA stream lengths are unknown here; kernels stay within the extent.
void check_scores(const PagedKv& kv, const View<const float, 3>& scores, const char* what, const char* op, Stream s);
// The same with exactly the KV heads.
void check_kv_scores(const PagedKv& kv, const View<const float, 3>& scores, const char* what, const char* op, Stream s);

// Index and count of every head; room is looked at row by row.
void check_list(const PagedKv& kv, const IndexList& list, const char* op);

// Longest head over the rows of the call.
int longest(const PagedKv& kv);

// Are there enough tokens for threads to pay?
inline bool worth_threads(std::int64_t elements) { return elements > 16384; }

}  // namespace kvlab::ops
