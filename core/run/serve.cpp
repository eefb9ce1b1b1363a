#include "run/serve.hpp"

#include <algorithm>
#include <optional>

#include "base/part_events.hpp"
#include "run/answer.hpp"
#include "run/averages.hpp"
#include "run/disturbance.hpp"
#include "run/nonfinite.hpp"
#include "run/requests.hpp"
#include "run/step_log.hpp"
#include "run/summary.hpp"
#include "run/warm_up.hpp"

namespace kvlab {
namespace {

results::SampleRow sample_of(const CellInput& in, std::size_t index, const Served& served) {
  const Item& item = in.items->items[index % in.items->items.size()];
  results::SampleRow s = sample_row(item, static_cast<std::int64_t>(index));
  s.prompt_tokens = static_cast<std::int64_t>(item.prompt.size() + item.fed.size());
  std::vector<int> text = served.tokens;
  if (served.ended) text.pop_back();
  s.output =
      in.workload()->ignore_eos ? in.model->tokenizer->decode(text) : answer_text(item, text, *in.model->tokenizer);
  s.output_tokens = static_cast<std::int64_t>(served.tokens.size());
  s.stop = name_of(served.ended ? Answer::Stop::eos : served.stopped ? Answer::Stop::text : Answer::Stop::length);
  s.score = in.items->score(item, s.output);
  if (!item.references.empty()) want_finite(s.score, "a score by '" + in.items->metric + "'", s.sample);
  s.preemptions = served.preemptions;
  s.pauses = served.pauses;
  if (!in.wants(Metric::latency)) return s;
  s.arrival_ms = served.arrival_ms;
  s.queue_ms = served.admitted_ms - served.arrival_ms;
  s.ttft_ms = served.token_ms.front() - served.arrival_ms;
  s.end_ms = served.token_ms.back();
  return s;
}

// The time of a request's first token counts from its arrival, that of each later token from the token before.
void add_tokens(const Served& served, results::CellResult& out) {
  double before = served.arrival_ms;
  for (const double at : served.token_ms) {
    out.token_ms.push_back(static_cast<float>(at - before));
    before = at;
  }
}

void summarize_requests(const std::vector<Served>& all, bool timed, results::CellResult& out) {
  auto& s = out.summary;
  s.preemptions = s.pauses = 0;
  for (const Served& one : all) s.preemptions += one.preemptions, s.pauses += one.pauses;
  if (!timed) return;
  std::vector<double> ttft, queue;
  double begin = all.front().arrival_ms, end = 0;
  for (const Served& one : all) {
    ttft.push_back(one.token_ms.front() - one.arrival_ms);
    queue.push_back(one.admitted_ms - one.arrival_ms);
    begin = std::min(begin, one.arrival_ms);
    end = std::max(end, one.token_ms.back());
  }
  s.ttft_ms_p95 = percentile(ttft, 0.95);
  s.queue_ms_p50 = percentile(queue, 0.5);
  s.tokens_per_s = static_cast<double>(s.output_tokens) / ((end - begin) / 1000);
}

}  // namespace

void serve(const CellInput& in, results::CellResult& out) {
  const bool timed = in.wants(Metric::latency);
  auto requests = make_requests(*in.workload(), in.items->items, in.cell->seed, in.experiment->folder);
  const std::size_t count = requests.size();
  Engine engine = warmed_engine(
      in, static_cast<int>(std::min<std::size_t>(count, static_cast<std::size_t>(std::max(1, in.experiment->batch)))));
  if (timed) touch(engine, in.items->items.front());
  const std::int64_t replays = engine.replays();
  std::optional<TimedPart> timed_part;
  if (timed) timed_part.emplace(engine.store().stream().device());
  StepLog log(engine, in.wants(Metric::parts), out);
  std::optional<PartEvents> events;
  if (in.wants(Metric::parts) && engine.store().stream().device() == Device::cuda)
    events.emplace(engine.store().stream());
  PartClock clock(events ? &*events : nullptr);
  // A step's time begins where the step before ended, so it includes the scheduler's own work.
  const auto lap = [&](auto note) {
    const PartClock::Step step = clock.take();
    note(1000 * step.seconds, step.parts);
  };
  SchedulerOptions how;
  how.prefill_chunk = in.experiment->prefill_chunk;
  how.preemption = in.workload()->recompute ? Preemption::recompute : Preemption::swap;
  std::vector<StopTexts> stops;
  for (std::size_t i = 0; i < count; ++i) stops.emplace_back(in.items->items[i % in.items->items.size()]);
  if (!in.workload()->ignore_eos) {
    how.ends = [&](int token) { return in.model->tokenizer->is_eos(token); };
    how.stops = [&](std::size_t request, const std::vector<int>& tokens) {
      return stops[request].found(tokens, *in.model->tokenizer);
    };
  }
  std::vector<Draws> draws;
  if (in.experiment->sampling.on()) {
    for (std::size_t i = 0; i < count; ++i)
      draws.emplace_back(in.experiment->sampling, in.cell->seed, in.items->items[i % in.items->items.size()]);
    how.choose = [&](std::size_t request, std::span<const float> logits) { return draws[request].next(logits); };
  }
  how.prompted = [&](double) { lap([&](double ms, const PartSeconds& parts) { log.prompt(ms, parts); }); };
  const Scheduler* running = nullptr;
  how.stepped = [&](double, const std::vector<std::int32_t>&) {  // prompts under way hold bytes too
    lap([&](double ms, const PartSeconds& parts) { log.decode(ms, parts, running->slots()); });
  };
  int done = 0;
  how.finished = [&](std::size_t) {
    if (in.progress) in.progress("serving", ++done, static_cast<int>(count));
  };
  Scheduler scheduler(engine, std::move(requests), how);
  running = &scheduler;
  while (!scheduler.done()) want_room(scheduler.iterate(), engine);
  log.finish(timed);
  if (timed_part) timed_part->note(out.summary);
  out.token_offsets.push_back(0);
  for (std::size_t i = 0; i < count; ++i) {
    const Served& served = scheduler.served()[i];
    out.samples.push_back(sample_of(in, i, served));
    if (timed) add_tokens(served, out);
    out.token_offsets.push_back(out.token_offsets.back() + static_cast<std::int64_t>(served.tokens.size()));
  }
  if (engine.replays() > replays) add_label(out.summary, "graph");
  summarize(in, {}, out);
  summarize_requests(scheduler.served(), timed, out);
}

}  // namespace kvlab
