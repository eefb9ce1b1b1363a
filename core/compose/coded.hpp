// A policy plugin whose pages are stored in a codec of the entry's.
#pragma once
#include <kvlab/plugin.hpp>
#include <kvlab/policy.hpp>

#include <memory>
#include <string>

namespace kvlab {

// Why a policy takes no codec; null = it takes one.
const char* takes_no_codec(const Policy& policy);

// All its pages have the codec, on both tiers. Errc::config, as `name`: for a codec whose pages become codes when they
// are old, or that packs pages; for a policy that has codecs of its own, or that stores other keys or values than the
// model's.
std::shared_ptr<Policy> coded(std::shared_ptr<Policy> policy, const Codec& codec, const std::string& name);

}  // namespace kvlab
