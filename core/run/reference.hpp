// The full cache's answers to items: its own greedy answer (or the forced tokens) and the logits of every answer token.
// Later cells use them again. The logits lie in a temporary file without a name, in TMPDIR or /tmp, so that memory
// stays small.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "run/items.hpp"

namespace kvlab {

class ReferenceCache {
 public:
  ReferenceCache() = default;
  ReferenceCache(const ReferenceCache&) = delete;
  ReferenceCache& operator=(const ReferenceCache&) = delete;
  ~ReferenceCache();

  struct Entry {
    std::vector<int> tokens;  // the answer that is forced on every policy
    std::int64_t offset = 0;  // of its logits in the file
  };
  // Runs the full cache when the item is new. fidelity_tokens: longest answer. Throws OutOfMemory where the item does
  // not fit and NonFinite for logits that are not finite. Throws CannotGoOn if the disk does not take the logits;
  // earlier entries stay usable.
  const Entry& get(std::shared_ptr<const Model> model, const Item& item, int page_size, int fidelity_tokens,
                   Device device = Device::cpu);
  // Frees the engine that get() made, which later items of the same model use again.
  void release() noexcept { kept_ = {}; }
  // Reads the logits [vocab] of token t of an entry.
  void read(const Entry& entry, int t, int vocab, float* out) const;

 private:
  void open();
  void append(const void* data, std::size_t size);
  void give_back(std::int64_t from) noexcept;
  Entry run(const std::shared_ptr<const Model>& model, const Item& item, int fidelity_tokens,
            const EngineOptions& options);

  // Of the latest items. The model's address is none of another one while the engine holds it.
  struct Kept {
    const Model* model = nullptr;
    EngineOptions options;
    std::unique_ptr<Engine> engine;
  };
  Engine& engine(const std::shared_ptr<const Model>& model, const EngineOptions& options);

  std::map<std::string, Entry> entries_;
  Kept kept_;
  int file_ = -1;         // descriptor; -1 until there is something to write
  std::int64_t end_ = 0;  // bytes written
};

}  // namespace kvlab
