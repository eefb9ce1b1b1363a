// Replaces what selectors and policies choose: `inject` of an experiment, for models whose attention means nothing.
#pragma once
#include <kvlab/policy.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/stream_memory.hpp"
#include "ops/score/turned.hpp"
#include "ops/select/drifted.hpp"
#include "ops/select/inject.hpp"
#include "plugin/loader.hpp"

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
  int model_layers = 0, page_size = 0;  // of the recorded cell; 0 = its file does not say
  std::vector<std::int64_t> begin;
  std::vector<std::int32_t> page;
};

struct Injection {
  std::optional<std::int32_t> overlap;            // millionths
  std::optional<std::int32_t> rerank_overlap;     // beside it, of lists whose head paused; of policies only
  std::shared_ptr<const RecordedTrace> recorded;  // in place of an overlap
  std::vector<std::int32_t> follows;              // [LayerKv::question] the recorded question that it follows
  std::optional<std::int32_t> correction;         // millionths of the heads; of policies only
  std::optional<std::int32_t> drift;  // millionths of the leaders that a check finds drifted; of policies only
  std::uint64_t seed = 0;
  std::string where;  // in the experiment

  bool lists() const { return overlap || recorded; }
};

class Injector {
 public:
  // Takes state from the workspace.
  Injector(Injection injection, const Shape& shape, Workspace& w);
  // Stores the numbers of the rows' sequences, and the record on the device.
  void begin(const LayerPrefill& kv, Stream s);
  void replace(const LayerStep& step, const PageList& list, const Pins& pins, Stream s);

  // For a layer's ops, but for the cache, list, pins and heads.
  ops::InjectArgs lists(const LayerKv& kv) const;
  ops::InjectedTurns turns(const LayerKv& kv) const;
  ops::InjectedDrift drift(const LayerKv& kv) const;

 private:
  void upload(Stream s);

  Injection injection_;
  Shape shape_;
  std::uint32_t* state_ = nullptr;  // [slot, layer, kv_head, words]
  std::int64_t words_;
  std::uint32_t* calls_ = nullptr;             // [slot, layer]
  std::uint32_t* sequence_;                    // [slot]
  StreamMemory first_, steps_, begin_, page_;  // the arrays of recorded_
  ops::RecordedPages recorded_;
};

// The policy with an injection into ops::score_pages, ops::turned_heads and ops::drifted_by_logits. A recorded list
// replaces a decode step's choice, not that of a prompt. A decode step throws Errc::config if the policy has called
// none of the ops by then. It warns of keys whose op the policy has not called.
std::unique_ptr<Policy> injected(std::shared_ptr<Policy> policy, const std::string& name, Injection injection);

}  // namespace kvlab
