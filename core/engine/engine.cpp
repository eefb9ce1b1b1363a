#include "engine/engine.hpp"

#include <kvlab/error.hpp>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "base/host_memory.hpp"
#include "base/joined_calls.hpp"
#include "base/memory_reserve.hpp"
#include "base/put_off.hpp"
#include "base/stop.hpp"
#include "base/threads.hpp"
#include "engine/store_options.hpp"
#include "model/token_kinds.hpp"
#include "ops/score/verify.hpp"
#include "ops/select/chosen_pages.hpp"
#include "plugin/before_step.hpp"
#include "plugin/budget_tokens.hpp"
#include "plugin/edits_author.hpp"
#include "plugin/in_prompts.hpp"
#include "plugin/offloads.hpp"
#include "plugin/takes_mass_late.hpp"
#include "plugin/verified.hpp"
#include "store/cuda_store.hpp"

namespace kvlab {

StoreOptions store_options(const Model& model, const Policy& policy, const EngineOptions& o) {
  const Needs needs = policy.needs();
  StoreOptions s;
  s.shape.layers = model.config.layers;
  s.shape.query_heads = model.config.heads;
  s.shape.kv_heads = model.config.kv_heads;
  s.shape.head_dim = model.config.head_dim;
  s.shape.page_size = o.page_size;
  s.shape.max_slots = o.slots;
  s.shape.max_tokens = o.max_tokens;
  s.shape.dtype = model.dtype;
  s.codecs = policy.codecs();
  s.host_codec = policy.host_codec();
  s.rope = needs.rope();
  s.rope_table = model.rope();
  s.summary = needs.page_summary();
  s.summary_bits = needs.summary_bits();
  s.token_state = needs.token_state();
  s.device_limit = o.device_limit;
  s.host_limit = o.host_limit;
  s.scratch_limit = o.scratch_limit;
  s.host_pages = needs.host_pages();
  s.pauses = needs.pauses();
  s.reload_steps = o.reload_steps;
  s.all_layers = needs.all_layers();
  s.planned_on_host = needs.planned_on_host();
  s.archive = needs.archive();
  s.offloads = offloads(policy);
  s.functional = needs.functional();
  s.rebuilds_keys = needs.rebuilds_keys();
  // Which pages have been in another codec must not follow from how short memory is.
  const bool rounds = needs.host_pages() && !s.codecs.front().stores_as(s.host_codec);
  s.spill = rounds ? Spill::always : o.spill;
  s.copy_by_host = o.copy_by_host;
  s.keeps_memory = o.rows != nullptr;  // questions follow each other fast
  return s;
}

namespace {

std::string text_of(const std::vector<NonFiniteStep::Row>& rows) {
  return "got numbers that are not finite in " + std::to_string(rows.size()) +
         (rows.size() == 1 ? " sequence" : " sequences") + ", wanted finite logits and cache entries";
}

std::string place_of(const NonFiniteStep::Row& row) {
  std::size_t tokens = 0;
  for (const Given& g : row.given) tokens += g.tokens.size();
  return "sample " + std::to_string(row.question) + ", up to token " + std::to_string(tokens - 1);
}

template <class T>
void check_one_of(const std::vector<T>& only, T got, const char* what) {
  if (only.empty() || std::find(only.begin(), only.end(), got) != only.end()) return;
  std::string wanted;
  for (const T t : only) wanted += (wanted.empty() ? "" : " or ") + std::string(name_of(t));
  throw Error(Errc::config, std::string("got ") + what + " " + name_of(got) + ", wanted " + wanted +
                                ": the policy runs with nothing else");
}

void check_needs(const Model& model, const Policy& policy, const EngineOptions& o) {
  const Needs needs = policy.needs();
  check_one_of(needs.devices(), o.device, "backend");
  check_one_of(needs.dtypes(), model.dtype, "dtype");
  if (o.prefill_chunk > 0 && !needs.chunked_prompts())
    throw Error(Errc::config, "got prefill_chunk " + std::to_string(o.prefill_chunk) +
                                  " with a policy that needs whole prompts, wanted prefill_chunk: 0");
  if (o.rows && (o.slots != 1 || o.prefill_chunk > 0 || o.device != Device::cpu))
    throw Error(Errc::config,
                "got several slots, prompt chunks or a GPU for a recording, wanted one slot, whole prompts "
                "and backend: cpu");
  if (needs.own_amount() && o.budget.kind != BudgetAmount::unlimited)
    throw Error(Errc::config, "got a budget for a policy that decides by itself how much it keeps, wanted none");
  if (needs.future_mass() && !o.recorded)
    throw Error(Errc::config,
                "got a policy that looks at a run of the full cache on the same prompts, wanted a cell of `kvlab run` "
                "without a workload: nothing else makes that run",
                author_of(policy));
  if (needs.mass() != Mass::none && needs.mass_into().when != Mass::none)
    throw Error(Errc::plugin, "got mass and mass_into of one policy, wanted one of the two");
  if (needs.next_queries() && (needs.observe_beside() || needs.rope() != RopeRegime::original))
    throw Error(
        Errc::plugin,
        "got next_queries of a policy that observes beside the step or where RoPE goes by rank, wanted neither");
  if (prompt_chunk(policy) > 0 && (needs.any_mass() == Mass::all || needs.rope() != RopeRegime::original ||
                                   needs.finish_prompt() || !needs.chunked_prompts() || o.rows))
    throw Error(Errc::config,
                "got a policy that chooses what prompts attend to, with the mass of prompts, where RoPE goes by rank, "
                "with finish_prompt, with whole prompts or for a recording, wanted none of these",
                author_of(policy));
  if (needs.rope() == RopeRegime::original && o.max_tokens > model.config.context)
    throw Error(Errc::config, "got " + std::to_string(o.max_tokens) + " tokens of prompt and answer, wanted at most " +
                                  std::to_string(model.config.context) + ", the context of " + model.name);
}

// Whether the mass that goes to token state may come at a step's end. Only steps that a graph may hold have such an
// end.
bool mass_may_wait(const Policy& policy, const EngineOptions& o) {
  return o.device == Device::cuda && o.graphs && policy.needs().capturable() && takes_mass_late(policy);
}

void check_reads(const char* callback, const Edits& edits) {
  if (!edits.logits().empty() || !edits.made_up().empty() || !edits.biases().empty() || !edits.distances().empty() ||
      !edits.left_out().empty())
    throw Error(Errc::plugin, std::string(callback) +
                                  ": got logits to keep or made-up tokens to read, a distance, what counts for tokens "
                                  "that are not read, or a bias, wanted that in select() alone");
}

// A step's attention, and a graph, would not know whether stored values change before or behind it.
void check_step(const char* callback, const Edits& edits) {
  for (const Edit& e : edits.all())
    if (e.verb == Edit::rewrite)
      throw Error(Errc::plugin, std::string(callback) +
                                    ": got a rewrite, wanted it in prefill() or finish_prompt() alone, or in "
                                    "observe() of a policy that is not capturable");
}

// Runs body(). An error of the store about a policy's edits gets the name of their author.
template <class Body>
auto authored(const Policy& policy, Body body) {
  try {
    return body();
  } catch (const Error& e) {
    if (e.code() != Errc::plugin || e.where().starts_with("plugin ")) throw;
    throw Error(e.code(), e.message(), author_of(policy) + (e.where().empty() ? "" : ": " + e.where()));
  }
}

// Runs body(), a step or a chunk. Frames that a kernel did not find are as many too few as those that the host misses.
template <class Body>
Fit with_frames(Store& store, const Policy& policy, const Body& body) {
  CudaStore* cuda = store.cuda();
  try {
    const Fit fit = authored(policy, body);
    return fit == Fit::ok && cuda && cuda->ran_short() ? Fit::out_of_memory : fit;
  } catch (const NoFrame&) {
    return Fit::out_of_memory;
  }
}

// What a policy does in a step counts as `select`. Ops and the store count some of it otherwise.
template <class Callback>
void in_step(const Callback& callback) {
  const PartTimer timer(Part::select);
  callback();
}

}  // namespace

NonFiniteStep::NonFiniteStep(std::vector<Row> rows)
    : NonFinite(static_cast<std::int64_t>(rows.size()), Error(Errc::model, text_of(rows), place_of(rows.front()))),
      rows_(std::move(rows)) {}

void Engine::check(const Model& model, Policy& policy, const EngineOptions& o) {
  const StoreOptions store = store_options(model, policy, o);
  check_store(store, o.device);
  check_executor(model, o.device);
  check_needs(model, policy, o);
  Ledger ledger;
  StoreWorkspace workspace(ledger, Stream::cpu());
  policy.attach(store.shape, o.budget, workspace);
}

CacheMemory Engine::memory(const Model& model, Policy& policy, const EngineOptions& o) {
  const StoreOptions store = store_options(model, policy, o);
  const StoreBytes taken = store_bytes(store, o.device);
  const Needs needs = policy.needs();
  const Shape& s = store.shape;
  const std::int64_t slots = s.max_slots, number = sizeof(float);
  Ledger ledger;
  StoreWorkspace workspace(ledger, Stream::cpu());
  policy.attach(s, o.budget, workspace);
  CacheMemory m;
  m.slots = s.max_slots;
  // Beside the store's: question and steps of each slot, and where ops note wrong numbers.
  m.tables = taken.tables + slots * 2 * number + 2 * std::int64_t{sizeof(ops::Finding)};
  if (needs.token_ids()) m.tables += slots * s.max_tokens * number + model.config.vocab;
  m.summaries = taken.summaries;
  m.state = workspace.state_bytes() + workspace.constant_bytes() + workspace.room_bytes();
  // Of each layer, and once more for the layer whose queries are replaced. Keys and values may lie between the queries.
  if (o.prefill_chunk > 0 || kvlab::prompt_chunk(policy) > 0)
    m.queries =
        std::int64_t{s.layers + 1} * needs.window_queries() * (s.query_heads + 2 * s.kv_heads) * s.head_dim * number;
  m.mass = mass_bytes(s, needs.any_mass()) + (mass_may_wait(policy, o) ? late_mass_bytes(s) : 0);
  m.scratch_of_callback =
      number * s.query_heads * (needs.scratch_numbers() * slots * s.max_tokens + std::int64_t{s.head_dim} * s.head_dim);
  // A policy that is not capturable may rewrite in steps, which have rows of all sequences.
  if (needs.functional() || needs.rebuilds_keys())
    m.scratch_of_callback +=
        2 * number * s.kv_heads * s.head_dim * s.max_tokens * (needs.functional() && !needs.capturable() ? slots : 1);
  if (needs.output_projection()) m.scratch_of_callback += Projection::scratch_bytes(s, model.config.hidden);
  m.scratch = m.scratch_of_callback * (needs.observe_beside() ? 2 : 1);
  m.frame = taken.frame;
  m.page = taken.frame + taken.frame_places;
  m.heads = std::int64_t{s.layers} * s.kv_heads;
  return m;
}

void Engine::fit(EngineOptions& o, std::int64_t bytes, const Model& model, Policy& policy) {
  const CacheMemory m = memory(model, policy, o);
  o.device_limit = m.frames_within(bytes);
  o.scratch_limit = m.scratch_of_callback;
}

Engine::Engine(std::shared_ptr<const Model> model, std::shared_ptr<Policy> policy, const EngineOptions& options)
    : policy_(std::move(policy)),
      needs_(policy_->needs()),
      options_(options),
      owned_stream_(options.device),
      stream_(owned_stream_.get()),
      store_(make_store(store_options(*model, *policy_, options), stream_)),
      executor_(options.rows ? make_replay_executor(model, *store_, *options.rows)
                             : make_executor(model, *store_, options.batch_invariant)) {
  check_needs(*model, *policy_, options);
  page_bytes_ = page_bytes(store_->shape(), store_->options().codecs[0], needs_);
  policy_->attach(store_->shape(), options.budget, store_->workspace());
  prompt_chunk_ = kvlab::prompt_chunk(*policy_);
  ask_masks();
  for_pages_ = amount_for_pages(options.budget, store_->workspace().slot_bytes());
  capturable_ = stream_.device() == Device::cuda && policy_->needs().capturable();
  if (const MassState& m = needs_.mass_into(); m.when != Mass::none)
    mass_into_ = {static_cast<int>(std::ranges::find(needs_.token_state(), m.state) - needs_.token_state().begin()),
                  m.rule, mass_may_wait(*policy_, options_)};
  tail_.resize(static_cast<std::size_t>(options.slots));
  sequences_.resize(tail_.size());
  question_.resize(tail_.size());
  given_.resize(tail_.size());
  questions_ = StreamMemory(stream_, tail_.size() * sizeof(std::uint32_t));
  zero_memory(questions_.as<>(), questions_.bytes(), stream_);
  if (needs_.output_projection()) projection_.emplace(*executor_);
  if (needs_.next_queries()) ahead_.emplace(*executor_);
  if (needs_.future_mass()) foresight_.emplace(*options.recorded, *store_, question_);
  if (needs_.steps()) {
    host_steps_.resize(tail_.size());
    device_steps_ = StreamMemory(stream_, tail_.size() * sizeof(std::int32_t));
    zero_memory(device_steps_.as<>(), device_steps_.bytes(), stream_);
  }
  if (needs_.token_ids()) {
    const std::vector<std::uint8_t> kinds = token_kinds(executor_->model().config, executor_->model().tokenizer.get());
    token_kinds_ = StreamMemory(stream_, kinds.size());
    copy_memory(token_kinds_.as<>(), kinds.data(), kinds.size(), stream_);
    text_ = StreamMemory(stream_, tail_.size() * static_cast<std::size_t>(options.max_tokens) * sizeof(std::int32_t));
    zero_memory(text_.as<>(), text_.bytes(), stream_);
  }
}

// Layers whose masks hide nothing have none, so that prompts take the fastest kernel there.
void Engine::ask_masks() {
  const std::vector<PromptMask> masks = policy_->prompt_masks();
  if (masks.empty()) return;
  if (prompt_chunk_ > 0)
    throw Error(Errc::config,
                "got masks of prompts of a policy that chooses what they attend to, wanted one of the two");
  const Shape& s = store_->shape();
  const auto heads = static_cast<std::size_t>(s.kv_heads), all = static_cast<std::size_t>(s.layers) * heads;
  if (masks.size() != all)
    throw Error(Errc::plugin, "got " + std::to_string(masks.size()) + " masks of prompts, wanted none or " +
                                  std::to_string(all) + ", one for each layer and KV head");
  const auto* there = static_cast<const PromptMask*>(
      store_->workspace().constant("prompt masks", masks.data(), all * sizeof(PromptMask)));
  for (std::size_t at = 0; at < all; at += heads)
    masks_.push_back(std::any_of(masks.begin() + static_cast<std::ptrdiff_t>(at),
                                 masks.begin() + static_cast<std::ptrdiff_t>(at + heads),
                                 [](const PromptMask& m) { return m.window > 0; })
                         ? there + at
                         : nullptr);
}

int Engine::open(std::uint32_t sequence) {
  const int slot = store_->open();
  if (slot < 0) return slot;
  sequences_[static_cast<std::size_t>(slot)] = sequence;
  given_[static_cast<std::size_t>(slot)].clear();
  ask(slot, 0);
  return slot;
}

void Engine::ask(int slot, std::uint32_t question) {
  question_[static_cast<std::size_t>(slot)] = question;
  copy_memory(questions_.as<std::uint32_t>() + slot, &question, sizeof question, stream_);
}

void Engine::close(int slot) {
  policy_->release(slot);
  tail_[static_cast<std::size_t>(slot)].clear();
  store_->close(slot);
}

Fit Engine::restore(int slot, const SavedSequence& saved) {
  policy_->release(slot);
  tail_[static_cast<std::size_t>(slot)].clear();
  given_[static_cast<std::size_t>(slot)] = saved.given;
  give_text(slot, saved.given);
  return store_->restore(slot, saved.cache);
}

void Engine::count_aside(const AsideSequence& sequence, int sign) {
  Ledger& ledger = store_->ledger();
  for (const Tier tier : {Tier::device, Tier::host}) {
    for (const Stored as : all_stored) {
      const Ledger::Row& bytes = sequence.cache->ledger().held(tier, as);
      for (int i = 0; i < tag_count; ++i)
        if (const Tag tag = static_cast<Tag>(i); tag != Tag::workspace && tag != Tag::tables)
          ledger.hold(Tier::host, tag, sign * bytes[static_cast<std::size_t>(i)], as);
    }
    aside_bytes_ += sign * sequence.bytes(tier);
  }
}

std::optional<AsideSequence> Engine::set_aside(int slot) {
  constexpr std::int64_t least_left = std::int64_t{1} << 30;  // for other programs
  const std::int64_t limit = options_.host_limit, most = full_bytes(store_->position(slot));
  if (free_host_bytes() - most < least_left) return std::nullopt;
  store_->page_bytes(Tier::device);  // errors of steps before are the run's, not this copy's
  AsideSequence out;
  try {
    out = {store_->set_aside(slot), given_[static_cast<std::size_t>(slot)]};
  } catch (const std::bad_alloc&) {  // a limit of the process, or a device without room for the copy's lists
    return std::nullopt;
  }
  if (limit >= 0 && store_->page_bytes(Tier::host) + aside_bytes_ + out.bytes(Tier::device) > limit)
    return std::nullopt;
  close(slot);
  count_aside(out, 1);
  return out;
}

Fit Engine::bring_back(int slot, const AsideSequence& sequence) {
  policy_->release(slot);
  tail_[static_cast<std::size_t>(slot)].clear();
  given_[static_cast<std::size_t>(slot)] = sequence.given;
  give_text(slot, sequence.given);
  const Fit fit = store_->bring_back(slot, sequence.cache);
  if (fit == Fit::ok) count_aside(sequence, -1);
  return fit;
}

void Engine::drop(const AsideSequence& sequence) { count_aside(sequence, -1); }

Fit Engine::settled(Fit fit, const std::vector<std::int32_t>& slots) const {
  Verified* policy = verified(policy_.get());
  if (fit != Fit::ok) {
    if (policy) policy->forget();
    return fit;
  }
  std::vector<NonFiniteStep::Row> rows;
  for (const std::int32_t r : executor_->nonfinite_rows()) {
    const auto slot = static_cast<std::size_t>(slots[static_cast<std::size_t>(r)]);
    rows.push_back({sequences_[slot], question_[slot], given_[slot]});
  }
  if (!rows.empty()) {
    // Attention over a page that is not on the device reads numbers that may be anything. The store names that cause.
    authored(*policy_, [&] { return store_->page_bytes(Tier::device); });
    throw NonFiniteStep(std::move(rows));
  }
  if (policy) policy->verify();
  return fit;
}

std::int64_t Engine::frame_bytes(CodecSpec codec) const { return frame_layout(store_->options(), codec).bytes; }

std::int64_t Engine::full_bytes(std::int64_t tokens, CodecSpec codec) const {
  const Shape& s = store_->shape();
  const std::int64_t pages = (tokens + s.page_size - 1) / s.page_size;
  return std::int64_t{s.layers} * s.kv_heads * pages * frame_bytes(codec);
}

Engine::Demanded Engine::demanded(int prompt_tokens, int max_new) const {
  const Demand says = policy_->demand(prompt_tokens, max_new);
  const std::int64_t all = std::int64_t{prompt_tokens} + max_new;
  const auto bytes = [&](std::int64_t tokens, std::int64_t most, CodecSpec codec) {
    return tokens < 0 ? -1 : full_bytes(std::min(tokens, most), codec);
  };
  const CodecSpec codec = store_->options().codecs[0];
  return {bytes(says.device_prefill < 0 ? prompt_tokens : says.device_prefill, prompt_tokens, codec),
          bytes(says.device_decode, all, codec), bytes(says.host, all, store_->options().host_codec)};
}

std::int64_t Engine::free_bytes() const {
  const std::int64_t limit = store_->page_limit();
  if (limit < 0) return no_limit;
  return std::max<std::int64_t>(0, limit - store_->page_bytes(Tier::device) + store_->spare_bytes());
}

std::int64_t Engine::host_room_bytes() const {
  const bool limited = needs_.host_pages() || needs_.archive();
  return limited ? store_->host_room() * frame_bytes(store_->options().host_codec) : no_limit;
}

std::int64_t Engine::host_needed_bytes(int slot) const {
  return needs_.host_pages() ? store_->pages_to_write(slot) * frame_bytes(store_->options().host_codec) : 0;
}

Fit Engine::prefill(int slot, std::span<const int> tokens, bool end, View<float, 2> logits) {
  if (tokens.empty()) throw Error(Errc::data, "got an empty prompt, wanted at least one token");
  given_[static_cast<std::size_t>(slot)].push_back({{tokens.begin(), tokens.end()}, true, end});
  give_text(slot, store_->position(slot), tokens);
  if (stream_.device() == Device::cpu) follow_load();
  const int wanted = prompt_chunk_ > 0 ? prompt_chunk_ : options_.prefill_chunk;
  const std::size_t chunk = wanted > 0 ? static_cast<std::size_t>(wanted) : tokens.size();
  for (std::size_t at = 0; at < tokens.size(); at += chunk) {
    const std::size_t count = std::min(chunk, tokens.size() - at);
    const bool last = at + count == tokens.size();
    View<float, 2> out;
    if (last && logits) {
      if (logits.extent[0] > static_cast<std::int64_t>(count))
        throw Error(Errc::internal, "asked for the logits of more tokens than the last chunk has");
      out = logits;
    }
    const Fit fit = with_frames(*store_, *policy_, [&] {
      return executor_->prefill(slot, tokens.subspan(at, count), end && last, *this, out);
    });
    if (settled(fit, {slot}) != Fit::ok) return Fit::out_of_memory;
  }
  if (end) tail_[static_cast<std::size_t>(slot)].clear();
  return Fit::ok;
}

Fit Engine::step(const std::vector<std::int32_t>& slots, std::span<const int> tokens, const StepResult& out) {
  stop::check();
  check_reserve();
  if (stream_.device() == Device::cpu) follow_load();
  position_.clear();
  step_.clear();
  sequence_.clear();
  late_layers_.clear();
  for (int slot : slots) {
    sequence_.push_back(sequences_[static_cast<std::size_t>(slot)]);
    position_.push_back(store_->position(slot) + 1);  // this step's token counts as seen
    step_.push_back(store_->steps(slot));
  }
  count_budgets(position_);
  for (std::size_t r = 0; r < slots.size(); ++r) give_text(slots[r], position_[r] - 1, tokens.subspan(r, 1));
  if (needs_.steps()) {
    for (const int slot : slots) host_steps_[static_cast<std::size_t>(slot)] = store_->steps(slot);
    copy_memory(device_steps_.as<>(), host_steps_.data(), device_steps_.bytes(), stream_);
  }
  const int variant = tell_before_step(policy_.get(), {.rows = static_cast<int>(slots.size()),
                                                       .slots = slots.data(),
                                                       .position = position_.data(),
                                                       .step = step_.data(),
                                                       .budget = budget_.data(),
                                                       .sequence = sequence_.data(),
                                                       .stream = stream_});
  executor_->variant_of_step(variant);
  const Fit fit = with_frames(*store_, *policy_, [&] { return executor_->decode(slots, tokens, *this, out); });
  store_->workspace().reset();
  for (std::size_t r = 0; r < slots.size(); ++r) {
    auto& given = given_[static_cast<std::size_t>(slots[r])];
    if (given.empty() || given.back().prompt) given.emplace_back();
    given.back().tokens.push_back(tokens[r]);
  }
  return settled(fit, slots);
}

Fit Engine::finish_step(const std::vector<std::int32_t>& slots, int room) {
  if (!late_layers_.empty())
    if (const Fit fit = observe_late(needs_.archive() || places(slots)); fit != Fit::ok) return fit;
  Step step;
  step.shape = &store_->shape();
  step.rows = static_cast<int>(slots.size());
  step.slots = slots.data();
  step.position = position_.data();
  step.step = step_.data();
  step.workspace = &store_->workspace();
  step.state_names = &store_->options().token_state;
  if (needs_.all_layers()) {
    step.pages = store_->view_all(slots);
    step.pages.table.extent[2] = (room + step.shape->page_size - 1) / step.shape->page_size;
    step.max_length = room;
  }
  Edits edits;
  in_step([&] { policy_->finish_step(step, edits, stream_); });
  check_reads("finish_step", edits);
  check_step("finish_step", edits);
  return apply_after("finish_step", edits.all(), slots);
}

LayerKv Engine::layer_kv(int layer, const std::vector<std::int32_t>& slots, std::span<const std::int32_t> position) {
  LayerKv kv;
  kv.layer = layer;
  kv.shape = &store_->shape();
  kv.pages = store_->view(layer, slots);
  kv.host_pages = store_->view(layer, slots, Tier::host);
  pages_ = kv.pages;
  kv.keys = {&pages_, KvSide::key};
  kv.values = {&pages_, KvSide::value};
  kv.summaries = store_->summaries(layer);
  kv.state_names = &store_->options().token_state;
  kv.workspace = &store_->workspace();
  kv.slots = slots.data();
  kv.position = position.data();
  kv.sequence = sequence_.data();
  kv.question = questions_.as<std::uint32_t>();
  kv.steps = device_steps_.as<std::int32_t>();
  if (const std::int64_t room = options_.max_tokens; text_)
    kv.text = {View<const std::int32_t, 2>::dense(text_.as<std::int32_t>(), {options_.slots, room}),
               View<const std::uint8_t, 1>::dense(token_kinds_.as<std::uint8_t>(),
                                                  {static_cast<std::int64_t>(token_kinds_.bytes())})};
  kv.max_length = store_->max_length(layer, slots);
  if (foresight_) kv.future = &*foresight_;
  if (projection_) kv.projection = &*projection_;
  kv.budget = layer < needs_.dense_layers() ? unlimited_.data() : budget_.data();
  return kv;
}

void Engine::count_budgets(std::span<const std::int32_t> position) {
  budget_.clear();
  for (const std::int32_t seen : position)
    budget_.push_back(budget_tokens(for_pages_, seen, store_->shape(), page_bytes_, needs_.dense_layers()));
  unlimited_.assign(position.size(), std::numeric_limits<std::int32_t>::max());
}

// Keeps the last window queries of the prompt so far. The next chunk may have too few to fill the window.
void Engine::keep_window(const PromptLayer& l) {
  auto& layers = tail_[static_cast<std::size_t>(l.slot)];
  layers.resize(static_cast<std::size_t>(store_->shape().layers));
  Tail& tail = layers[static_cast<std::size_t>(l.layer)];
  const std::int64_t n = l.queries.extent[0], row = l.queries.stride[0], w = needs_.window_queries();
  const std::int64_t fresh = std::min(n, w), old = std::min(tail.rows, w - fresh);
  const auto bytes = [&](std::int64_t rows) { return static_cast<std::size_t>(rows * row) * sizeof(float); };
  Tail next{StreamMemory(stream_, bytes(old + fresh)), old + fresh};
  copy_memory(next.queries.as<float>(), tail.queries.as<float>() + (tail.rows - old) * row, bytes(old), stream_);
  copy_memory(next.queries.as<float>() + old * row, l.queries.data + (n - fresh) * row, bytes(fresh), stream_);
  tail = std::move(next);
}

void Engine::give_text(int slot, std::int64_t position, std::span<const int> tokens) {
  static_assert(sizeof(int) == sizeof(std::int32_t));
  if (!text_) return;
  const std::int64_t most = options_.max_tokens;
  const std::int64_t count = std::min(most - position, static_cast<std::int64_t>(tokens.size()));
  if (count > 0)  // a text that is too long is refused later
    copy_memory(text_.as<std::int32_t>() + slot * most + position, tokens.data(),
                static_cast<std::size_t>(count) * sizeof(int), stream_);
}

void Engine::give_text(int slot, const std::vector<Given>& given) {
  std::int64_t position = 0;
  for (const Given& g : given) {
    give_text(slot, position, g.tokens);
    position += static_cast<std::int64_t>(g.tokens.size());
  }
}

// Prompt attention reads the whole cache, so pages on the host come back before a sequence's next prompt. A policy that
// chooses in prompts places what they read.
Fit Engine::before_prompt(int layer, int slot) {
  const PartTimer timer(Part::recall);
  if (prompt_chunk_ > 0) return store_->forget_place(layer, slot), Fit::ok;
  return store_->recall_all(layer, slot);
}

LayerPrefill Engine::layer_prefill(const PromptLayer& l, std::span<const std::int32_t> position, const PromptRow& row) {
  const Shape& s = store_->shape();
  LayerPrefill kv;
  static_cast<LayerKv&>(kv) = layer_kv(l.layer, row.slots, position);
  kv.step = row.step;
  kv.last = row.last;
  const View<const float, 3>& q = l.queries;
  kv.chunk_queries = View<const float, 4>{
      q.data, {1, s.query_heads, q.extent[0], s.head_dim}, {0, q.stride[1], q.stride[0], q.stride[2]}};
  return kv;
}

Selection Engine::select_chunk(const PromptLayer& l, Fit& fit) {
  stop::check();
  const PromptRow row(l);
  const std::int32_t position[] = {store_->position(l.slot) + static_cast<std::int32_t>(l.queries.extent[0])};
  sequence_ = {sequences_[static_cast<std::size_t>(l.slot)]};
  count_budgets(position);
  Edits edits(l.layer);
  dynamic_cast<ChoosesInPrompts&>(*policy_).select_chunk(layer_prefill(l, position, row), edits, stream_);
  check_step("select_chunk", edits);
  Selection read;
  std::vector<Edit> before;
  const Edit* list = nullptr;
  for (const Edit& e : edits.all()) {
    const bool places = (e.verb == Edit::place || e.verb == Edit::recall) && e.when.kind == Deadline::this_attention;
    if (!places && (e.verb != Edit::attend || e.resident || list))
      throw Error(Errc::plugin,
                  "select_chunk: got an edit that is neither its one list of pages nor a place or recall for this "
                  "attention, wanted no others");
    if (places)
      before.push_back(e);
    else
      list = &e;
  }
  if (!edits.logits().empty() || !edits.made_up().empty() || !edits.biases().empty() || !edits.left_out().empty() ||
      edits.distances().size() > 1 || (!edits.distances().empty() && edits.distances()[0] < 1))
    throw Error(Errc::plugin,
                "select_chunk: got logits, made-up tokens, a bias, what counts for tokens that are not read, two "
                "distances or one below 1, wanted at most one distance");
  if (!edits.distances().empty()) read.most_distance = edits.distances()[0];
  fit = apply(before, row.slots);
  if (fit == Fit::ok && !list) fit = store_->recall_all(l.layer, l.slot);
  if (fit == Fit::ok && list) {
    attended_pages_ = {store_->resolve_attend(*list, row.slots, store_->workspace())};
    read.pages = &attended_pages_;
  }
  return read;
}

Fit Engine::prompt(const PromptLayer& l) {
  stop::check();
  check_reserve();
  using Reads = EngineObserver::Prompt;
  const Reads reads = observer_ ? observer_->reads_of_prompt() : Reads::nothing;
  if (reads != Reads::nothing) {
    const bool as_it_is = stream_.device() == Device::cpu || reads == Reads::in_place;
    observer_->prompt(as_it_is ? l : seen_.of(l, reads == Reads::keys_and_values, stream_), *store_);
  }
  const Shape& s = store_->shape();
  const PromptRow one(l);
  const std::vector<std::int32_t>& slots = one.slots;
  const std::int32_t position[] = {store_->position(l.slot) + static_cast<std::int32_t>(l.queries.extent[0])};
  sequence_ = {sequences_[static_cast<std::size_t>(l.slot)]};
  count_budgets(position);
  LayerPrefill kv = layer_prefill(l, position, one);
  if (l.mass)
    kv.mass = View<const float, 3>{l.mass.data, {1, l.mass.extent[0], l.mass.extent[1]}, {0, l.mass.stride[0], 1}};
  if (l.lse)
    kv.lse =
        View<const float, 3>{l.lse.data, {1, l.lse.extent[0], l.lse.extent[1]}, {0, l.lse.stride[0], l.lse.stride[1]}};
  if (const std::int64_t w = needs_.window_queries(); w > 0) {
    const bool whole = tail_[static_cast<std::size_t>(l.slot)].empty();
    const std::int64_t n = l.queries.extent[0];
    if (!whole || !l.last) keep_window(l);
    if (l.last) {
      const std::int64_t row = l.queries.stride[0];
      const float* data = l.queries.data + (n - std::min(n, w)) * row;
      std::int64_t count = std::min(n, w);
      if (!whole) {
        const Tail& tail = tail_[static_cast<std::size_t>(l.slot)][static_cast<std::size_t>(l.layer)];
        data = tail.queries.as<float>();
        count = tail.rows;
      }
      kv.window_queries = View<const float, 4>{data, {1, s.query_heads, count, s.head_dim}, {0, s.head_dim, row, 1}};
    }
  }
  if (needs_.mass_into().when == Mass::all) {
    ops::add_mass(kv.mass, needs_.mass_into().rule, kv.state(needs_.mass_into().state), stream_);
    kv.mass = {};
  }
  Edits edits(l.layer);
  policy_->prefill(kv, edits, stream_);
  check_reads("prefill", edits);
  const Fit fit = apply_after("prefill", edits.all(), slots);
  store_->workspace().reset();
  const bool ends = l.last && l.layer + 1 == s.layers;
  return ends && fit == Fit::ok && needs_.finish_prompt() ? finish_prompt(slots, position) : fit;
}

Fit Engine::finish_prompt(const std::vector<std::int32_t>& slots, std::span<const std::int32_t> position) {
  const std::vector<std::int32_t> step(slots.size(), 0);
  for (int layer = 0; layer < store_->shape().layers; ++layer) {
    LayerKv kv = layer_kv(layer, slots, position);
    kv.step = step.data();
    Edits edits(layer);
    policy_->finish_prompt(kv, edits, stream_);
    check_reads("finish_prompt", edits);
    const Fit fit = apply_after("finish_prompt", edits.all(), slots);
    store_->workspace().reset();
    if (fit != Fit::ok) return fit;
  }
  return Fit::ok;
}

LayerStep Engine::layer_step(const DecodeLayer& l) {
  LayerStep step;
  static_cast<LayerKv&>(step) = layer_kv(l.layer, *l.slots, position_);
  step.step = step_.data();
  step.queries = l.queries;
  step.mass = l.mass;
  step.max_length = l.room;
  step.max_pages = (l.room + store_->shape().page_size - 1) / store_->shape().page_size;
  // Ops start blocks for as many pages as a table has entries.
  step.pages.table.extent[2] = pages_.table.extent[2] = step.host_pages.table.extent[2] = step.max_pages;
  if (l.output) step.output = l.output;
  if (ahead_) step.ahead = &*ahead_;
  return step;
}

Selection Engine::select(const DecodeLayer& l, Fit& fit) {
  Edits edits(l.layer);
  LayerStep step = layer_step(l);
  step.final_list = store_->final_list();
  in_step([&] { policy_->select(step, edits, stream_); });
  check_step("select", edits);
  Selection read;
  std::vector<Edit> before, after;
  const Edit* list = nullptr;
  for (const Edit& e : edits.all()) {
    if (e.verb != Edit::attend && e.verb != Edit::attend_tokens) {
      (e.when.kind == Deadline::this_attention ? before : after).push_back(e);
      continue;
    }
    if (list && list->verb == e.verb) throw Error(Errc::plugin, "select: got a second list to attend to, wanted one");
    if (list)
      throw Error(Errc::plugin, "select: got a list of pages and a list of tokens to attend to, wanted one of the two");
    list = &e;
  }
  if (list)
    for (const Edit& e : before)
      if (e.verb == Edit::evict || e.verb == Edit::evict_rest || e.verb == Edit::move)
        throw Error(Errc::plugin,
                    "select: got tokens that leave or move before the attention that a list of places is for, wanted "
                    "them after it: next_attention");
  if (!edits.logits().empty()) {
    if (edits.logits().size() > 1 || list || needs_.any_mass() != Mass::none)
      throw Error(Errc::plugin,
                  "select: got logits to keep twice, beside a list to attend to or with mass, wanted "
                  "them once and alone");
    read.logits = edits.logits().front();
  }
  if (!edits.made_up().empty()) {
    if (edits.made_up().size() > 1 || needs_.any_mass() != Mass::none || needs_.rope() != RopeRegime::original)
      throw Error(Errc::plugin,
                  "select: got made-up tokens to read twice, with mass or where RoPE goes by rank, wanted them once, "
                  "without mass and in the regime original");
    read.made_up = edits.made_up().front();
  }
  if (!edits.biases().empty()) {
    if (edits.biases().size() > 1 || (list && list->verb == Edit::attend) || !edits.logits().empty() ||
        needs_.any_mass() != Mass::none)
      throw Error(Errc::plugin,
                  "select: got a bias on logits twice, beside a list of pages, or with mass or logits to keep, wanted "
                  "it once, with a list of tokens or without a list: attention to pages, and attention that leaves "
                  "mass or logits, adds no bias");
    read.bias = edits.biases().front();
    const auto& extent = read.bias.extent;
    if (extent[0] < std::ssize(*l.slots) || extent[1] != store_->shape().query_heads || extent[2] < l.room)
      throw Error(Errc::plugin,
                  "select: got a bias of " + std::to_string(extent[0]) + " rows, " + std::to_string(extent[1]) +
                      " heads and " + std::to_string(extent[2]) + " tokens, wanted " + std::to_string(l.slots->size()) +
                      ", " + std::to_string(store_->shape().query_heads) + " and at least " + std::to_string(l.room));
  }
  if (!edits.distances().empty()) {
    if (edits.distances().size() > 1 || edits.distances()[0] < 1 || needs_.rope() != RopeRegime::original)
      throw Error(Errc::plugin, "select: got the distance " + std::to_string(edits.distances()[0]) +
                                    ", or two, or one where RoPE goes "
                                    "by rank, wanted at least 1, once, and the regime original");
    read.most_distance = edits.distances()[0];
  }
  if (!edits.left_out().empty()) {
    if (edits.left_out().size() > 1)
      throw Error(Errc::plugin, "select: got what counts for tokens that are not read twice, wanted it once");
    read.left_out = edits.left_out().front();
    const auto& share = read.left_out.share.extent;
    const auto& mean = read.left_out.mean.extent;
    const Shape& s = store_->shape();
    if (!read.left_out || share[0] < std::ssize(*l.slots) || share[1] != s.query_heads || mean[0] < s.max_slots ||
        mean[1] != s.kv_heads || mean[2] != s.head_dim || read.left_out.mean.stride[2] != 1)
      throw Error(
          Errc::plugin,
          "select: got shares or means of another shape for tokens that are not read, wanted [row, query head], "
          "and [slot, kv_head, head_dim] contiguous along head_dim");
  }
  waiting_ = std::move(after);
  fit = apply(before, *l.slots);
  if (fit == Fit::ok && list) {
    const IndexList resolved = store_->resolve_attend(*list, *l.slots, store_->workspace());
    if (list->verb == Edit::attend)
      attended_pages_ = {resolved}, read.pages = &attended_pages_;
    else
      attended_tokens_ = {resolved}, read.tokens = &attended_tokens_;
  }
  if (fit == Fit::ok && options_.protect_host) store_->protect_host(true);
  return read;
}

Fit Engine::attended(const DecodeLayer& l) {
  if (options_.protect_host) store_->protect_host(false);
  if (observer_) {
    const bool as_it_is = stream_.device() == Device::cpu || observer_->steps_in_place();
    observer_->attended(as_it_is ? l : seen_.of(l, stream_), *store_);
  }
  Fit fit = apply(waiting_, *l.slots);
  waiting_.clear();
  return fit == Fit::ok ? observe(l) : fit;
}

Fit Engine::observe(const DecodeLayer& l) {
  if (!needs_.observe_beside()) {
    Edits edits(l.layer);
    in_step([&] { policy_->observe(layer_step(l), edits, stream_); });
    check_reads("observe", edits);
    if (needs_.capturable()) check_step("observe", edits);
    return apply_after("observe", edits.all(), *l.slots, true);
  }
  late_layers_.push_back(l);
  if (!keeps_rows() || !store_->in_graph()) return observe_late(false);
  // A launch beside the step delays the kernels of the step, by more than it takes alone. So layers share launches: all
  // of them at the step's end, or a few where pages travel, so that these start early. Tokens of archives seldom do.
  // No group is larger than what follows it. So the last groups are small, and little travels when the step has ended.
  const int follow = store_->shape().layers - 1 - l.layer;
  const auto group = std::min<std::ptrdiff_t>(options_.layers_beside, follow);
  return follow > 0 && places(*l.slots) && std::ssize(late_layers_) >= group ? observe_late(true) : Fit::ok;
}

// Whether place edits of these slots move pages.
bool Engine::places(const std::vector<std::int32_t>& slots) const {
  return needs_.host_pages() && store_->any_spills(slots);
}

Fit Engine::observe_late(bool beside) {
  const Stream s = beside ? store_->begin_beside() : stream_;
  struct Beside {
    Store& store;
    ~Beside() { store.leave_beside(); }
  } const until_the_end{*store_};
  const PutOffScope scope(true);
  StoreWorkspace& scratch = store_->workspace();
  const std::vector<DecodeLayer> layers = std::exchange(late_layers_, {});
  const std::vector<std::int32_t>& slots = *layers[0].slots;
  std::vector<Edits> edits;
  // Edits that read lists come after the choices of all layers.
  const auto carry_out = [&] {
    run_put_off();
    std::vector<Edit> all;
    for (const Edits& of : edits) all.insert(all.end(), of.all().begin(), of.all().end());
    if (const Fit fit = apply_after("observe", all, slots); fit != Fit::ok) return fit;
    edits.clear();
    scratch.reset();
    return Fit::ok;
  };
  std::size_t most = 0;  // scratch of a callback
  for (const DecodeLayer& l : layers) {
    LayerStep step = layer_step(l);
    const std::size_t of_place = !places(slots) ? 0
                                                : 2 * sizeof(std::int32_t) * slots.size() *
                                                      static_cast<std::size_t>(step.kv_heads() * step.max_pages);
    if (scratch.left() < most + (edits.size() + 1) * of_place)
      if (const Fit fit = carry_out(); fit != Fit::ok) return fit;
    const std::size_t before = scratch.left();
    step.mass = {}, step.output = {};
    in_step([&] { policy_->observe(step, edits.emplace_back(l.layer), s); });
    check_reads("observe", edits.back());
    check_late(edits.back());
    ops::forget_put_off_scores();
    end_joined_callback();
    most = std::max(most, before - scratch.left());
  }
  if (const Fit fit = carry_out(); fit != Fit::ok) return fit;
  if (beside) store_->end_beside();
  return Fit::ok;
}

void Engine::check_late(const Edits& edits) {
  for (const Edit& e : edits.all())
    if ((e.verb != Edit::place && e.verb != Edit::fetch) || e.when.kind == Deadline::next_step)
      throw Error(Errc::plugin, "edit of layer " + std::to_string(e.layer) +
                                    ": got an edit of an observe that may run beside the step, wanted place and fetch "
                                    "edits alone, not for its end");
}

Fit Engine::apply_after(const char* callback, const std::vector<Edit>& edits, const std::vector<std::int32_t>& slots,
                        bool last) {
  for (const Edit& e : edits)
    if (e.when.kind == Deadline::this_attention)
      throw Error(Errc::plugin, std::string(callback) + ": got an edit for this attention, wanted it in select()");
  return apply(edits, slots, last);
}

Fit Engine::apply(const std::vector<Edit>& edits, const std::vector<std::int32_t>& slots, bool last) {
  if (edits.empty()) return Fit::ok;
  ops::Finding* nan = nullptr;
  for (const Edit& e : edits)
    if (e.verb == Edit::evict_surplus && !e.surplus.scores && e.surplus.column >= 0)
      if (Verified* policy = verified(policy_.get())) nan = policy->finding(stream_);
  return store_->apply(edits, slots, nan, last).fit;
}

}  // namespace kvlab
