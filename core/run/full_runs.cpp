#include "run/full_runs.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "base/stream_memory.hpp"
#include "run/answer.hpp"
#include "run/cell_input.hpp"
#include "run/device.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t kept_bytes = std::int64_t{1} << 30;

// The full cache, whose decode steps give their mass.
class FullCache final : public Policy {
 public:
  Needs needs() const override { return Needs{}.mass(Mass::decode); }
};

}  // namespace

// Nothing leaves the full cache, so a token's place is its text position. Numbers of a GPU come once a step for all
// layers: where processes share a GPU, each wait costs a turn of the others.
class FullRuns::Recorder final : public EngineObserver {
 public:
  void follow(Conversation* to) { to_ = to; }
  Prompt reads_of_prompt() const override { return Prompt::nothing; }
  bool steps_in_place() const override { return true; }
  void attended(const DecodeLayer& l, const Store& store) override {
    const Shape& s = store.shape();
    const Stream stream = store.stream();
    const int tokens = store.position((*l.slots)[0]) + 1;
    if (l.layer == 0) to_->mass.emplace_back().reserve(static_cast<std::size_t>(s.layers * s.kv_heads * tokens));
    if (stream.device() == Device::cpu) return add(l.mass[0], s, tokens);
    const std::int64_t room = l.mass.stride[1];  // the same in all layers of a step
    const auto numbers = static_cast<std::size_t>(s.query_heads * room);
    const std::size_t all = numbers * static_cast<std::size_t>(s.layers);
    if (waiting_.bytes() < all * sizeof(float)) waiting_ = StreamMemory(stream, 2 * all * sizeof(float));
    copy_memory(waiting_.as<float>() + numbers * static_cast<std::size_t>(l.layer), l.mass.data,
                numbers * sizeof(float), stream);
    if (l.layer + 1 < s.layers) return;
    here_.resize(all);
    copy_memory(here_.data(), waiting_.as<>(), all * sizeof(float), stream);
    synchronize(stream);
    for (int layer = 0; layer < s.layers; ++layer)
      add(View<const float, 2>::dense(here_.data() + numbers * static_cast<std::size_t>(layer), {s.query_heads, room}),
          s, tokens);
  }

 private:
  // mass: [query head, token] of one layer, in host memory.
  void add(View<const float, 2> mass, const Shape& s, int tokens) {
    const int group = s.group();
    for (int head = 0; head < s.kv_heads; ++head)
      for (int t = 0; t < tokens; ++t) {
        float sum = 0;
        for (int g = 0; g < group; ++g) sum += mass(head * group + g, t);
        to_->mass.back().push_back(sum / static_cast<float>(group));
      }
  }

  Conversation* to_ = nullptr;
  StreamMemory waiting_;  // [layer, query head, room for tokens] of the step, on the GPU
  std::vector<float> here_;
};

std::int64_t FullRuns::Conversation::bytes() const {
  std::size_t numbers = 0;
  for (const auto& step : mass) numbers += step.size();
  return static_cast<std::int64_t>(numbers * sizeof(float));
}

void FullRuns::Conversation::sum_later_steps() {
  const auto heads = static_cast<std::size_t>(layers * kv_heads);
  for (std::size_t step = mass.size(); step-- > 1;) {
    std::vector<float>&sum = mass[step - 1], &later = mass[step];
    const std::size_t tokens = sum.size() / heads, more = later.size() / heads;
    for (std::size_t head = 0; head < heads; ++head)
      for (std::size_t t = 0; t < tokens; ++t) sum[head * tokens + t] += later[head * more + t];
  }
}

std::span<const float> FullRuns::Conversation::from(int step, int layer, int head) const {
  if (step >= static_cast<int>(mass.size())) return {};
  const auto& all = mass[static_cast<std::size_t>(step)];
  const std::size_t tokens = all.size() / static_cast<std::size_t>(layers * kv_heads);
  return std::span(all).subspan(static_cast<std::size_t>(layer * kv_heads + head) * tokens, tokens);
}

