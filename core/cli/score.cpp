#include "cli/score.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <kvlab/error.hpp>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/new_file.hpp"
#include "base/stop.hpp"
#include "base/text.hpp"
#include "experiment/catalog.hpp"
#include "experiment/document.hpp"
#include "experiment/policy_spec.hpp"
#include "plugin/callback.hpp"
#include "plugin/parameters.hpp"
#include "result/interval.hpp"
#include "result/report_layout.hpp"
#include "run/items.hpp"
#include "run/stops.hpp"
#include "run/task_env.hpp"

namespace fs = std::filesystem;

namespace kvlab {
namespace {

// A token is a byte, so that data can be read as a task without a model.
class Bytes final : public Tokenizer {
 public:
  Bytes() {
    vocab_size_ = 256;
    set_id("bytes", 0);
  }
  std::string token_bytes(int id) const override { return {1, static_cast<char>(id)}; }

 protected:
  void encode_plain(std::string_view text, bool /*start*/, std::vector<int>& out) const override {
    for (const char c : text) out.push_back(static_cast<unsigned char>(c));
  }
};

// The task that reads whatever data file it is given.
std::string reader_of_data(const PluginCatalog& catalog) {
  for (const std::string& name : catalog.names(Role::task)) {
    const ParamSpec* data = find_param(*catalog.find(Role::task, name), "data");
    if (data && data->value == ParamValue(std::string())) return name;
  }
  throw Error(Errc::plugin, "got no task with a parameter `data` of its user's, wanted one");
}

// The data file as an entry of `tasks:`.
TaskSpec task_of(const ScoreOptions& o, const PluginCatalog& catalog) {
  const std::string data = nlohmann::json(fs::absolute(o.data).string()).dump();
  const std::string text =
      "{" + reader_of_data(catalog) + ": {data: " + data + (o.metric.empty() ? "" : ", metric: " + o.metric) + "}}";
  const yaml::Document document = yaml::parse_text(text, o.metric.empty() ? o.data : "--metric");
  Problems problems(document);
  std::optional<TaskSpec> task = read_task(document.root, catalog, problems);
  problems.raise();
  task->where = o.data;
  return *task;
}

class Answers {
 public:
  Answers(const std::string& file, const std::string& field, std::vector<Record> records)
      : file_(file), field_(field), records_(std::move(records)) {
    for (std::size_t i = 0; i < records_.size(); ++i) {
      const auto id = records_[i].find("id");
      if (id == records_[i].end()) continue;
      if (id->second.size() != 1) throw Error(Errc::data, "got no text as 'id', wanted one", place(i));
      const auto [first, is_new] = by_id_.emplace(id->second.front(), i);
      if (!is_new)
        throw Error(Errc::data,
                    fmt::format("got a second answer of id '{}', wanted one (the first is answer {})",
                                one_line(id->second.front()), first->second + 1),
                    place(i));
    }
    if (!by_id_.empty() && by_id_.size() != records_.size())
      throw Error(
          Errc::data,
          fmt::format("got ids in {} of {} answers, wanted them in all or none", by_id_.size(), records_.size()),
          file_);
  }

  // Item n's.
  const std::string& of(const Item& item, std::size_t n) {
    std::size_t at = n;
    if (!by_id_.empty()) {
      const auto found = by_id_.find(item.id());
      if (found == by_id_.end())
        throw Error(Errc::data, fmt::format("got no answer of id '{}', wanted one", one_line(item.id())), file_);
      at = found->second;
    } else if (at >= records_.size()) {
      throw Error(Errc::data, fmt::format("got {} answers without ids, wanted one for each question", records_.size()),
                  file_);
    }
    const auto text = records_[at].find(field_);
    if (text == records_[at].end() || text->second.size() != 1)
      throw Error(Errc::data,
                  fmt::format("got {} as '{}', wanted the answer's text (--field NAME names another field)",
                              text == records_[at].end() ? "nothing" : "no single text", field_),
                  place(at));
    ++taken_;
    return text->second.front();
  }
  void check_all_taken(const std::string& data) const {
    if (taken_ != records_.size())
      throw Error(Errc::data,
                  fmt::format("got {} answers, wanted {}: {} has no other questions", records_.size(), taken_, data),
                  file_);
  }

