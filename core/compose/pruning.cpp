#include "compose/pruning.hpp"

#include <kvlab/error.hpp>
#include <kvlab/ops.hpp>

#include <utility>

#include "compose/forwarding.hpp"
#include "compose/repeat.hpp"
#include "compose/second_stage.hpp"
#include "plugin/no_pruner.hpp"

namespace kvlab {
namespace {

// Why tokens do not keep their places and keys under an edit; null = they do.
const char* disturbance(const Edit& e, bool encodes) {
  switch (e.verb) {
    case Edit::evict:
    case Edit::evict_rest:
    case Edit::evict_surplus: return "evicts tokens";
    case Edit::move: return "moves tokens";
    case Edit::store_as: return "moves tokens to pages of another codec";
    case Edit::encode: return encodes ? nullptr : "moves pages to another codec";
    case Edit::archive:
    case Edit::fetch: return "fetches tokens to the places of others";
    case Edit::rewrite: return "rewrites keys or values";
    case Edit::attend:
    case Edit::attend_tokens:
    case Edit::offload:
    case Edit::drop:
    case Edit::recall:
    case Edit::place: return nullptr;
  }
  return nullptr;
}

class PrunedPolicy final : public ForwardingPolicy {
 public:
  PrunedPolicy(std::shared_ptr<Policy> first, Instance<Pruner> pruner, Pruning how)
      : ForwardingPolicy(std::move(first)), pruner_(std::move(pruner)), how_(std::move(how)) {
    dense_layers_ = pruner_->needs().dense_layers();
    if (const char* why = kvlab::takes_no_pruner(inner(), how_.encodes)) refuse(why);
    needs();  // refuses those of a pruner that no second stage has
  }

  std::string author() const override { return pruned_ ? author_of(*pruner_) : ForwardingPolicy::author(); }
  Needs needs() const override { return with_second_stage(inner().needs(), pruner_->needs(), Role::pruner, how_.name); }
  void attach(const Shape& shape, const BudgetAmount& budget, Workspace& w) override {
    inner().attach(shape, budget, w);
    pruner_->attach(shape, w);
  }
  void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
    inner().prefill(kv, edits, s);
    check(edits);
    if (kv.layer >= dense_layers_) pruner_->appended(kv, static_cast<int>(kv.chunk_queries.extent[2]), s);
  }
  void finish_prompt(const LayerKv& kv, Edits& edits, Stream s) override {
    inner().finish_prompt(kv, edits, s);
    check(edits);
  }
  void select(const LayerStep& step, Edits& edits, Stream s) override {
    pruned_ = false;
    if (step.layer < dense_layers_) {
      inner().select(step, edits, s);
      return check(edits);
    }
    Edits own(step.layer);
    LayerStep of_first = step;
    of_first.final_list = nullptr;  // nobody attends to its list
    inner().select(of_first, own, s);
    check(own);
    if (!own.biases().empty() || !own.distances().empty() || !own.made_up().empty())
      refuse("changes what attention computes");
    pruner_->appended(step, 1, s);
    bool listed = false;
    for (const Edit& e : own.all()) {
      if (e.verb == Edit::attend || e.verb == Edit::attend_tokens) {
        if (e.resident) refuse("reads all pages on the device, whatever it lists");
        prune(step, e, edits, s);
        listed = true;
      } else {
        repeat(e, edits);
      }
    }
    edits.for_layer(step.layer);
    if (!listed && how_.whole) prune(step, every_page(step, s), edits, s);
    for (const HeadLogits& logits : own.logits()) edits.keep_logits(logits);
    for (const LeftOut& left_out : own.left_out()) edits.fill_left_out(left_out);  // what is pruned counts as listed
  }
  void observe(const LayerStep& step, Edits& edits, Stream s) override {
    pruned_ = false;
    inner().observe(step, edits, s);
    check(edits);
  }
  void finish_step(const Step& step, Edits& edits, Stream s) override {
    pruned_ = false;
    inner().finish_step(step, edits, s);
    check(edits);
  }

 private:
  [[noreturn]] void refuse(const char* what) const {
    throw Error(Errc::config,
                std::string("got a pruner beside a method that ") + what +
                    ", wanted one that only lists what a step reads: tokens must keep their places, and attention its "
                    "logits",
                how_.name);
  }
  void check(const Edits& edits) const {
    for (const Edit& e : edits.all())
      if (const char* what = disturbance(e, how_.encodes)) refuse(what);
  }

  void prune(const LayerStep& step, const Edit& e, Edits& edits, Stream s) {
    const TokenList tokens = step.list<TokenList>("tokens of a pruner", step.max_length);
    if (e.verb == Edit::attend)
      pruner_->prune(step, PageList{e.list}, tokens, s);
    else
      pruner_->prune(step, TokenList{e.list}, tokens, s);
    edits.for_layer(e.layer);
    edits.attend(tokens, e.pins);
    pruned_ = true;
  }

  static Edit every_page(const LayerStep& step, Stream s) {
    const PageList all = step.list<PageList>("all pages", step.max_pages);
    const auto length = step.scratch<std::int32_t>("length", {step.rows(), step.kv_heads()});
    ops::lengths(step.pages, length, s);
    ops::older_pages(length, nullptr, step.pages.page_size, 0, all, s);
    Edit e;
    e.list = all;
    e.layer = step.layer;
    return e;
  }

  Instance<Pruner> pruner_;
  Pruning how_;
  int dense_layers_ = 0;
  bool pruned_ = false;  // the latest edit is the pruner's
};

}  // namespace

const char* takes_no_pruner(const Policy& policy, bool encodes) {
  const Needs n = policy.needs();
  if (n.functional() || n.rebuilds_keys()) return "rewrites keys or values";
  if (n.archive()) return "fetches tokens to the places of others";
  if (n.rope() != RopeRegime::original) return "turns its keys by their places";
  if (policy.codecs().size() > 1 && !encodes) return "moves tokens to pages of another codec";
  return says_no_pruner(policy);
}

std::unique_ptr<Policy> pruned(std::shared_ptr<Policy> first, Instance<Pruner> pruner, Pruning how) {
  return std::make_unique<PrunedPolicy>(std::move(first), std::move(pruner), std::move(how));
}

}  // namespace kvlab
