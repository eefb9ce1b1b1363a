#include "store/reloads.hpp"

#include <algorithm>
#include <new>
#include <string>

#include "base/backend.hpp"
#include "base/device_op.hpp"

namespace kvlab {
namespace {

constexpr std::size_t word = sizeof(std::int32_t);
const CudaRuntime& runtime() { return require_cuda("work beside a stream").runtime; }

// A batch has room for half as many jobs again, so that the next one of about its size needs no memory.
std::int64_t most_in_batches(std::int64_t most_jobs) { return most_jobs + most_jobs / 2; }
std::size_t batch_bytes(std::int64_t jobs) { return static_cast<std::size_t>(5 * jobs + 3) * word; }

}  // namespace

std::size_t Reloads::bytes(std::int64_t most_jobs, int slots) {
  const auto most_batches = static_cast<std::size_t>(slots);  // each has a slot of its own
  return static_cast<std::size_t>(4 * most_jobs + 2 + slots) * word + batch_bytes(most_in_batches(most_jobs)) +
         most_batches * batch_bytes(0);
}

Reloads::Reloads(Stream main, std::int64_t most_jobs, int slots)
    : main_(main),
      side_(Device::cuda, true),
      planned_(runtime().new_event()),
      most_in_batches_(most_in_batches(most_jobs)),
      slots_(slots),
      jobs_(main, static_cast<std::size_t>(4 * most_jobs) * word),
      marks_(main, static_cast<std::size_t>(2 + slots) * word),
      known_(static_cast<std::int32_t*>(runtime().allocate_pinned(marks_.bytes()))),
      noted_(runtime().new_event()) {
  if (!known_) {
    const std::size_t bytes = marks_.bytes();
    runtime().delete_event(planned_);
    runtime().delete_event(noted_);
    throw NoRoom("got no pinned memory for the marks of sequences that wait for pages, wanted " +
                 std::to_string(bytes) + " bytes");
  }
  zero_memory(marks_.as<>(), marks_.bytes(), main_);
}

Reloads::~Reloads() {
  for (const auto& b : batches_) runtime().delete_event(b->done);
  runtime().delete_event(planned_);
  runtime().delete_event(noted_);
  runtime().free_pinned(known_);
}

void Reloads::plan_to(CudaStorePlace& a) {
  a.jobs = jobs_.as<std::int32_t>();
  a.counts = marks_.as<std::int32_t>();
  a.busy = a.counts + 2;
  plans_ = true;
}

Reloads::Batch& Reloads::idle(std::int64_t jobs) {
  Batch* least = nullptr;
  for (const auto& b : batches_)
    if (!b->running && b->jobs >= jobs && (!least || b->jobs < least->jobs)) least = b.get();
  if (least) return *least;
  std::erase_if(batches_, [](const auto& b) {
    if (b->running) return false;
    runtime().delete_event(b->done);
    return true;
  });
  std::int64_t left = most_in_batches_;
  for (const auto& b : batches_) left -= b->jobs;
  if (jobs > left) throw std::bad_alloc();
  auto fresh = std::make_unique<Batch>();
  fresh->jobs = std::min(jobs + jobs / 2, left);
  fresh->lists = StreamMemory(main_, batch_bytes(fresh->jobs));
  fresh->done = runtime().new_event();
  batches_.push_back(std::move(fresh));
  return *batches_.back();
}

CudaStoreLayer Reloads::with_list_of(const CudaStoreLayer& s, const Batch& b) {
  CudaStoreLayer of = s;
  of.returned_count = b.lists.as<std::int32_t>() + 4 * b.jobs + 2;
  of.returned = of.returned_count + 1;
  return of;
}

void Reloads::note() {
  if (!plans_ || notes_) return;
  copy_memory(known_, marks_.as<>(), marks_.bytes(), main_);
  runtime().record(noted_, main_.handle());
  notes_ = true;
}

bool Reloads::start(const CudaStoreLayer& s) {
  if (!plans_) return false;
  note();
  if (!runtime().passed(noted_)) synchronize(main_);
  notes_ = false;
  const std::int32_t count = known_[0];
  if (count == 0) return false;
  CudaStorePlace copies;
  Batch* batch = nullptr;
  try {
    batch = &idle(count);
  } catch (const std::bad_alloc&) {
    copies.jobs = jobs_.as<std::int32_t>();
    copies.counts = marks_.as<std::int32_t>();
    only_on_cuda<cuda_store::copy_placed>(s, copies, main_);
    only_on_cuda<cuda_store::take_back>(s, main_);
    zero_memory(marks_.as<>(), marks_.bytes(), main_);
    return true;
  }
  Batch& b = *batch;
  auto* jobs = b.lists.as<std::int32_t>();
  copies.jobs = jobs;
  copies.counts = jobs + 4 * b.jobs;
  zero_memory(copies.counts, 3 * word, main_);
  copy_memory(jobs, jobs_.as<>(), static_cast<std::size_t>(4 * count) * word, main_);
  copy_memory(copies.counts, marks_.as<>(), word, main_);
  zero_memory(marks_.as<>(), marks_.bytes(), main_);
  b.slots.assign(static_cast<std::size_t>(slots_), false);
  for (int slot = 0; slot < slots_; ++slot)
    b.slots[static_cast<std::size_t>(slot)] = known_[static_cast<std::size_t>(2 + slot)] != 0;
  runtime().record(planned_, main_.handle());
  runtime().wait(planned_, side_.get().handle());
  only_on_cuda<cuda_store::copy_placed>(with_list_of(s, b), copies, side_.get());
  runtime().record(b.done, side_.get().handle());
  b.running = true;
  return false;
}

template <class Which>
bool Reloads::end(const CudaStoreLayer& s, const Which& which) {
  bool some = false;
  for (const auto& b : batches_) {
    if (!b->running || !which(*b)) continue;
    runtime().wait(b->done, main_.handle());
    only_on_cuda<cuda_store::take_back>(with_list_of(s, *b), main_);
    b->running = false;
    some = true;
  }
  return some;
}

bool Reloads::collect(const CudaStoreLayer& s) {
  return end(s, [](const Batch& b) { return runtime().passed(b.done); });
}

bool Reloads::await(const CudaStoreLayer& s, const std::vector<std::int32_t>& slots) {
  return end(s, [&](const Batch& b) {
    return std::any_of(slots.begin(), slots.end(), [&](int slot) { return b.slots[static_cast<std::size_t>(slot)]; });
  });
}

bool Reloads::await_all(const CudaStoreLayer& s) {
  return end(s, [](const Batch&) { return true; });
}

bool Reloads::under_way(int slot) const {
  return std::any_of(batches_.begin(), batches_.end(),
                     [&](const auto& b) { return b->running && b->slots[static_cast<std::size_t>(slot)]; });
}

}  // namespace kvlab
