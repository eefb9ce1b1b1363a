// The Workspace that callbacks get: a scratch stack that is emptied after each callback, and per-slot state.
#pragma once
#include <kvlab/workspace.hpp>

#include <memory>
#include <string>
#include <vector>

#include "base/memory_map.hpp"
#include "store/ledger.hpp"

namespace kvlab {

class StoreWorkspace final : public Workspace {
 public:
  explicit StoreWorkspace(Ledger& ledger) : ledger_(&ledger) {}
  ~StoreWorkspace() override;

  void* scratch(const char* tag, std::size_t bytes) override;
  void* state(const char* tag, std::size_t bytes_per_slot, int slots) override;

  void reset();               // scratch is free again; keeps the memory of the largest use
  void clear_slot(int slot);  // zero the slot's state
  std::size_t slot_bytes() const;
  std::int64_t state_bytes() const;                // of all slots
  void save_slot(int slot, std::byte* out) const;  // slot_bytes()
  void load_slot(int slot, const std::byte* from);

 private:
  struct Block {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes = 0, used = 0;
  };
  struct State {
    std::string tag;
    MappedArray memory;
    std::size_t stride = 0;
    int slots = 0;
  };
  Ledger* ledger_;
  std::vector<Block> blocks_;
  std::vector<State> states_;
};

}  // namespace kvlab
