// The model turns a long record into a table. It needs nearly all of the context; a needle needs one line of it. Score:
// F1 of the table's cells.
#include <kvlab/prompt.hpp>

namespace {

class Extract final : public kvlab::PromptTask {
 public:
  explicit Extract(const kvlab::Params& p) : PromptTask(p), rows_(p.get<int>("rows")) {}

  std::string metric() const override { return "table_f1"; }

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
