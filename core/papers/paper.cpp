#include "papers/paper.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <kvlab/error.hpp>
#include <map>

#include "base/text.hpp"
#include "experiment/document.hpp"
#include "experiment/reader.hpp"

namespace kvlab::papers {
namespace {

using yaml::Node;
using Kind = Node::Kind;

const std::vector<std::string> kinds{"quality", "speed", "memory", "heads"};
const std::vector<std::string> reads{"score",
                                     "pass",
                                     "kl",
                                     "top1",
                                     "mass",
                                     "compression",
                                     "device_bytes_peak",
                                     "device_bytes_decode",
                                     "host_bytes_peak",
                                     "ttft_ms",
                                     "tpot_ms_mean",
                                     "tpot_ms_p50",
                                     "tpot_ms_p95",
                                     "tpot_ms_p99",
                                     "tokens_per_s",
                                     "overhead",
                                     "part_ms",
                                     "part_share",
                                     "prompt_tokens",
                                     "answer_tokens",
                                     "requests_at_once",
                                     "array_mean",
                                     "array_least",
                                     "array_most",
                                     "shared_heads"};
const std::vector<std::string> forms{"value", "percent", "ratio", "inverse", "saved", "retained"};
const std::vector<std::string> reading_keys{"policy", "task",    "model", "context", "budget", "run",  "read",
                                            "as",     "against", "over",  "pair",    "array",  "unit", "parts"};

class Reader {
 public:
  explicit Reader(const yaml::Document& document) : document_(document), problems_(document) {}

  Paper paper(const std::string& name) {
    Paper out;
    out.name = name;
    Taken top(*this, document_.root, {"title", "source", "setting", "items"}, "a paper");
    out.title = text(top["title"], "title", document_.root);
    out.source = text(top["source"], "source", document_.root);
    const auto common = settings(top["setting"]);
    if (const Node* items = top["items"]; items && items->is(Kind::map))
      for (const yaml::Entry& e : items->entries) out.items.push_back(item(e, common));
    else
      wrong(items ? *items : document_.root, items ? yaml::describe(*items) : "no key 'items'", "a map of items");
    problems_.raise();
    return out;
  }

 private:
  // The values of a map's known keys. Others are noted.
  class Taken {
   public:
    Taken(Reader& reader, const Node& node, const std::vector<std::string>& known, const std::string& what)
        : node_(node) {
      if (!node.is(Kind::map)) reader.wrong(node, yaml::describe(node), "a map for " + what);
      for (const yaml::Entry& e : node.entries)
        if (std::find(known.begin(), known.end(), e.key.text) == known.end())
          reader.problems_.add(e.key.place, unknown_key(e.key.text, known));
    }
    const Node* operator[](const char* key) const { return node_.find(key) ? &node_.find(key)->value : nullptr; }

   private:
    const Node& node_;
  };

  void wrong(const Node& at, const std::string& got, const std::string& wanted) {
    problems_.add(at.place, "got " + got + ", wanted " + wanted);
  }

  // A text that has to be there.
  std::string text(const Node* node, const char* key, const Node& around) {
    if (node && node->is(Kind::scalar) && !node->text.empty()) return node->text;
    wrong(node ? *node : around, node ? yaml::describe(*node) : fmt::format("no key '{}'", key), "a text");
    return "";
  }

  std::string word(const Node& node, const std::vector<std::string>& words) {
    if (node.is(Kind::scalar) && std::find(words.begin(), words.end(), node.text) != words.end()) return node.text;
    wrong(node, yaml::describe(node),
          "one of: " + join(words) + (node.is(Kind::scalar) ? did_you_mean(node.text, words) : ""));
    return words.front();
  }

  std::optional<double> number(const Node& node) {
    const ParamSpec spec = make_param("number", 0.0, -any, any, "");
    const auto value = read_value(node, spec, problems_);
    if (!value) return std::nullopt;
    return std::get<double>(*value);
  }

  std::vector<std::string> texts(const Node* node) {
    std::vector<std::string> out;
    if (!node) return out;
    if (!node->is(Kind::list)) wrong(*node, yaml::describe(*node), "a list of texts");
    for (const Node& one : node->items) out.push_back(text(&one, "", *node));
    return out;
  }

  std::vector<std::pair<std::string, std::string>> settings(const Node* node) {
    std::vector<std::pair<std::string, std::string>> out;
    if (!node) return out;
    if (!node->is(Kind::map)) wrong(*node, yaml::describe(*node), "a map of texts");
    for (const yaml::Entry& e : node->entries) out.emplace_back(e.key.text, text(&e.value, "", *node));
    return out;
  }

  // `tasks`, a list of tasks, or a list of such lists.
  void over(const Node& node, Reading& r) {
    r.over_tasks = true;
    r.groups.clear();
    if (!node.is(Kind::list)) {
      word(node, {"tasks"});
      return;
    }
    const bool nested = !node.items.empty() && node.items.front().is(Kind::list);
    if (!nested) r.groups.push_back(texts(&node));
    for (const Node& one : node.items)
      if (nested) r.groups.push_back(texts(&one));
    for (const auto& group : r.groups)
      if (group.empty()) wrong(node, "an empty list", "tasks");
  }

