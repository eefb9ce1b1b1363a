#include "run/codec_matrix.hpp"

#include <fmt/format.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <optional>
#include <utility>

#include "compose/row_coded.hpp"
#include "engine/store_options.hpp"
#include "experiment/build_policy.hpp"
#include "plugin/parameters.hpp"

namespace kvlab {
namespace {

struct Method {
  std::string name;
  PolicySpec spec;
};

class Matrix {
 public:
  Matrix(const PluginCatalog& catalog, const Model& model, Device device, int page_size, const PluginChoice& choice)
      : catalog_(catalog), model_(model), device_(device), page_size_(page_size), choice_(choice) {}

  std::vector<CodecTable> tables() {
    const std::vector<Method> all = methods();
    std::vector<Method> below;
    for (const Method& m : all)
      if (may_have_host_pages(m.spec)) below.push_back(m);
    const std::vector<std::string> codecs = catalog_.names(Role::codec);
    std::vector<std::string> with_none = codecs, as_above = codecs;
    with_none.insert(with_none.begin(), "none"), as_above.insert(as_above.begin(), "as on the device");
    return {table("Codecs of pages on the device", "method", "codec", all, codecs,
                  [&](PolicySpec s, const std::string& codec) {
                    s.codec = use(Role::codec, codec);
                    return s;
                  }),
            table("Codecs of pages on the host, `placement: {tier: host, codec: NAME}`", "method", "codec of the host",
                  below, as_above, [&](PolicySpec s, const std::string& codec) { return on_host(s, codec); }),
            table("Both, with the full cache", "codec of the device", "codec of the host", coded(with_none), as_above,
                  [&](PolicySpec s, const std::string& codec) { return on_host(s, codec); })};
  }

 private:
  PluginUse use(const PluginInfo& p) const { return choice_ ? choice_(p) : PluginUse{p.role, p.name, resolve(p, {})}; }
  PluginUse use(Role role, const std::string& name) const { return use(*catalog_.find(role, name)); }

  PolicySpec empty(const std::string& name) const {
    PolicySpec s;
    s.name = name;
    s.page_size = page_size_;
    return s;
  }
  PolicySpec on_host(PolicySpec s, const std::string& codec) const {
    const PluginInfo* info = catalog_.find(Role::codec, codec);
    if (!info && s.policy) return s;  // it places its pages itself
    s.placement.tier = Tier::host;
    if (info) s.placement.codec = use(*info);
    return s;
  }

  std::vector<Method> methods() {
    std::vector<Method> out{{"full", empty("full")}};
    const auto each = [&](Role role, std::optional<PluginUse> PolicySpec::*slot, const std::vector<Method>& beside) {
      std::vector<Method> made;
      for (const std::string& name : catalog_.names(role))
        for (const Method& first : beside) {
          if (first.spec.scorer && first.spec.scorer->name == name) continue;
          Method m{beside.size() == 1 && !first.spec.scorer ? name : first.name + "+" + name, first.spec};
          m.spec.*slot = use(role, name);
          m.spec.name = m.name;
          complete(m.spec);
          // Of parts beside a method, the first that takes it.
          if (beside.size() > 1 && !refusal(m.spec).empty()) continue;
          made.push_back(m);
          break;
        }
      return made;
    };
    const std::vector<Method> nothing = out, scorers = each(Role::scorer, &PolicySpec::scorer, nothing);
    // Those that leave decode steps alone come first: more codecs go with them.
    std::vector<Method> firsts = scorers;
    std::stable_partition(firsts.begin(), firsts.end(),
                          [&](const Method& m) { return make<Scorer>(m.spec.scorer)->every() == 0; });
    std::vector<Method> pruned;
    for (const std::string& name : catalog_.names(Role::pruner)) {
      pruned.push_back({"full+" + name, empty("full+" + name)});
      pruned.back().spec.pruner = use(Role::pruner, name);
    }
    for (const auto& list :
         {scorers, each(Role::selector, &PolicySpec::selector, nothing),
          each(Role::policy, &PolicySpec::policy, nothing), pruned, each(Role::rescorer, &PolicySpec::rescorer, firsts),
          each(Role::budget, &PolicySpec::split, firsts)})
      out.insert(out.end(), list.begin(), list.end());
    return out;
  }
  std::vector<Method> coded(const std::vector<std::string>& codecs) const {
    std::vector<Method> out;
    for (const std::string& name : codecs) {
      out.push_back({name, empty(name)});
      if (const PluginInfo* info = catalog_.find(Role::codec, name)) out.back().spec.codec = use(*info);
    }
    return out;
  }

