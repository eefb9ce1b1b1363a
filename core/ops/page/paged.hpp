// Moving tokens in and out of pages, whatever their codec. Used by the store and by the other ops.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <vector>

namespace kvlab::ops {

// Offsets and size of a frame for one codec (segments aligned to 64 bytes). f32 or bf16, bits 0 or 8, head_dim a
// multiple of 8 up to 256; else Errc::unsupported.
PageLayout make_layout(DType dtype, CodecSpec codec, int page_size, int head_dim, int state_columns);

// Encode one token: k, v f32 [head_dim] into the frame's place `offset`; sets its position and zeroes its state
// columns. 8 bits: code = round_half_even((x - zero) / scale), saturated, with the f16 scale and zero that are stored.
void write_token(std::byte* frame, const PageLayout& l, int offset, const float* k, const float* v,
                 std::int32_t position);

// Decode one key or value to f32 [head_dim], as stored (no rotation).
void read_row(const std::byte* frame, const PageLayout& l, KvSide side, int offset, float* out);

// Copy a whole token (K, V, metadata, position, state), re-encoding when the layouts' codecs differ.
void copy_token(const std::byte* from, const PageLayout& lf, int offset_from, std::byte* to, const PageLayout& lt,
                int offset_to);

// Summary of one page's first `tokens` >= 1 keys into out (Summaries' element layout). Keys as stored; bf16 bounds are
// rounded outwards, so that they stay bounds.
void summarize_page(const std::byte* frame, const PageLayout& l, int tokens, Summary kind, DType dtype, std::byte* out);

// out [tokens, head_dim] f32 of one head's tokens [0, tokens), rotated by rank where the regime asks for it
// (cache_relative).
void gather_rows(const PagedKv& kv, int row, int head, KvSide side, int tokens, float* out);

// rank[t] = number of resident tokens with a smaller text position than token t.
void token_ranks(const PagedKv& kv, int row, int head, int tokens, std::int32_t* rank);

// positions[t] of one head's tokens [0, tokens).
void token_positions(const PagedKv& kv, int row, int head, int tokens, std::int32_t* positions);

// Rotate x [head_dim] by `position` (half-split pairs i, i + D/2) and scale it by attention_scale; angles in double so
// that far positions stay exact.
void rotate(float* x, const RopeTable& rope, double position);

// x [rows, row stride] with cos and sin tables: the fast form used by the executor on many heads of one token.
void rotate_with(float* x, const float* cos, const float* sin, int head_dim);
void rope_angles(const RopeTable& rope, double position, float* cos,
                 float* sin);  // [head_dim / 2] each, times the scale

// Rotate the keys of tokens [0, tokens) of one head by delta[t] places (re_rotate regime), in place and without
// attention_scale, which they already carry.
void re_rotate(const PagedKv& kv, int row, int head, int tokens, const std::int32_t* delta);

}  // namespace kvlab::ops