  void add(const Node& map, Reading& r, const std::vector<std::string>& others = {}) {
    std::vector<std::string> known = reading_keys;
    known.insert(known.end(), others.begin(), others.end());
    const Taken keys(*this, map, known, "what a value belongs to");
    const auto set = [&](const char* key, const std::function<void(const Node&)>& how) {
      if (const Node* node = keys[key]) how(*node);
    };
    const auto label = [&](const char* key, std::string& to) {
      set(key, [&](const Node& n) { to = text(&n, key, map); });
    };
    label("policy", r.policy), label("task", r.task), label("model", r.model), label("run", r.run);
    label("against", r.against), label("array", r.array), label("unit", r.unit);
    set("context", [&](const Node& n) { r.context = number(n); });
    set("budget", [&](const Node& n) { r.budget = number(n); });
    set("read", [&](const Node& n) { r.read = word(n, reads); });
    set("as", [&](const Node& n) { r.as = word(n, forms); });
    set("over", [&](const Node& n) { over(n, r); });
    set("parts", [&](const Node& n) { r.parts = texts(&n); });
    set("pair", [&](const Node& n) {
      r.pair = texts(&n);
      if (r.pair.size() != 2) wrong(n, fmt::format("{} names", r.pair.size()), "the stems of two experiments");
    });
  }

  Published value(const Node& node, Reading reading) {
    Published out{std::numeric_limits<double>::quiet_NaN(), std::move(reading)};
    const Node* of = &node;
    if (node.is(Kind::map)) {
      add(node, out.reading, {"value"});
      const yaml::Entry* own = node.find("value");
      if (!own) wrong(node, "no key 'value'", "a number or null");
      of = own ? &own->value : nullptr;
    }
    if (of && !of->is(Kind::null))
      if (const auto read = number(*of)) out.value = *read;
    return out;
  }

  void values(const Node& node, Item& item) {
    Reading common;
    add(node, common, {"columns", "rows"});
    const Node *columns = node.find("columns") ? &node.find("columns")->value : nullptr,
               *rows = node.find("rows") ? &node.find("rows")->value : nullptr;
    if (!columns || !columns->is(Kind::map) || !rows || !rows->is(Kind::map))
      return wrong(node, "values without maps of columns and rows", "both");
    for (const yaml::Entry& column : columns->entries) item.columns.push_back(column.key.text);
    for (const yaml::Entry& e : rows->entries) {
      PublishedRow row{e.key.text, "", {}};
      const Node *missing = e.value.find("missing") ? &e.value.find("missing")->value : nullptr,
                 *all = e.value.find("values") ? &e.value.find("values")->value : nullptr;
      if (missing) row.missing = text(missing, "missing", e.value);
      if (!all || !all->is(Kind::list) || all->items.size() != item.columns.size()) {
        wrong(all ? *all : e.value, all ? fmt::format("{} values", all->items.size()) : "no list of values",
              fmt::format("{}, one per column", item.columns.size()));
        continue;
      }
      for (std::size_t c = 0; c < all->items.size(); ++c) {
        Reading reading = common;
        if (!columns->entries[c].value.is(Kind::null)) add(columns->entries[c].value, reading);
        add(e.value, reading, {"missing", "values"});
        row.values.push_back(value(all->items[c], std::move(reading)));
        check(row.values.back().reading, all->items[c]);
      }
      item.rows.push_back(std::move(row));
    }
  }

  void check(const Reading& r, const Node& at) {
    if (r.read.starts_with("part_") && r.parts.empty()) wrong(at, r.read + " without 'parts'", "the parts of a step");
    if (r.read.starts_with("array_") && r.array.empty()) wrong(at, r.read + " without 'array'", "one of a profile");
    if (r.read == "shared_heads" && (r.pair.size() != 2 || r.array.empty()))
      wrong(at, "shared_heads without 'pair' and 'array'", "two profile experiments and their set of heads");
  }

  Item item(const yaml::Entry& e, const std::vector<std::pair<std::string, std::string>>& common) {
    Item out;
    out.name = e.key.text;
    out.where = document_.where(e.key.place);
    out.setting = common;
    const Taken keys(*this, e.value,
                     {"title", "kind", "setting", "needs", "run", "small", "why_not", "notes", "values"}, out.name);
    out.title = text(keys["title"], "title", e.value);
    if (const Node* kind = keys["kind"]) out.kind = word(*kind, kinds);
    for (auto& one : settings(keys["setting"])) {
      auto& [key, own] = one;
      const auto same =
          std::find_if(out.setting.begin(), out.setting.end(), [&](const auto& s) { return s.first == one.first; });
      if (same == out.setting.end())
        out.setting.emplace_back(key, own);
      else
        same->second = own;
    }
    out.needs = texts(keys["needs"]), out.run = texts(keys["run"]), out.small = texts(keys["small"]);
    out.notes = texts(keys["notes"]);
    if (const Node* reason = keys["why_not"]) out.why_not = text(reason, "why_not", e.value);
    if (out.run.empty() == out.why_not.empty())
      wrong(e.value, out.run.empty() ? "neither 'run' nor 'why_not'" : "both 'run' and 'why_not'", "one of them");
    if (const Node* all = keys["values"]) values(*all, out);
    return out;
  }

  const yaml::Document& document_;
  Problems problems_;
};

}  // namespace

Paper read_paper(const std::filesystem::path& file) {
  const yaml::Document document = yaml::parse_file(file.string());
  return Reader(document).paper(file.stem().string());
}

std::vector<Paper> read_papers(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(folder, missing))
    if (entry.path().extension() == ".yaml") files.push_back(entry.path());
  if (files.empty()) throw Error(Errc::io, "got no file of published values, wanted *.yaml", folder.string());
  std::sort(files.begin(), files.end());
  std::vector<Paper> out;
  for (const auto& file : files) out.push_back(read_paper(file));
  return out;
}

}  // namespace kvlab::papers
