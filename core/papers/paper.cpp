#include "papers/paper.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <kvlab/error.hpp>

#include "base/text.hpp"
#include "papers/file_reader.hpp"

namespace kvlab::papers {
namespace {

using yaml::Node;
using Kind = Node::Kind;

const std::vector<std::string> kinds{"quality", "speed", "memory", "heads"};
class Reader final : public FileReader {
 public:
  using FileReader::FileReader;

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
};

}  // namespace

Paper read_paper(const std::filesystem::path& file) {
  const yaml::Document document = yaml::parse_file(file.string());
  return Reader(document).paper(file.stem().string());
}

std::vector<Paper> read_papers(const std::filesystem::path& folder) {
  const std::vector<std::filesystem::path> files = yaml_files(folder);
  if (files.empty()) throw Error(Errc::io, "got no file of published values, wanted *.yaml", folder.string());
  std::vector<Paper> out;
  for (const auto& file : files) out.push_back(read_paper(file));
  return out;
}

Chosen choose(const std::vector<Paper>& papers, const std::string& name, const char* where) {
  std::vector<std::string> known;
  for (const Paper& paper : papers)
    for (const Item& item : paper.items) {
      known.push_back(Chosen{&paper, &item}.name());
      if (name == known.back()) return {&paper, &item};
    }
  throw Error(Errc::config,
              fmt::format("got '{}', wanted a table or figure{}: `kvlab reproduce` lists them", name,
                          did_you_mean(name, known)),
              where);
}

std::vector<Chosen> items_of(const std::vector<Paper>& papers, const std::string& experiment_file) {
  std::vector<Chosen> out;
  for (const Paper& paper : papers)
    for (const Item& item : paper.items)
      if (std::ranges::any_of(item.run, [&](const std::string& run) { return experiment_file.ends_with("/" + run); }))
        out.push_back({&paper, &item});
  return out;
}

}  // namespace kvlab::papers
