// A policy whose rows pass through a codec with a format of its own (kvlab/row_codec.hpp).
#pragma once
#include <kvlab/policy.hpp>

#include <memory>
#include <string>

#include "plugin/loader.hpp"

namespace kvlab {

// Whether a codec has such a format.
bool codes_rows(const Codec& codec);

// `policy` keeps all tokens, at the places of their text positions; else Errc::plugin. Where it places pages on the
// host by Edits::place, those of tokens that are no codes yet stay on the device.
std::shared_ptr<Policy> row_coded(std::shared_ptr<Policy> policy, Instance<Codec> codec);

}  // namespace kvlab
