// A policy that is another one, but for what a subclass changes.
#pragma once
#include <kvlab/policy.hpp>
#include <kvlab/prompt_lists.hpp>

#include <memory>
#include <utility>

#include "plugin/before_step.hpp"
#include "plugin/edits_author.hpp"
#include "plugin/in_prompts.hpp"
#include "plugin/no_pruner.hpp"
#include "plugin/offloads.hpp"

namespace kvlab {

class ForwardingPolicy : public Policy,
                         public EditsAuthor,
                         public BeforeStep,
                         public Offloads,
                         public ChoosesInPrompts,
                         public TakesNoPruner {
 public:
  explicit ForwardingPolicy(std::shared_ptr<Policy> inner) : inner_(std::move(inner)) {}

  std::string author() const override { return author_of(*inner_); }
  const char* takes_no_pruner() const override { return says_no_pruner(*inner_); }
  bool offloads() const override { return kvlab::offloads(*inner_); }
  Needs needs() const override { return inner_->needs(); }
  Demand demand(int prompt_tokens, int max_new) const override { return inner_->demand(prompt_tokens, max_new); }
  std::vector<CodecSpec> codecs() const override { return inner_->codecs(); }
  CodecSpec host_codec() const override { return inner_->host_codec(); }
  void load_profile(const Profile& profile) override { inner_->load_profile(profile); }
  void attach(const Shape& shape, const BudgetAmount& b, Workspace& w) override { inner_->attach(shape, b, w); }
  std::vector<PromptMask> prompt_masks() const override { return inner_->prompt_masks(); }
  void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override { inner_->prefill(kv, edits, s); }
  void finish_prompt(const LayerKv& kv, Edits& edits, Stream s) override { inner_->finish_prompt(kv, edits, s); }
  void select(const LayerStep& step, Edits& edits, Stream s) override { inner_->select(step, edits, s); }
  void observe(const LayerStep& step, Edits& edits, Stream s) override { inner_->observe(step, edits, s); }
  void finish_step(const Step& step, Edits& edits, Stream s) override { inner_->finish_step(step, edits, s); }
  int before_step(const StepCounters& c) override { return tell_before_step(inner_.get(), c); }
  int prompt_chunk() const override { return kvlab::prompt_chunk(*inner_); }
  void select_chunk(const LayerPrefill& kv, Edits& edits, Stream s) override {
    dynamic_cast<ChoosesInPrompts&>(*inner_).select_chunk(kv, edits, s);
  }
  void release(int slot) override { inner_->release(slot); }

 protected:
  Policy& inner() const { return *inner_; }

 private:
  std::shared_ptr<Policy> inner_;
};

}  // namespace kvlab
