// The two forms of an entry under `policies:` and `tasks:`: X or {X: {...}}, and {name: LABEL, KEY: ...}.
#pragma once
#include <optional>
#include <string>

#include "experiment/reader.hpp"

namespace kvlab {

struct EntryParts {
  yaml::Node name, body;
  bool named = true;  // the first form
};

// Splits an entry. Nothing, and a note, when it has neither form.
std::optional<EntryParts> split_entry(const yaml::Node& entry, const char* kind, Problems& problems);

// The name in `X` or `{X: {...}}`; empty for anything else.
std::string use_name(const yaml::Node& node);

// The label of an entry as `--set`, `sweep` and `ablate` address it; empty when it has none.
std::string entry_label(const yaml::Node& entry);

// The map with the keys of an entry: the one below NAME, or the entry itself. A bare name becomes {NAME: {}}.
yaml::Node& entry_body(yaml::Node& entry);

}  // namespace kvlab
