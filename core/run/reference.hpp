// What the full cache does on an item: its own greedy answer (or the forced tokens) and the logits of every token of
// it. Kept for the cells that follow; the logits lie in an unnamed temporary file, so that memory stays small.
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
  ReferenceCache();
  ~ReferenceCache();

  struct Entry {
    std::vector<int> tokens;  // the answer that is forced on every policy
    std::int64_t offset = 0;  // of its logits in the file
  };
  // Runs the full cache when the item is new. fidelity_tokens: longest answer.
  const Entry& get(std::shared_ptr<const Model> model, const Item& item, int page_size, int fidelity_tokens,
                   Device device = Device::cpu);
  // Logits of token t of an entry, [vocab].
  void read(const Entry& entry, int t, int vocab, float* out) const;

 private:
  std::map<std::string, Entry> entries_;
  std::FILE* file_;
  std::int64_t end_ = 0;
};

}  // namespace kvlab
