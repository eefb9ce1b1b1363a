#include "store/workspace.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <functional>
#include <limits>

namespace kvlab {
namespace {

constexpr std::size_t least_block = std::size_t{1} << 20;

}  // namespace

StoreWorkspace::StoreWorkspace(Ledger& ledger, Stream stream, std::int64_t most_scratch)
    : ledger_(&ledger), stream_(stream), grows_(most_scratch < 0) {
  add_block(grows_ ? least_block : static_cast<std::size_t>(most_scratch));
}

StoreWorkspace::~StoreWorkspace() {
  for (auto& b : blocks_) ledger_->hold(Tier::device, Tag::workspace, -static_cast<std::int64_t>(b.bytes));
}

void StoreWorkspace::add_block(std::size_t bytes) {
  ++moves_;
  blocks_.push_back({StreamMemory(stream_, bytes), bytes});
  ledger_->hold(Tier::device, Tag::workspace, static_cast<std::int64_t>(bytes));
}

void* StoreWorkspace::scratch(const char* tag, std::size_t bytes) {
  bytes = std::max<std::size_t>(64, (bytes + 63) & ~std::size_t{63});
  if (const Block& b = blocks_.back(); b.used + bytes > b.bytes) {
    if (!grows_)
      throw NoRoom("got " + std::to_string(b.used + bytes) + " bytes of a callback's scratch with '" + tag +
                   "', wanted at most the " + std::to_string(b.bytes) + " that device_memory keeps for it");
    add_block(std::max(bytes, least_block));
  }
  Block& b = blocks_.back();
  void* p = b.memory.as<>() + b.used;
  b.used += bytes;
  return p;
}

void StoreWorkspace::refuse_upload(const char* tag) {
  throw Error(Errc::plugin, std::string("got an upload of '") + tag +
                                "' in a decode step of a policy that promises capturable(true), wanted a "
                                "Workspace::constant taken in attach, or counters of the device (LayerKv::steps): a "
                                "graph would repeat this step's numbers");
}

const void* StoreWorkspace::upload(const char* tag, const void* from, std::size_t bytes) {
  if (in_graph_) refuse_upload(tag);
  void* to = scratch(tag, bytes);
  copy_memory(to, from, bytes, stream_);
  return to;
}

const void* StoreWorkspace::constant(const char*, const void* from, std::size_t bytes) {
  StreamMemory to(stream_, std::max<std::size_t>(bytes, 1));
  copy_memory(to.as<>(), from, bytes, stream_);
  ledger_->hold(Tier::device, Tag::workspace, static_cast<std::int64_t>(bytes));
  constants_.push_back(std::move(to));
  return constants_.back().as<>();
}

void StoreWorkspace::reset() {
  if (blocks_.size() > 1) {
    // One block of the whole size serves the next callback without growing again.
    std::size_t total = 0;
    for (auto& b : blocks_) total += b.bytes;
    ledger_->hold(Tier::device, Tag::workspace, -static_cast<std::int64_t>(total));
    blocks_.clear();
    add_block(total);
  }
  for (auto& b : blocks_) b.used = 0;
}

StoreWorkspace::State StoreWorkspace::take(const char* tag, std::size_t bytes_per_slot, int slots) {
  State s;
  s.tag = tag;
  s.stride = bytes_per_slot;
  s.slots = slots;
  if (stream_.device() == Device::cpu)
    s.mapped = MappedArray(s.bytes());
  else
    s.memory = StreamMemory(stream_, static_cast<std::size_t>(s.bytes()));
  return s;
}

std::size_t StoreWorkspace::left() const {
  std::size_t used = 0;
  for (const Block& b : blocks_) used += b.used;
  return (grows_ ? std::numeric_limits<std::size_t>::max() : blocks_.back().bytes) - used;
}

bool StoreWorkspace::is_scratch(const void* data) const {
  const auto* at = static_cast<const std::byte*>(data);
  return std::any_of(blocks_.begin(), blocks_.end(), [&](const Block& b) {
    const std::byte* begin = b.memory.as<>();
    return !std::less<>()(at, begin) && std::less<>()(at, begin + b.bytes);
  });
}

void* StoreWorkspace::state(const char* tag, std::size_t bytes_per_slot, int slots) {
  states_.push_back(take(tag, bytes_per_slot, slots));
  const State& s = states_.back();
  if (s.memory) zero_memory(s.data(), s.memory.bytes(), stream_);
  ledger_->hold(Tier::device, Tag::scores, s.bytes());
  return s.data();
}

void* StoreWorkspace::room(const char* tag, std::size_t bytes) {
  rooms_.push_back(take(tag, bytes, 1));
  ledger_->hold(Tier::device, Tag::workspace, rooms_.back().bytes());
  return rooms_.back().data();
}

void StoreWorkspace::clear_slot(int slot) {
  for (auto& s : states_) zero_memory(s.data() + s.stride * static_cast<std::size_t>(slot), s.stride, stream_);
}

std::size_t StoreWorkspace::slot_bytes() const {
  std::size_t sum = 0;
  for (auto& s : states_) sum += s.stride;
  return sum;
}

std::int64_t StoreWorkspace::state_bytes() const {
  std::int64_t sum = 0;
  for (auto& s : states_) sum += s.bytes();
  return sum;
}

std::int64_t StoreWorkspace::room_bytes() const {
  std::int64_t sum = 0;
  for (auto& r : rooms_) sum += r.bytes();
  return sum;
}

std::int64_t StoreWorkspace::constant_bytes() const {
  std::int64_t sum = 0;
  for (auto& c : constants_) sum += static_cast<std::int64_t>(c.bytes());
  return sum;
}

void StoreWorkspace::save_slot(int slot, std::byte* out) const {
  for (auto& s : states_) {
    copy_memory(out, s.data() + s.stride * static_cast<std::size_t>(slot), s.stride, stream_);
    out += s.stride;
  }
  synchronize(stream_);
}

void StoreWorkspace::load_slot(int slot, const std::byte* from) {
  for (auto& s : states_) {
    copy_memory(s.data() + s.stride * static_cast<std::size_t>(slot), from, s.stride, stream_);
    from += s.stride;
  }
}

}  // namespace kvlab