void FullRuns::prepare(const CellInput& in, const std::set<int>& samples, int most) {
  int longest = 0;  // a greater limit is none
  for (const Item& item : in.items->items) longest = std::max(longest, item.max_new);
  most = std::min(most, longest);
  ++asked_;
  for (const int sample : samples) {
    const auto known = samples_.find(sample);
    if (known != samples_.end() && known->second.most != most) samples_.erase(known);
    if (const auto found = samples_.find(sample); found != samples_.end()) found->second.used = asked_;
  }
  for (const int sample : samples) {
    if (samples_.count(sample)) continue;
    Sample fresh = run(in, sample, most);
    fresh.used = asked_;
    std::int64_t bytes = fresh.bytes;
    for (const auto& [number, of] : samples_) bytes += of.bytes;
    while (bytes > kept_bytes) {
      const auto oldest = std::min_element(samples_.begin(), samples_.end(),
                                           [](const auto& a, const auto& b) { return a.second.used < b.second.used; });
      if (oldest == samples_.end() || oldest->second.used == asked_) break;
      bytes -= oldest->second.bytes;
      samples_.erase(oldest);
    }
    samples_.emplace(sample, std::move(fresh));
    ++runs_;
  }
}

FullRuns::Sample FullRuns::run(const CellInput& in, int sample, int most) const {
  const log::Timed timed("full cache's run of sample " + std::to_string(sample));
  const auto& items = in.items->items;
  EngineOptions o;
  o.device = device_of(*in.experiment);
  o.page_size = in.policy().page_size;
  o.rows = in.rows.get();
  for (const Item& item : items)
    if (item.sample == sample) o.max_tokens = std::max(o.max_tokens, item.most_tokens());
  Engine engine(in.model, std::make_shared<FullCache>(), o);
  Recorder recorder;
  engine.observe(&recorder);
  Sequence full(engine);
  const auto feed = [&](int token) { want_room(full.feed(token), engine); };

  Sample out;
  out.most = most;
  std::shared_ptr<Conversation> now;
  std::vector<int> before;  // what of the answer before a turn is still to be fed
  bool shared = false;      // the conversation begins with a context of several
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Item& item = items[i];
    if (item.sample != sample) continue;
    if (!item.follows) {
      now = std::make_shared<Conversation>();
      now->layers = in.model->config.layers, now->kv_heads = in.model->config.kv_heads;
      shared = item.shared;
      recorder.follow(now.get());
      if (in.rows) in.rows->use(i);
      const Sequence::Asked asked[] = {{0, static_cast<std::uint32_t>(i)}};
      want_room(full.begin(item, asked), engine);
    } else {
      for (const int token : before) feed(token);
      for (const int token : item.fed) feed(token);
    }
    out.conversations[static_cast<std::uint32_t>(i)] = now;
    Answer answer(item, most);
    while (!answer.ended()) {
      if (!answer.tokens().empty()) feed(answer.tokens().back());
      item.forced.empty() ? answer.take(full.logits(), *in.model->tokenizer) : answer.take_forced();
    }
    before.clear();
    if (answer.stop() != Answer::Stop::eos) before.push_back(answer.tokens().back());
    if (i + 1 < items.size() && items[i + 1].follows) continue;
    full.close();
    now->sum_later_steps();
    out.bytes += now->bytes();
    if (!shared) continue;
    const std::size_t prompt = item.prompt.size();
    const int heads = now->layers * now->kv_heads;
    out.shared.resize(static_cast<std::size_t>(heads) * prompt);
    for (int head = 0; head < heads && !now->mass.empty(); ++head)
      for (std::size_t t = 0; t < prompt; ++t)
        out.shared[static_cast<std::size_t>(head) * prompt + t] += now->from(0, 0, head)[t];
  }
  return out;
}

std::int64_t FullRuns::bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [number, sample] : samples_) bytes += sample.bytes;
  return bytes;
}

std::span<const float> FullRuns::from(std::uint32_t question, bool prompt, int step, int layer, int head) const {
  for (const auto& [number, sample] : samples_) {
    const auto found = sample.conversations.find(question);
    if (found == sample.conversations.end()) continue;
    const Conversation& c = *found->second;
    if (!prompt || sample.shared.empty()) return c.from(step, layer, head);
    const std::size_t tokens = sample.shared.size() / static_cast<std::size_t>(c.layers * c.kv_heads);
    return std::span(sample.shared).subspan(static_cast<std::size_t>(layer * c.kv_heads + head) * tokens, tokens);
  }
  throw Error(Errc::internal, "got no run of the full cache for question " + std::to_string(question) +
                                  ", wanted one before the policy's own");
}

}  // namespace kvlab
