// Saves a sequence's cache and restores it.
#include <kvlab/error.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

#include "store/cpu_store.hpp"

namespace kvlab {
namespace {

constexpr std::uint64_t magic = 0x35766b62616c766bULL;  // "kvlabkv5"
constexpr std::uint8_t absent = 0xff;                   // in place of a codec

// Every step is a bijection of the sum so far, so one changed byte always changes the sum.
std::uint64_t checksum(const std::byte* data, std::size_t bytes) {
  std::uint64_t sum = bytes;
  for (std::size_t at = 0; at < bytes; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + at, std::min<std::size_t>(8, bytes - at));
    sum = (sum ^ word) * 0x9e3779b97f4a7c15ULL;
    sum ^= sum >> 32;
  }
  return sum;
}

class Writer {
 public:
  explicit Writer(std::vector<std::byte>& out) : out_(out) {}
  void bytes(const void* p, std::size_t n) {
    const auto* b = static_cast<const std::byte*>(p);
    out_.insert(out_.end(), b, b + n);
  }
  template <class T>
  void put(const T& v) {
    bytes(&v, sizeof v);
  }

 private:
  std::vector<std::byte>& out_;
};

class Reader {
 public:
  Reader(const std::byte* data, std::size_t size) : data_(data), size_(size) {}
  const std::byte* bytes(std::size_t n) {
    if (n > size_ - at_)
      throw Error(Errc::data, "got a saved cache that ends at byte " + std::to_string(size_) + ", wanted more");
    const std::byte* p = data_ + at_;
    at_ += n;
    return p;
  }
  template <class T>
  T get() {
    T v;
    std::memcpy(&v, bytes(sizeof v), sizeof v);
    return v;
  }

  // Reads a number from `least` to `most`.
  std::int32_t number(const char* what, std::int64_t least, std::int64_t most) {
    const auto v = get<std::int32_t>();
    if (v < least || v > most)
      throw Error(Errc::data, std::string("saved cache: got ") + what + " " + std::to_string(v) + ", wanted " +
                                  std::to_string(least) + " to " + std::to_string(most));
    return v;
  }
  std::vector<std::int32_t> numbers(std::size_t n) {
    const std::byte* from = bytes(n * 4);
    std::vector<std::int32_t> out(n);
    if (n > 0) std::memcpy(out.data(), from, n * 4);
    return out;
  }
  std::size_t left() const { return size_ - at_; }

 private:
  const std::byte* data_;
  std::size_t size_, at_ = 0;
};

// The properties that the restoring store must share with the store that saved.
std::vector<std::int64_t> kind_of(const StoreOptions& o, std::size_t state_bytes) {
  const Shape& s = o.shape;
  std::vector<std::int64_t> kind{s.layers,
                                 s.kv_heads,
                                 s.head_dim,
                                 s.page_size,
                                 static_cast<std::int64_t>(s.dtype),
                                 static_cast<std::int64_t>(o.rope),
                                 static_cast<std::int64_t>(o.summary),
                                 o.summary_bits,
                                 static_cast<std::int64_t>(o.token_state.size()),
                                 static_cast<std::int64_t>(o.archive),
                                 static_cast<std::int64_t>(state_bytes)};
  const auto add = [&](const CodecSpec& c) {
    for (const CodecSide side : {c.k, c.v}) {
      kind.push_back(side.bits);
      kind.push_back(static_cast<std::int64_t>(side.axis));
      kind.push_back(side.group);
      kind.push_back(static_cast<std::int64_t>(side.kind));
    }
  };
  add(o.host_codec);
  if (o.host_codec.packs) kind.push_back(1);
  for (const CodecSpec& c : o.codecs) add(c);
  return kind;
}

}  // namespace

