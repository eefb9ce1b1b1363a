// The Workspace that callbacks get: a scratch stack, which is emptied after a callback or some of them, and per-slot
// state. Both are memory of the stream's device.
#pragma once
#include <kvlab/workspace.hpp>

#include <string>
#include <vector>

#include "base/memory_map.hpp"
#include "base/stream_memory.hpp"
#include "store/ledger.hpp"

namespace kvlab {

class StoreWorkspace final : public Workspace {
 public:
  // most_scratch: bytes of scratch, which are taken at once; -1 = as much as callbacks ask for.
  StoreWorkspace(Ledger& ledger, Stream stream, std::int64_t most_scratch = -1);
  ~StoreWorkspace() override;

  void* scratch(const char* tag, std::size_t bytes) override;  // NoRoom beyond most_scratch
  void* state(const char* tag, std::size_t bytes_per_slot, int slots) override;
  const void* upload(const char* tag, const void* from, std::size_t bytes) override;  // Errc::plugin in a graph's step
  const void* constant(const char* tag, const void* from, std::size_t bytes) override;
  void* room(const char* tag, std::size_t bytes) override;

  void in_graph(bool yes) { in_graph_ = yes; }  // whether a graph holds the step that is running, or is to hold it
  [[noreturn]] static void refuse_upload(const char* tag);
  void reset();                                  // frees all scratch; keeps the memory of the largest use
  std::size_t left() const;                      // bytes of scratch that no callback has taken yet
  bool is_scratch(const void* data) const;       // whether it lies in memory that scratch takes now
  void clear_slot(int slot);                     // zeroes the slot's state
  std::int64_t moves() const { return moves_; }  // blocks allocated; each voids the addresses of earlier callbacks
  std::size_t slot_bytes() const;
  std::int64_t state_bytes() const;  // bytes of state of all slots
  std::int64_t constant_bytes() const;
  std::int64_t room_bytes() const;
  void save_slot(int slot, std::byte* out) const;  // out: slot_bytes() of host memory
  void load_slot(int slot, const std::byte* from);

 private:
  struct Block {
    StreamMemory memory;
    std::size_t bytes = 0, used = 0;
  };
  struct State {
    std::string tag;
    MappedArray mapped;   // on the CPU, where only touched pages are resident
    StreamMemory memory;  // on a GPU
    std::size_t stride = 0;
    int slots = 0;
    std::byte* data() const { return memory ? memory.as<>() : mapped.data(); }
    std::int64_t bytes() const { return static_cast<std::int64_t>(stride) * slots; }
  };
  void add_block(std::size_t bytes);
  State take(const char* tag, std::size_t bytes_per_slot, int slots);

  Ledger* ledger_;
  Stream stream_;
  bool grows_;  // scratch takes further blocks
  bool in_graph_ = false;
  std::int64_t moves_ = 0;
  std::vector<Block> blocks_;
  std::vector<State> states_;
  std::vector<StreamMemory> constants_;
  std::vector<State> rooms_;
};

}  // namespace kvlab
