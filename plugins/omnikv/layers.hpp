// The part of each layer.
#pragma once
#include <kvlab/error.hpp>

#include <algorithm>
#include <string>
#include <vector>

namespace omnikv {

// dense: attends to everything. filter: does too, and chooses. sparse: attends to what the last filter layer chose.
// own: chooses for itself.
enum class Role { dense, filter, sparse, own };

inline std::vector<Role> roles_of(const std::vector<int>& filters, int wait, int layers, bool shared) {
  if (filters.empty())
    throw kvlab::Error(kvlab::Errc::config, "got filter_layers '', wanted at least one layer that chooses");
  if (filters.back() >= layers)
    throw kvlab::Error(kvlab::Errc::config, "got filter layer " + std::to_string(filters.back()) +
                                                ", wanted one of the model's " + std::to_string(layers) +
                                                " layers, from 0 on");
  std::vector<Role> roles(static_cast<std::size_t>(layers), Role::dense);
  for (std::size_t i = 0; i < filters.size(); ++i) {
    const int next = i + 1 < filters.size() ? filters[i + 1] : layers;
    roles[static_cast<std::size_t>(filters[i])] = Role::filter;
    for (int l = filters[i] + 1 + wait; l < next; ++l)
      roles[static_cast<std::size_t>(l)] = shared ? Role::sparse : Role::own;
  }
  if (std::none_of(roles.begin(), roles.end(), [](Role r) { return r == Role::sparse || r == Role::own; }))
    throw kvlab::Error(kvlab::Errc::config, "got filter and wait layers that are all " + std::to_string(layers) +
                                                " layers, wanted at least one layer that attends to what was chosen");
  return roles;
}

}  // namespace omnikv