  template <class Interface>
  Instance<Interface> make(const std::optional<PluginUse>& of) const {
    return of ? create<Interface>(*catalog_.find(of->role, of->name), of->params) : Instance<Interface>{};
  }
  // Names a profile where one is needed.
  void complete(PolicySpec& s) const {
    const auto policy = make<Policy>(s.policy);
    const auto scorer = make<Scorer>(s.scorer);
    const auto selector = make<Selector>(s.selector);
    const auto split = make<Budget>(s.split);
    if ((policy && policy->needs().profile()) || (scorer && scorer->needs().profile()) ||
        (selector && selector->needs().profile()) || (split && split->reads_profile()))
      s.profile = "profile";
  }
  bool may_have_host_pages(const PolicySpec& s) const {
    if (!s.policy) return !s.pruner;
    const Needs needs = make<Policy>(s.policy)->needs();
    return needs.host_pages() || needs.archive();
  }

  std::string refusal(const PolicySpec& spec) const {
    try {
      const auto policy = build_policy(spec, catalog_);
      EngineOptions o;
      o.device = device_;
      o.page_size = spec.page_size;
      o.max_tokens = 16 * spec.page_size;
      check_store(store_options(model_, *policy, o), device_);
      return "";
    } catch (const Error& e) {
      if (e.code() != Errc::config && e.code() != Errc::unsupported) throw;
      return e.message();
    }
  }

  template <class With>
  CodecTable table(const std::string& title, const std::string& rows, const std::string& columns,
                   const std::vector<Method>& methods, const std::vector<std::string>& names, const With& with) const {
    CodecTable out{title, rows, columns, {}, names, {}};
    for (const Method& m : methods) {
      out.row_names.push_back(m.name);
      out.cells.emplace_back();
      for (const std::string& name : names) {
        PolicySpec spec = with(m.spec, name);
        std::string refused = refusal(spec);
        out.cells.back().push_back({std::move(spec), std::move(refused)});
      }
    }
    return out;
  }

  const PluginCatalog& catalog_;
  const Model& model_;
  Device device_;
  int page_size_;
  const PluginChoice& choice_;
};

// Reasons that differ in names alone are one.
std::string without_names(std::string reason) {
  for (std::size_t at; (at = reason.find(" '")) != std::string::npos;)
    reason.erase(at, std::min(reason.find('\'', at + 2), reason.size() - 1) - at + 1);
  return reason;
}

const char* bytes_of(const Codec& codec) {
  if (codes_rows(codec)) return "**none saved**: functional";
  return codec.spec().packs ? "saved on the link alone" : "saved: pages store the codes";
}

std::string codec_rows(const PluginCatalog& catalog) {
  const std::vector<std::string> names = catalog.names(Role::codec);
  if (names.empty()) return "";
  std::string rows =
      "\n## The codecs\n\nA functional codec changes the numbers that attention reads. Pages store these in the run's "
      "dtype.\n\n| codec | bytes | what it does |\n|---|---|---|\n";
  for (const std::string& name : names) {
    const PluginInfo& info = *catalog.find(Role::codec, name);
    rows += fmt::format("| `{}` | {} | {} |\n", name, bytes_of(*create<Codec>(info, resolve(info, {}))), info.help);
  }
  return rows;
}

}  // namespace

std::vector<CodecTable> codec_tables(const PluginCatalog& catalog, const Model& model, Device device, int page_size,
                                     const PluginChoice& choice) {
  return Matrix(catalog, model, device, page_size, choice).tables();
}

std::string codec_page(const PluginCatalog& catalog, const std::vector<CodecTable>& tables,
                       const std::string& made_for) {
  std::vector<std::string> reasons;
  std::string body = codec_rows(catalog);
  for (const CodecTable& t : tables) {
    body += fmt::format("\n## {}\n\n| {} |", t.title, t.rows);
    for (const std::string& name : t.column_names) body += fmt::format(" {} |", name);
    body += "\n|---|";
    for (std::size_t i = 0; i < t.column_names.size(); ++i) body += "---|";
    body += "\n";
    for (std::size_t r = 0; r < t.cells.size(); ++r) {
      body += fmt::format("| `{}` |", t.row_names[r]);
      for (const CodecCell& cell : t.cells[r]) {
        if (cell.refused.empty()) {
          body += " ok |";
          continue;
        }
        const std::string reason = without_names(cell.refused);
        const auto found = std::find(reasons.begin(), reasons.end(), reason);
        body += fmt::format(" {} |", found - reasons.begin() + 1);
        if (found == reasons.end()) reasons.push_back(reason);
      }
      body += "\n";
    }
  }
  body += "\n## Reasons\n\n";
  for (std::size_t i = 0; i < reasons.size(); ++i) body += fmt::format("{}. {}\n", i + 1, reasons[i]);
  return fmt::format(
             "# Codecs beside methods\n\n"
             "`kvlab list --matrix` writes this page, with the defaults of all parameters,\n{}.\n"
             "A test keeps it up to date. **ok**: it runs, and the conformance suite (`test_contract`) runs it. A "
             "number:\n"
             "core refuses it before a run, for the reason below. A split or a rescorer stands beside the first "
             "scorer\n"
             "that takes it, of those that evict nothing in decode steps if there is one. For a policy that "
             "has pages\n"
             "on the host by itself, the first column of the second table is that policy alone.\n",
             made_for) +
         body;
}

}  // namespace kvlab
