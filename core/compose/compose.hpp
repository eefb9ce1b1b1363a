// Composes roles into a Policy: Scorer + Rescorer + Budget + schedule + Codec, or Selector, each with a placement.
// Without any role it is `full`, which keeps everything.
#pragma once
#include <kvlab/roles.hpp>
#include <kvlab/stages.hpp>

#include <memory>
#include <optional>
#include <string>

#include "compose/injection.hpp"
#include "plugin/loader.hpp"

namespace kvlab {

// Whether pages become codes only when they are full and old. Such pages keep their tokens, and a cache with them has a
// second codec: that of the newest tokens.
inline bool pages_age(const Codec& codec) { return codec.residual() > 0 || codec.spec().grouped(); }

// Whether it stores both keys and values in the run's dtype and packs no page. Of a codec with a format of its own only
// its calls say so.
bool codes_nothing(const Codec& codec);

// Why pages on the host do not take the codec; null = they do.
const char* no_host_codec(const Codec& codec);
inline constexpr const char* packs_beside_codes =
    "got a codec beside one that packs pages on the host, wanted pages in the run's dtype";

struct Composition {
  Instance<Scorer> scorer;
  Instance<Rescorer> rescorer;  // of the scorer's tokens
  Instance<Budget> split;       // null = uniform
  Instance<Selector> selector;
  Instance<Codec> codec;               // null = the run's dtype
  Instance<Codec> host_codec;          // null = as on the device
  bool compress_prompt = true;         // evict when the prompt ends
  std::optional<int> every;            // decode steps between evictions; nothing = as the scorer says
  bool host = false;                   // pages live on the host tier and are recalled for attention
  int resident_tokens = 0;             // per KV head, kept on the device; at least what attention reads
  std::optional<Injection> injection;  // of the selector's lists
  std::string name;                    // for messages
};

// Errc::config for parts that contradict each other.
std::unique_ptr<Policy> compose(Composition parts);

}  // namespace kvlab