std::vector<std::byte> CpuStore::save(int slot) const {
  const Shape& s = options_.shape;
  std::vector<std::byte> out;
  Writer w(out);
  w.put(magic);
  w.put(std::uint64_t{0});  // place of the checksum over the bytes after it
  const auto kind = kind_of(options_, workspace_.slot_bytes());
  w.put(static_cast<std::uint64_t>(kind.size()));
  for (std::int64_t v : kind) w.put(v);
  w.put(position(slot));
  w.put(steps(slot));
  for (int layer = 0; layer < s.layers; ++layer)
    for (int head = 0; head < s.kv_heads; ++head) {
      const int n = length(layer, slot, head), pages = (n + s.page_size - 1) / s.page_size;
      w.put(std::int32_t{n});
      for (int page = 0; page < pages; ++page) {
        for (Tier tier : {Tier::device, Tier::host}) {
          const PageEntry& e = entries(tier, layer, slot, head)[page];
          w.put(static_cast<std::uint8_t>(e.frame == null_frame ? absent : e.codec));
          if (e.frame != null_frame && tier == Tier::host && packs()) w.put(e.packed);
          if (e.frame != null_frame) w.bytes(arena(tier).at(e.frame), static_cast<std::size_t>(layout(tier, e).bytes));
        }
        if (summary_bytes_)
          w.bytes(const_cast<CpuStore*>(this)->summary_at(layer, slot, head, page),
                  static_cast<std::size_t>(summary_bytes_));
      }
      if (!options_.archive) continue;
      w.put(std::int32_t{archived(layer, slot, head)});
      const PageEntry* archive = archive_entries(layer, slot, head);
      for (int page = 0; page * s.page_size < archived(layer, slot, head); ++page)
        w.bytes(host_.at(archive[page].frame), static_cast<std::size_t>(host_layout_.bytes));
    }
  const std::size_t at = out.size();
  out.resize(at + workspace_.slot_bytes());
  workspace_.save_slot(slot, out.data() + at);
  const SpillState spill = spill_state(slot);
  w.put(std::int32_t{spill.spilled});
  w.put(spill.room);
  for (const SpillState::OfLayer& of : spill.layers)
    for (const std::int32_t v : {std::int32_t{of.placed}, of.step, of.room, of.spare.leave, of.spare.write}) w.put(v);
  const auto mine = [&](const Pending& p) { return p.slot == slot; };
  w.put(static_cast<std::int32_t>(std::count_if(pending_.begin(), pending_.end(), mine)));
  for (const Pending& p : pending_) {
    if (!mine(p)) continue;
    const Edit& e = p.edit;
    const std::int32_t fields[] = {e.verb,         e.layer,     static_cast<std::int32_t>(e.tier),
                                   e.codec,        p.due,       static_cast<std::int32_t>(e.list.index.extent[2]),
                                   e.pins.first,   e.pins.last, e.pins.newest_page,
                                   e.room,         e.reuse,     e.when.kind == Deadline::sequence,
                                   p.heads ? 1 : 0};
    for (std::int32_t v : fields) w.put(v);
    const IndexList& list = p.edit.list;
    const std::int64_t row = p.lasts ? slot : 0;
    for (int head = 0; head < s.kv_heads; ++head) w.put(list.count(row, head));
    for (int head = 0; head < s.kv_heads; ++head)
      for (std::int64_t i = 0; i < list.index.extent[2]; ++i)  // entries past the count are undefined
        w.put(i < list.count(row, head) ? list.index(row, head, i) : std::int32_t{0});
    if (p.heads) w.bytes(p.heads.as<>(), p.heads.bytes());
  }
  const std::uint64_t sum = checksum(out.data() + 16, out.size() - 16);
  std::memcpy(out.data() + 8, &sum, 8);
  return out;
}

Fit CpuStore::restore(int slot, const std::vector<std::byte>& snapshot) { return load(slot, snapshot, true); }

Fit CpuStore::load(int slot, const std::vector<std::byte>& snapshot, bool goes_on) {
  close(slot);
  used_[static_cast<std::size_t>(slot)] = true;
  Fit fit = Fit::ok;
  const auto empty = [&] {
    close(slot);
    used_[static_cast<std::size_t>(slot)] = true;
  };
  try {
    read_snapshot(slot, snapshot, fit);
    if (fit == Fit::ok && goes_on) {
      resume_spilling(slot, has_pages_below(slot));
      // Where no row waits, nobody else would bring the pages before a step reads them.
      if (!keeps_reloads()) fit = bring_pages(slot);
    }
  } catch (...) {
    empty();
    throw;
  }
  if (fit != Fit::ok) empty();
  return fit;
}

bool CpuStore::has_pages_below(int slot) const {
  const Shape& s = options_.shape;
  for (int layer = 0; layer < s.layers; ++layer)
    for (int head = 0; head < s.kv_heads; ++head)
      for (int page = 0; page * s.page_size < length(layer, slot, head); ++page)
        if (entries(Tier::device, layer, slot, head)[page].frame == null_frame) return true;
  return false;
}

