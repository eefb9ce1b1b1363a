// The model turns a long record into a table. It needs nearly all of the context; a needle needs one line of it. Score:
// F1 of the table's cells.
#include <kvlab/answers.hpp>
#include <kvlab/prompt.hpp>

#include <algorithm>
#include <iterator>

namespace {

// Cells by (row's name, column): the first column names the row; a row's cells are parted by '|'.
using Cells = std::vector<std::string>;
void add_cells(const std::string& row, Cells& out) {
  auto cells = kvlab::answers::split(kvlab::answers::trimmed(row, " \t\r|"), "|");
  for (std::string& c : cells) c = kvlab::answers::trimmed(kvlab::answers::fold(c), " .");
  for (std::size_t i = 1; i < cells.size(); ++i) out.push_back(cells[0] + "|" + std::to_string(i) + "|" + cells[i]);
}

class Extract final : public kvlab::PromptTask {
 public:
  explicit Extract(const kvlab::Params& p) : PromptTask(p), rows_(p.get<int>("rows")) {}

  std::string metric() const override { return "table_f1"; }
  // Cells count as (row, column, value); the first column names the row (text-to-table: Wu, Zhang and Li 2022). The
  // first reference is the header, the others are rows.
  std::optional<double> score(const std::string& answer, const std::vector<std::string>& references) const override {
    Cells wanted, got, header;
    add_cells(references.front(), header);
    for (std::size_t i = 1; i < references.size(); ++i) add_cells(references[i], wanted);
    for (const std::string& line : kvlab::answers::split(answer, "\n")) {
      Cells row;
      if (line.find_first_not_of("|-: \t\r") != std::string::npos) add_cells(line, row);
      if (row != header) got.insert(got.end(), row.begin(), row.end());
    }
    std::sort(wanted.begin(), wanted.end());
    std::sort(got.begin(), got.end());
    Cells both;
    std::set_intersection(wanted.begin(), wanted.end(), got.begin(), got.end(), std::back_inserter(both));
    return kvlab::answers::f_score(static_cast<double>(both.size()), got.size(), wanted.size());
  }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    one_question(env, "the table is asked for once");
    kvlab::Random random = this->random(index, env);
    const std::string header = "day | sender | crates | goods | place";
    const auto ask = [&](kvlab::Prompt& prompt, const std::vector<std::string>& table, int most) {
      prompt.ask("\nTurn this record into a table with one line for each delivery. The columns are " + header +
                     ", separated by |.",
                 header + "\n", table, most);
    };
    const std::string intro = "Below is a record of the deliveries to a warehouse.\n";
    if (rows_ > context())
      throw kvlab::Error(kvlab::Errc::config, "got context: " + std::to_string(context()) + ", wanted at least " +
                                                  std::to_string(rows_) + ": so many rows take a token each and more");
    kvlab::Prompt empty = open(env, intro);
    ask(empty, {}, 0);
    // Records and table grow together until one more delivery does not fit.
    constexpr int spare = 8;
    std::vector<std::string> table{header};
    kvlab::Tokens body;
    int answer = spare;
    for (int day = 1; rows_ == 0 || static_cast<int>(table.size()) <= rows_;
         day += 1 + static_cast<int>(random.below(3))) {
      const Delivery d(random);
      const std::string when = std::to_string(day);
      const kvlab::Tokens text = env.encode_next("\nOn day " + when + ", " + d.sender + " sent " + d.crates +
                                                 " crates of " + d.goods + " to " + d.place + ".");
      const std::string row = kvlab::joined({when, d.sender, d.crates, d.goods, d.place}, " | ");
      const int more = max_new() > 0 ? 0 : kvlab::length(env.encode_next("\n" + row + " |"));
      if (rows_ == 0 && table.size() > 1 &&
          kvlab::length(body) + kvlab::length(text) + std::max(answer + more, max_new()) > empty.left())
        break;
      kvlab::append(body, text);
      answer += more;
      table.push_back(row);
    }
    kvlab::Prompt prompt = open(env, intro);
    const std::string rows = std::to_string(table.size() - 1) + " rows";
    ask(prompt, {}, std::max(answer, max_new()));
    prompt.room(kvlab::length(body), rows, 0);
    kvlab::TaskSample out = prompt.finish(body);
    out.questions[0].references = table;
    return out;
  }

 private:
  struct Delivery {
    explicit Delivery(kvlab::Random& random) {
      static constexpr const char *senders[] = {"Adams", "Baker",  "Carter", "Davis", "Evans", "Fisher",
                                                "Grant", "Harris", "Irwin",  "Jones", "King",  "Lewis",
                                                "Mason", "Nelson", "Owen",   "Parker"},
                                  *stuff[] = {"apples", "books", "candles", "coffee", "copper", "corn",
                                              "glass",  "iron",  "lamps",   "paper",  "rope",   "salt",
                                              "soap",   "sugar", "tea",     "wool"},
                                  *places[] = {"Bristol", "Cairo",  "Dublin", "Geneva", "Lisbon", "London",
                                               "Madrid",  "Naples", "Oslo",   "Paris",  "Prague", "Rome",
                                               "Seville", "Tunis",  "Venice", "Vienna"};
      sender = senders[random.below(std::size(senders))];
      crates = std::to_string(2 + random.below(998));
      goods = stuff[random.below(std::size(stuff))];
      place = places[random.below(std::size(places))];
    }
    std::string sender, crates, goods, place;
  };

  int rows_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<Extract>("extract", "a long record is turned into a table", 2048, 0)
                 .param("rows", 0, 0, 100000,
                        "deliveries; 0 = as many as fit with their table, fewer are preceded by noise"))
