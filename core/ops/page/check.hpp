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

// Refuses a CPU stream for ops that have no CPU version. Errc::unsupported.
inline void require_cuda_stream(Stream s, const char* op) {
  if (s.device() != Device::cuda)
    fail(Errc::unsupported, op, "got a CPU stream, wanted a CUDA stream: this op has no CPU version");
}

// Checks the members of the view itself: head_dim is a multiple of 8 up to 256 and no pointer is missing.
// Errc::internal or unsupported.
void check_view(const PagedKv& kv, const char* op);
// Checks slots and token counts, which it reads from host memory. Errc::internal.
void check_tables(const PagedKv& kv, const char* op);
// Calls check_view. For a CPU stream it calls check_tables too and refuses f16.
void check_kv(const PagedKv& kv, const char* op, Stream s = Stream::cpu());

// Checks that every page of this head has a device frame and the cache's page size and head_dim. Errc::internal.
void check_resident(const PagedKv& kv, int row, int head, const char* op);
// Returns *kv after check_kv. For a CPU stream it also checks every page of these heads, as check_resident does.
const PagedKv& resident_cache(const PagedKv* kv, const char* op, Stream s, const Heads& heads = {});
// The same for the column's cache, whose pages must have that column. What waits for the column is written to it first.
const PagedKv& checked_column(const StateColumn& column, const char* op, Stream s, const Heads& heads = {});
void check_page(const PagedKv& kv, int row, int head, int page, const char* op);

// Checks `scores` [row, heads, >= longest head of each row], contiguous along tokens; heads is a multiple of kv_heads.
// With a CUDA stream the host does not know the lengths; kernels stay within the extent.
void check_scores(const PagedKv& kv, const View<const float, 3>& scores, const char* what, const char* op, Stream s);
// Calls check_scores and wants exactly kv_heads heads.
void check_kv_scores(const PagedKv& kv, const View<const float, 3>& scores, const char* what, const char* op, Stream s);

// Checks that index and count have every row and KV head, and clears what is noted of the list. The ops check the room
// of each row.
void check_list(const PagedKv& kv, const IndexList& list, const char* op);

// Tokens of the longest head in the rows of the call.
int longest(const PagedKv& kv);

// Checks that a list has room for every token of the longest head. Lengths are host memory.
void check_room(const PagedKv& kv, const TokenList& list, const char* op);

// True if there are enough elements for threads to pay.
inline bool worth_threads(std::int64_t elements) { return elements > 16384; }

}  // namespace kvlab::ops