 private:
  std::string place(std::size_t i) const { return file_ + ": answer " + std::to_string(i + 1); }

  std::string file_, field_;
  std::vector<Record> records_;
  std::map<std::string, std::size_t> by_id_;
  std::size_t taken_ = 0;
};

// Two questions of one id would take one answer twice.
void check_ids(const std::vector<Item>& items, const std::string& data) {
  std::map<std::string, std::size_t> seen;
  for (std::size_t i = 0; i < items.size(); ++i)
    if (const std::string id = items[i].id(); !id.empty() && !seen.emplace(id, i).second)
      throw Error(Errc::data, fmt::format("got id '{}' in two records, wanted one", one_line(id)), data);
}

}  // namespace

void add_score_options(CLI::App* command, ScoreOptions& options) {
  command->add_option("DATA", options.data, "data set (JSON lines): records with their references")->required();
  command->add_option("ANSWERS", options.answers, "JSON lines with an answer each")->required();
  command->add_option("--metric", options.metric, "NAME or '{NAME: {...}}' in place of the data's metric");
  command->add_option("--field", options.field, "the field of ANSWERS that has the text")->capture_default_str();
  command->add_flag("--whole", options.whole, "do not end answers at stop texts");
  command->add_option("-o,--output", options.output, "write the score of each question (JSON lines)");
  command->add_option("--format", options.format, "table, md, csv or latex")->capture_default_str();
  command->add_option("--plugin-path", options.plugin_path, "folder or library of plugins, searched first; repeatable")
      ->allow_extra_args(false);
}

int score_answers(const ScoreOptions& options) {
  const results::Format format = results::parse_format(options.format);
  stop::watch();
  name_callback_at_end();
  Registry registry(std::vector<fs::path>(options.plugin_path.begin(), options.plugin_path.end()));
  const RegistryCatalog catalog(registry);
  const auto bytes = std::make_shared<Bytes>();
  ModelConfig bytewise;
  bytewise.vocab = bytes->vocab_size(), bytewise.context = std::numeric_limits<int>::max();
  const TaskItems items = make_items(task_of(options, catalog), catalog, bytes, bytewise, Experiment(), 0);
  Answers answers(options.answers, options.field,
                  ModelTaskEnv(bytes, fs::current_path(), 0, 1).records(options.answers));
  check_ids(items.items, options.data);

  std::vector<Scored> scores;
  std::string lines;
  double sum = 0;
  for (std::size_t i = 0; i < items.items.size(); ++i) {
    stop::check();
    const Item& item = items.items[i];
    std::string answer = answers.of(item, i);
    if (!options.whole) answer.resize(std::min(answer.size(), stop_place(answer, item.stops)));
    if (item.references.empty())
      throw Error(Errc::data, "got a record without references, wanted what its answer is compared with",
                  options.data + ": record " + std::to_string(i + 1));
    const double score = items.score(item, answer);
    scores.push_back({item.sample, score});
    sum += score;
    nlohmann::json line{{"score", score}};
    if (!item.id().empty()) line["id"] = item.id();
    lines += line.dump() + "\n";
  }
  answers.check_all_taken(options.data);
  if (!options.output.empty()) write_text(options.output, lines);

  const Interval range = score_interval(scores);
  results::ReportPage page;
  results::ReportTable& table = page.tables.emplace_back();
  table.title = options.answers + " against " + options.data;
  table.header = {"metric", "questions", "score", "low", "high"};
  table.rows.push_back({items.metric, std::to_string(scores.size()),
                        fmt::format("{:.6g}", sum / static_cast<double>(scores.size())),
                        range.low == range.low ? fmt::format("{:.4g}", range.low) : "-",
                        range.high == range.high ? fmt::format("{:.4g}", range.high) : "-"});
  table.under.push_back("low, high: 95 % interval over contexts like these");
  const bool csv = format == results::Format::csv;
  fmt::print("{}", csv ? results::render_csv(table) : results::render(page, format));
  return 0;
}

}  // namespace kvlab
