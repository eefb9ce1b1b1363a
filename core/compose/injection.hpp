// Replaces a selector's page lists: `inject` of an experiment, for models whose attention means nothing.
#pragma once
#include <kvlab/policy.hpp>

#include <memory>
#include <vector>

#include "base/stream_memory.hpp"
#include "ops/select/inject.hpp"

namespace kvlab {

// Page lists of a traced cell in host memory, in the layout of ops::RecordedPages. All pages are below `pages`.
struct RecordedTrace {
  struct Question {
    int sample = 0, question = 0;  // index in the task; index in that sample
    bool follows = false;          // a turn
    std::int32_t first = 0, steps = 0;
  };
  std::vector<Question> questions;  // ascending (sample, question)
  std::vector<int> layers;          // with lists, ascending
  int heads = 0, pages = 0;
  std::vector<std::int64_t> begin;
  std::vector<std::int32_t> page;
};

struct Injection {
  std::int32_t overlap = 0;  // millionths
  std::uint64_t seed = 0;
  std::shared_ptr<const RecordedTrace> recorded;  // null = by overlap
  std::vector<std::int32_t> follows;              // [LayerKv::question] the recorded question that it follows
};

class Injector {
 public:
  // Takes state from the workspace.
  Injector(Injection injection, const Shape& shape, Workspace& w);
  void begin(const LayerPrefill& kv, Stream s);  // stores the numbers of the rows' sequences
  void replace(const LayerStep& step, const PageList& list, const Pins& pins, Stream s);

 private:
  void upload(Stream s);

  Injection injection_;
  Shape shape_;
  std::uint32_t* state_;  // [slot, layer, kv_head, words]
  std::int64_t words_;
  std::uint32_t* sequence_;                    // [slot]
  StreamMemory first_, steps_, begin_, page_;  // the arrays of recorded_
  ops::RecordedPages recorded_;
};

}  // namespace kvlab
