// Plugins that exist only as declarations, for tests of experiment files.
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "experiment/catalog.hpp"
#include "experiment/reader.hpp"

namespace kvlab::test {

class FakeCatalog final : public PluginCatalog {
 public:
  FakeCatalog() {
    add(Role::scorer, "snapkv",
        {make_param("window", 32, 1, any, ""), make_param("kernel", 7, 1, 99, ""),
         make_choice("pooling", {"max", "average", "none"}, "")});
    add(Role::scorer, "knorm", {});
    ParamSpec bounds = make_param("page_bounds", true, "");
    bounds.component = true;
    ParamSpec reuse = make_param("reuse", true, "");
    reuse.component = true;
    add(Role::selector, "quest",
        {make_param("dense_layers", 2, 0, any, ""), bounds, reuse, make_param("last_page", false, "")});
    ParamSpec top = make_param("top_p", true, "");
    top.component = true;
    add(Role::pruner, "twilight", {make_param("p", 0.85, 0, 1, ""), top});
    add(Role::rescorer, "criticalkv", {make_param("first_stage", 0.5, 0, 1, "")});
    add(Role::policy, "streaming_llm", {make_param("sinks", 4, 0, any, "")});
    add(Role::budget, "uniform", {});
    add(Role::budget, "pyramid", {make_param("beta", 20.0, 1, any, "")});
    add(Role::codec, "int8", {make_param("axis", std::string("token"), "")});
    add(Role::task, "niah",
        {make_param("context", 4096, 1, any, ""), make_param("depth", 5, 1, any, ""),
         make_param("samples", 1, 1, any, ""), make_param("haystack", std::string(), "")});
    add(Role::task, "text", {make_param("prefix", 1024, 1, any, ""), make_param("path", std::string(), "")});
    add(Role::metric, "f1", {});
    add(Role::metric, "similar", {make_param("ratio", 0.5, 0, 1, "")});
  }

  void add(Role role, const std::string& name, std::vector<ParamSpec> params) {
    PluginInfo info;
    info.name = name;
    info.role = role;
    info.version = "1";
    info.params = std::move(params);
    plugins_[{role, name}] = std::move(info);
  }

  const PluginInfo* find(Role role, const std::string& name) const override {
    const auto it = plugins_.find({role, name});
    return it == plugins_.end() ? nullptr : &it->second;
  }
  std::vector<std::string> names(Role role) const override {
    std::vector<std::string> all;
    for (const auto& [key, info] : plugins_)
      if (key.first == role) all.push_back(key.second);
    return all;
  }

 private:
  std::map<std::pair<Role, std::string>, PluginInfo> plugins_;
};

}  // namespace kvlab::test