bool CpuStore::has_tail_below(int slot) const {
  const Shape& s = options_.shape;
  for (int layer = 0; layer < s.layers; ++layer)
    for (int head = 0; head < s.kv_heads; ++head)
      if (const int n = length(layer, slot, head);
          n % s.page_size > 0 && entries(Tier::host, layer, slot, head)[n / s.page_size].frame != null_frame)
        return true;
  return false;
}

std::shared_ptr<CpuStore> CpuStore::for_one_slot(StoreOptions options, std::size_t state_bytes) {
  options.shape.max_slots = 1;
  options.device_limit = -1;
  options.host_limit = std::numeric_limits<std::int64_t>::max();  // room for what the slot has
  auto out = std::make_shared<CpuStore>(options);
  if (state_bytes > 0) out->workspace_.state("slot", state_bytes, 1);
  return out;
}

Store::Aside CpuStore::set_aside(int slot) const {
  auto out = for_one_slot(options_, workspace_.slot_bytes());
  if (out->load(0, save(slot), false) != Fit::ok) throw Error(Errc::internal, "a copy of a slot does not fit");
  return out;
}

Fit CpuStore::bring_back(int slot, const Aside& cache) { return restore(slot, cache->save(0)); }

template <class Reader>
Fit CpuStore::read_archive(int layer, int slot, int head, Reader& r) {
  const Shape& s = options_.shape;
  const int n = r.number("tokens of an archive", 0, static_cast<std::int64_t>(pages_per_head_) * s.page_size);
  const int pages = (n + s.page_size - 1) / s.page_size;
  if (!take_archive(layer, slot, head, n)) return Fit::out_of_memory;
  const auto bytes = static_cast<std::size_t>(host_layout_.bytes);
  for (int page = 0; page < pages; ++page)
    std::memcpy(host_.at(archive_entries(layer, slot, head)[page].frame), r.bytes(bytes), bytes);
  return Fit::ok;
}

template <class Reader>
Store::SpillState CpuStore::read_spill_state(Reader& r) const {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  const Shape& s = options_.shape;
  SpillState out{.spilled = r.number("spilled", 0, 1) != 0,
                 .room = r.number("pages that stay", 0, static_cast<std::int64_t>(pages_per_head_)),
                 .layers = {}};
  for (int layer = 0; layer < s.layers; ++layer) {
    SpillState::OfLayer of;
    of.placed = r.number("placed", 0, 1) != 0;
    of.step = r.number("step of a place edit", 0, s.max_tokens);
    of.room = r.number("room of a place edit", -most - 1, most);
    of.spare.leave = r.number("pages that may leave", 0, most);
    of.spare.write = r.number("pages to write", 0, most);
    out.layers.push_back(of);
  }
  return out;
}

