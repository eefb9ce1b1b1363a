// Functions that move tokens in and out of pages of any codec. The store and the other ops call them.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <vector>

namespace kvlab::ops {

// The bit of *PagedKv::error for a page that an op must read and that has no frame.
inline constexpr std::int32_t page_absent = 128;

// Offsets and size in bytes of a frame for one codec; segments are aligned to 64 bytes. It takes f32, bf16 or f16, bits
// 0, 2, 4 or 8, and head_dim a multiple of 8 up to 256; with 2 bits, a multiple of 16. Errc::unsupported for others.
PageLayout make_layout(DType dtype, CodecSpec codec, int page_size, int head_dim, int state_columns);

// Encodes one token: k and v are f32 [head_dim] and go to the frame's place `offset`. It sets the token's position and
// zeroes its state columns. CodecSide says how codes come about. A codec of axis channel is Errc::internal.
void write_token(std::byte* frame, const PageLayout& l, int offset, const float* k, const float* v,
                 std::int32_t position);
// The same for `count` tokens at the places from `offset` on, with text positions from `position` on. stride: floats
// from a token's k and v to the next one's.
void write_tokens(std::byte* frame, const PageLayout& l, int offset, int count, const float* k, const float* v,
                  std::int64_t stride, std::int32_t position);
// The same of bf16 bits [token, head_dim], for pages that hold bf16 numbers and no codes.
void write_tokens(std::byte* frame, const PageLayout& l, int offset, int count, const std::uint16_t* k,
                  const std::uint16_t* v, std::int32_t position);

// Encodes the key or value x, f32 [head_dim], alone, as write_token does. Returns whether a stored byte changed.
bool write_row(std::byte* frame, const PageLayout& l, KvSide side, int offset, const float* x);

// Decodes one key or value to f32 [head_dim] as stored, without rotation.
void read_row(const std::byte* frame, const PageLayout& l, KvSide side, int offset, float* out);

// Copies a whole token (K, V, metadata, position, state). Where the layouts' codecs differ, codes become codes of fewer
// bits by code_ratio, and other numbers are decoded and encoded again.
void copy_token(const std::byte* from, const PageLayout& lf, int offset_from, std::byte* to, const PageLayout& lt,
                int offset_to);

// Copies a full page between layouts of one page_size. A side of axis channel is encoded anew; other sides are copied
// as copy_token does.
void copy_page(const std::byte* from, const PageLayout& lf, std::byte* to, const PageLayout& lt);

// Writes the summary of one page's first `tokens` >= 1 keys, as stored, to out (Summaries' element layout).
void summarize_page(const std::byte* frame, const PageLayout& l, int tokens, Summary kind, DType dtype, std::byte* out,
                    int bits = 16);

// Decodes one head's tokens [0, tokens) to out, f32 [tokens, head_dim]. In the cache_relative regime it rotates keys by
// rank.
void gather_rows(const PagedKv& kv, int row, int head, KvSide side, int tokens, float* out);

// rank[t] = number of resident tokens with a smaller text position than token t.
void token_ranks(const PagedKv& kv, int row, int head, int tokens, std::int32_t* rank);

// positions[t] of one head's tokens [0, tokens).
void token_positions(const PagedKv& kv, int row, int head, int tokens, std::int32_t* positions);

// Rotates x [head_dim] by `position` (half-split pairs i, i + D/2) and scales it by attention_scale. Angles are double,
// so that far positions stay exact.
void rotate(float* x, const RopeTable& rope, double position);

// Rotates x [head_dim] with the tables of rope_angles, which many heads of one token share.
void rotate_with(float* x, const float* cos, const float* sin, int head_dim);
void rope_angles(const RopeTable& rope, double position, float* cos,
                 float* sin);  // [head_dim / 2] each, times the scale

// Rotates the keys of one head's tokens [0, tokens) in place by delta[t] places (re_rotate regime). The keys already
// carry attention_scale, so it does not apply it again.
void re_rotate(const PagedKv& kv, int row, int head, int tokens, const std::int32_t* delta);

}  // namespace kvlab::ops
