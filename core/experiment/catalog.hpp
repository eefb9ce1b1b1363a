// The plugins that an experiment may name. The registry is one such catalog; tests bring their own.
#pragma once
#include <string>
#include <vector>

#include "plugin/registry.hpp"

namespace kvlab {

class PluginCatalog {
 public:
  virtual ~PluginCatalog() = default;
  virtual const PluginInfo* find(Role role, const std::string& name) const = 0;  // null when there is none
  virtual std::vector<std::string> names(Role role) const = 0;
  virtual std::size_t broken() const { return 0; }  // libraries that could not be loaded
};

class RegistryCatalog final : public PluginCatalog {
 public:
  explicit RegistryCatalog(Registry& registry) : registry_(registry) {}
  const PluginInfo* find(Role role, const std::string& name) const override { return registry_.find(role, name); }
  std::vector<std::string> names(Role role) const override { return registry_.names({role}); }
  std::size_t broken() const override {
    std::size_t n = 0;
    for (const Diagnostic& d : registry_.diagnostics()) n += !d.shadowed;
    return n;
  }

 private:
  Registry& registry_;
};

}  // namespace kvlab
