// How CudaStore gives edits to the device.
#include <algorithm>
#include <kvlab/error.hpp>
#include <string>

#include "base/backend.hpp"
#include "store/cuda_store.hpp"

namespace kvlab {
namespace {

[[noreturn]] void bad(const Edit& e, const std::string& what) {
  throw Error(Errc::plugin, "edit of layer " + std::to_string(e.layer) + ": " + what);
}

template <class Args>
Args list_of(const Edit& e, const std::int32_t* slots, std::size_t rows, unsigned long long number) {
  Args a;
  a.slots = slots;
  a.rows = static_cast<int>(rows);
  a.index = e.list.index;
  a.count = e.list.count;
  a.edit = number;
  return a;
}

}  // namespace

void CudaStore::check_list(const Edit& e, std::size_t rows) const {
  const Shape& s = options_.shape;
  if (e.layer < 0 || e.layer >= s.layers) bad(e, "got that layer, wanted 0 to " + std::to_string(s.layers - 1));
  const auto& index = e.list.index.extent;
  const auto& count = e.list.count.extent;
  const std::int64_t wanted = static_cast<std::int64_t>(rows);
  if (index[0] < wanted || count[0] < wanted || index[1] < s.kv_heads || count[1] < s.kv_heads)
    bad(e, "got a list of fewer rows or heads than the callback has, wanted [row, kv_head]");
}

// Rows keep their own clocks, so each row waits on its own.
void CudaStore::defer(const Edit& e, const std::vector<std::int32_t>& slots) {
  const std::int64_t heads = options_.shape.kv_heads, room = e.list.index.extent[2];
  if (e.list.index.stride[1] != room || e.list.index.stride[2] != 1 || e.list.count.stride[1] != 1)
    throw Error(Errc::unsupported, "got a strided list of an edit to come, wanted a dense one", "the cache on CUDA");
  for (std::size_t row = 0; row < slots.size(); ++row) {
    Pending p;
    p.edit = e;
    p.slot = slots[row];
    p.due = steps(slots[row]) + e.when.steps;
    const auto bytes = [](std::int64_t n) { return static_cast<std::size_t>(n) * sizeof(std::int32_t); };
    p.index = StreamMemory(stream_, bytes(std::max<std::int64_t>(1, heads * room)));
    p.count = StreamMemory(stream_, bytes(heads));
    const auto r = static_cast<std::int64_t>(row);
    copy_memory(p.index.as<>(), e.list.index.data + r * e.list.index.stride[0], bytes(heads * room), stream_);
    copy_memory(p.count.as<>(), e.list.count.data + r * e.list.count.stride[0], bytes(heads), stream_);
    p.edit.list.index = View<std::int32_t, 3>::dense(p.index.as<std::int32_t>(), {1, heads, room});
    p.edit.list.count = View<std::int32_t, 2>::dense(p.count.as<std::int32_t>(), {1, heads});
    p.edit.when = {};
    pending_.push_back(std::move(p));
  }
}

Applied CudaStore::apply(const std::vector<Edit>& edits, const std::vector<std::int32_t>& slots) {
  Applied total;
  for (const Edit& e : edits) {
    if (e.verb == Edit::attend || e.verb == Edit::attend_tokens) continue;
    check_list(e, slots.size());
    total.changed = -1;
    if (e.when.kind == Deadline::steps_from_now && e.when.steps > 0) {
      defer(e, slots);
      continue;
    }
    if (const Applied one = apply_now(e, slots); one.fit != Fit::ok) {
      total.fit = one.fit;
      break;
    }
  }
  return total;
}

Applied CudaStore::apply_now(const Edit& e, const std::vector<std::int32_t>& slots) {
  Applied done{Fit::ok, -1};
  if (slots.empty()) return done;
  stale_ = true;
  const auto number = ++edit_;
  const auto page_edit = [&](CudaStorePageEdit::Verb verb) {
    auto a = list_of<CudaStorePageEdit>(e, rows_of(slots), slots.size(), number);
    a.verb = verb;
    a.tier = e.tier;
    done.fit = edit_pages(a, e.layer, slots);
  };
  const auto list = list_of<CudaStoreList>(e, rows_of(slots), slots.size(), number);
  switch (e.verb) {
    case Edit::evict: ops().evict(layer(e.layer), list, stream_.handle()); break;
    case Edit::evict_rest:
      ops().keep(layer(e.layer), list, stream_.handle());
      for (int slot : slots)
        bound(e.layer, slot) =
            static_cast<std::int32_t>(std::min<std::int64_t>(bound(e.layer, slot), list.index.extent[2]));
      break;
    case Edit::move: ops().swap(layer(e.layer), list, stream_.handle()); break;
    case Edit::offload:
      if (!open_host_tier()) return {Fit::out_of_memory, 0};
      page_edit(CudaStorePageEdit::offload);
      break;
    case Edit::recall: page_edit(CudaStorePageEdit::recall); break;
    case Edit::drop:
      if (e.tier == Tier::disk) bad(e, "got a drop on the disk tier, wanted device or host");
      page_edit(CudaStorePageEdit::drop);
      break;
    case Edit::encode:
      if (e.codec != 0) bad(e, "got codec " + std::to_string(e.codec) + ", wanted one that the policy declares");
      break;  // every page is of the one codec already
    default: bad(e, "got an unknown verb");
  }
  return done;
}

// Frames that an offload or a recall would take, from what the device holds now.
std::int64_t CudaStore::frames_missing(const CudaStorePageEdit& e, int index,
                                       const std::vector<std::int32_t>& slots) const {
  const Shape& s = options_.shape;
  std::int64_t missing = 0;
  std::vector<std::int32_t> list;
  for (std::size_t row = 0; row < slots.size(); ++row) {
    const auto target = entries(e.verb == CudaStorePageEdit::offload ? 1 : 0, slots[row]);
    for (int head = 0; head < s.kv_heads; ++head) {
      const int n = lengths_[head_index(index, slots[row], head)], pages = (n + s.page_size - 1) / s.page_size;
      const auto* of = target.data() + (static_cast<std::size_t>(index * s.kv_heads + head)) * pages_per_head_;
      if (e.verb == CudaStorePageEdit::recall_all) {
        missing += std::count_if(of, of + pages, [](const PageEntry& x) { return x.frame == null_frame; });
        continue;
      }
      std::int32_t count = 0;
      const auto r = static_cast<std::int64_t>(row);
      copy_memory(&count, &e.count(r, head), sizeof count, stream_);
      synchronize(stream_);
      count = static_cast<std::int32_t>(std::clamp<std::int64_t>(count, 0, e.index.extent[2]));
      list.resize(static_cast<std::size_t>(count));
      for (std::int32_t i = 0; i < count; ++i)
        copy_memory(&list[static_cast<std::size_t>(i)], &e.index(r, head, i), sizeof(std::int32_t), stream_);
      synchronize(stream_);
      missing += std::count_if(list.begin(), list.end(), [&](std::int32_t page) {
        return page >= 0 && page < pages && of[page].frame == null_frame;
      });
    }
  }
  return missing;
}

Fit CudaStore::edit_pages(CudaStorePageEdit e, int index, const std::vector<std::int32_t>& slots) {
  const Shape& s = options_.shape;
  if (!host_arena_.data()) return Fit::ok;  // nothing ever left the device
  if (e.verb != CudaStorePageEdit::drop) {
    const std::int64_t pages = (max_length(index, slots) + s.page_size - 1) / s.page_size;
    const std::int64_t a_head = e.verb == CudaStorePageEdit::recall_all ? pages : std::min(pages, e.index.extent[2]);
    const std::int64_t most = a_head * e.rows * s.kv_heads;
    if (most == 0) return Fit::ok;
    const Tier to = e.verb == CudaStorePageEdit::offload ? Tier::host : Tier::device;
    if (!reserve(to, most) && !reserve(to, frames_missing(e, index, slots))) return Fit::out_of_memory;
    const std::size_t bytes = static_cast<std::size_t>(1 + 3 * most) * sizeof(std::int32_t);
    if (jobs_.bytes() < bytes) jobs_ = StreamMemory(stream_, 2 * bytes);
    e.job_count = jobs_.as<std::int32_t>();
    e.jobs = e.job_count + 1;
    zero_memory(e.job_count, sizeof(std::int32_t), stream_);
  }
  ops().page_edit(layer(index), e, stream_.handle());
  stale_ = true;
  return Fit::ok;
}

Fit CudaStore::recall_all(int index, int slot) {
  CudaStorePageEdit e;
  const std::vector<std::int32_t> slots{slot};
  e.slots = rows_of(slots);
  e.rows = 1;
  e.verb = CudaStorePageEdit::recall_all;
  e.edit = ++edit_;
  return edit_pages(e, index, slots);
}

IndexList CudaStore::resolve_attend(const Edit& e, const std::vector<std::int32_t>& slots, Workspace& w) {
  const Shape& s = options_.shape;
  check_list(e, slots.size());
  const std::int64_t rows = static_cast<std::int64_t>(slots.size());
  auto a = list_of<CudaStoreAttend>(e, rows_of(slots), slots.size(), ++edit_);
  a.pins = e.pins;
  a.unit = e.verb == Edit::attend ? s.page_size : 1;
  a.most = static_cast<int>(pages_per_head_) * (s.page_size / a.unit);
  // Whatever the length, for graphs.
  const std::int64_t pinned = std::int64_t{std::max(0, e.pins.first)} + std::max(0, e.pins.last) + 2 * s.page_size;
  const std::int64_t room = a.unit == 1 ? std::min<std::int64_t>(a.most, e.list.index.extent[2] + pinned) : a.most;
  IndexList out;
  out.index = take_scratch<std::int32_t>(w, "attend", {rows, s.kv_heads, room});
  out.count = take_scratch<std::int32_t>(w, "attend", {rows, s.kv_heads});
  a.out = out.index;
  a.out_count = out.count;
  ops().attend(layer(e.layer), a, stream_.handle());
  stale_ = true;
  return out;
}

}  // namespace kvlab
