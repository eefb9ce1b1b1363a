// A policy plugin whose pages are stored in codecs of the entry's.
#pragma once
#include <kvlab/plugin.hpp>
#include <kvlab/policy.hpp>

#include <memory>
#include <string>

namespace kvlab {

// Why a policy takes no codec for pages on the device; null = it takes one.
const char* takes_no_codec(const Policy& policy);

// codec: of all pages; null = the run's dtype. host_codec: of those on the host; null = as on the device. Errc::config,
// as `name`: for a codec whose pages become codes when they are old, beside a policy that does not promise to keep its
// tokens; for one of the device that packs pages, or that stands beside one that does. Also for a policy that has
// codecs of its own or stores other keys or values than the model's, where `codec` is given, and for one without pages
// on the host, where host_codec is. `codec` has no format of its own.
std::shared_ptr<Policy> coded(std::shared_ptr<Policy> policy, const Codec* codec, const Codec* host_codec,
                              const std::string& name);

}  // namespace kvlab