void CpuStore::read_snapshot(int slot, const std::vector<std::byte>& snapshot, Fit& fit) {
  const Shape& s = options_.shape;
  Reader r(snapshot.data(), snapshot.size());
  if (r.get<std::uint64_t>() != magic) throw Error(Errc::data, "got bytes that are no saved cache");
  if (r.get<std::uint64_t>() != checksum(snapshot.data() + 16, snapshot.size() - 16))
    throw Error(Errc::data, "got a saved cache whose checksum differs, wanted it as it was saved");
  const auto kind = kind_of(options_, workspace_.slot_bytes());
  bool same = r.get<std::uint64_t>() == kind.size();
  for (std::size_t i = 0; same && i < kind.size(); ++i) same = r.get<std::int64_t>() == kind[i];
  if (!same)
    throw Error(Errc::data, "got a saved cache of another model, page size, codec or policy, wanted one like this");
  note_brought(slot);
  position_[static_cast<std::size_t>(slot)] = r.number("position", 0, s.max_tokens);
  step_[static_cast<std::size_t>(slot)] = r.number("steps", 0, s.max_tokens);
  for (int layer = 0; layer < s.layers; ++layer)
    for (int head = 0; head < s.kv_heads; ++head) {
      const int n = r.number("tokens of a head", 0, static_cast<std::int64_t>(pages_per_head_) * s.page_size);
      const int pages = (n + s.page_size - 1) / s.page_size;
      // The length is set first, so that close() frees the pages of a snapshot that ends early.
      lengths_[head_index(layer, slot, head)] = n;
      if (summary_bytes_) ledger_.hold(Tier::device, Tag::summaries, pages * summary_bytes_);
      for (int page = 0; page < pages; ++page) {
        bool present = false;
        for (Tier tier : {Tier::device, Tier::host}) {
          const std::uint8_t codec = r.get<std::uint8_t>();
          if (codec == absent) continue;
          const int pages_below = lower_pages_[head_index(layer, slot, head)];
          if (codec >= (tier == Tier::device ? layouts_.size()
                        : options_.archive   ? 0
                                             : 1) ||
              (codec > 0 && pages_below < page))
            throw Error(Errc::data,
                        "saved cache: got codec " + std::to_string(codec) + ", wanted a declared one, in order");
          PageEntry& e = entries(tier, layer, slot, head)[page];
          while (!take(tier, e, codec))
            if (tier == Tier::host || !spill_one()) {  // others may have pages to spare
              fit = Fit::out_of_memory;
              return;
            }
          lower_pages_[head_index(layer, slot, head)] += codec > 0;
          if (tier == Tier::host && packs()) e.packed = r.get<std::uint8_t>();
          e.tokens = static_cast<std::uint16_t>(std::min(s.page_size, n - page * s.page_size));
          const std::size_t bytes = static_cast<std::size_t>(layout(tier, e).bytes);
          std::memcpy(arena(tier).at(e.frame), r.bytes(bytes), bytes);
          present = true;
        }
        if (!present) throw Error(Errc::data, "saved cache: got a page in no tier");
        if (summary_bytes_) {
          const std::size_t bytes = static_cast<std::size_t>(summary_bytes_);
          std::memcpy(summary_at(layer, slot, head, page), r.bytes(bytes), bytes);
        }
      }
      if (options_.archive) fit = read_archive(layer, slot, head, r);
      if (fit != Fit::ok) return;
    }
  workspace_.load_slot(slot, r.bytes(workspace_.slot_bytes()));
  set_spill_state(slot, read_spill_state(r));
  const std::int32_t waiting = r.number("edits to come", 0, std::numeric_limits<std::int32_t>::max());
  for (std::int32_t i = 0; i < waiting; ++i) {
    Edit e;
    e.verb = static_cast<Edit::Verb>(r.number("verb", 0, Edit::fetch));
    if (e.verb == Edit::attend || e.verb == Edit::attend_tokens || e.verb == Edit::evict_surplus ||
        e.verb == Edit::archive || e.verb == Edit::store_as || (e.verb == Edit::place && !options_.host_pages) ||
        (e.verb == Edit::fetch && !options_.archive))
      throw Error(Errc::data, "saved cache: got an edit to come that this cache cannot carry out");
    e.layer = r.number("layer", 0, s.layers - 1);
    e.tier = static_cast<Tier>(r.number("tier", 0, static_cast<int>(Tier::host)));
    e.codec = r.number("codec", 0, static_cast<std::int32_t>(options_.codecs.size()) - 1);
    const int due = r.get<std::int32_t>();
    const std::int64_t room = r.number("list room", 0, std::numeric_limits<std::int32_t>::max());
    e.pins.first = r.get<std::int32_t>();
    e.pins.last = r.get<std::int32_t>();
    e.pins.newest_page = r.number("newest page", 0, 1) != 0;
    e.room = r.get<std::int32_t>();
    e.reuse = r.number("reuse", 0, 1) != 0;
    const bool of_sequence = r.number("deadline", 0, 1) != 0;
    if (of_sequence && (e.verb != Edit::place || !options_.pauses))
      throw Error(Errc::data, "saved cache: got pages that a row waits for, wanted none: no row of this cache waits");
    if (of_sequence) e.when = {Deadline::sequence};
    const bool marked = r.number("marks", 0, 1) != 0;
    const std::vector<std::int32_t> count = r.numbers(static_cast<std::size_t>(s.kv_heads));
    const std::vector<std::int32_t> index = r.numbers(static_cast<std::size_t>(s.kv_heads * room));
    if (std::any_of(count.begin(), count.end(), [&](std::int32_t c) { return c < 0 || c > room; }))
      throw Error(Errc::data, "saved cache: got an edit to come whose list is longer than its room");
    e.list.index.extent = {1, s.kv_heads, room};
    e.list.count.extent = {1, s.kv_heads};
    const auto* marks =
        marked ? reinterpret_cast<const std::uint8_t*>(r.bytes(static_cast<std::size_t>(s.kv_heads))) : nullptr;
    pending_.push_back(pending(e, slot, due, index.data(), count.data(), marks, stream_, stream_));
  }
  if (r.left() > 0) throw Error(Errc::data, "got a saved cache with bytes behind its end");
}

}  // namespace kvlab
