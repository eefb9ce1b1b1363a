// Declarations that the CUDA kernels of a prompt's attention share.
#pragma once
#include "ops/attend/attend_prompt.hpp"

namespace kvlab::ops {

// Log-sum-exp of a token's scores, natural. The one of token t and query head h is data[t * row + h * head].
struct PromptLse {
  const float* data = nullptr;
  std::int64_t row = 0, head = 0;
};

// A chunk's queries [token, query head, head_dim] and all its keys [kv_head, room, head_dim], dense, of the pages'
// dtype, in scratch that the stream keeps. Keys after the last token are zeros.
struct PromptRows {
  const void *queries = nullptr, *keys = nullptr;
  int room = 0;
};

// Copies rows out of pages. values and lengths may be null; lengths [2, kv_head] gets the chunk's tokens and all
// tokens.
// `from`: the place of their first row; `room` rows from there on. lengths wants 0.
void gather_prompt(const PagedKv& kv, int room, void* keys, void* values, std::int32_t* lengths, Stream s,
                   int from = 0);
// Returns rounded_queries, or rounds the queries: [room, query head, head_dim], rows after the last one undefined.
const void* rounded_queries(const PromptArgs& a, int room, Stream s);

// Computes the outputs with cuDNN, and *lse unless null, in scratch that the stream keeps. False if cuDNN is missing,
// refuses or does not pay; the outputs are then undefined. Takes the shapes of attend_prompt. rows: what it gathered.
bool attend_prompt_cudnn(const PromptArgs& a, float scale, PromptLse* lse, PromptRows& rows, Stream s);

// sums of PromptArgs. rows: what is gathered already; without keys it gathers them. scale: of the scores, times
// log2(e). False for a head_dim other than 64 and 128, for heads of queries that lie apart, and without memory for the
// rows.
bool attend_prompt_sums(const PromptArgs& a, PromptRows rows, const PromptLse& lse, float scale, Stream s);

// What a prompt's queries give the tokens near them.
struct NearSums {
  PagedKv kv;                    // one row, all of whose KV heads hold `seen` + the queries - 1 tokens in text order
  View<const float, 3> queries;  // [token, query head, head_dim]
  PromptLse lse;
  int seen = 0;         // tokens that the first query sees
  int window = 0;       // newest tokens that a query gives something, its own included
  View<float, 2> sums;  // [query head, place], added to
};
// False and nothing done for rows of codes or f32, keys that are rotated on reading, a head_dim other than 64 and 128,
// heads of queries that lie apart, and without memory.
bool attend_prompt_near(const NearSums& a, Stream s);

}  // namespace kvlab::ops
