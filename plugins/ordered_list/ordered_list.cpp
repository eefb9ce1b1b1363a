// Many values in one long answer, in a given order: attention's needs drift while the answer grows. Facts are RULER's.
// With `order: named` the question names the keys in an order of its own. With `order: text` it names no key and asks
// for all values in the text's order. Score: the share of places with the right value.
#include <kvlab/answers.hpp>
#include <kvlab/prompt.hpp>

#include <algorithm>
#include <numeric>

namespace {

enum class Order { named, text };

}  // namespace

template <>
struct kvlab::Choices<Order> {
  static constexpr std::pair<Order, const char*> all[] = {{Order::named, "named"}, {Order::text, "text"}};
};

namespace {

class OrderedList final : public kvlab::PromptTask {
 public:
  explicit OrderedList(const kvlab::Params& p)
      : PromptTask(p),
        haystack_(p.get<std::string>("haystack")),
        order_(p.get<Order>("order")),
        items_(p.get<int>("items")) {}

  std::string metric() const override { return "in_order"; }
  // Commas, semicolons and line ends part items; numbering and text before a colon are dropped. Exact at each place:
  // one item too many costs all that follow.
  std::optional<double> score(const std::string& answer, const std::vector<std::string>& references) const override {
    std::vector<std::string> items;
    for (const std::string& piece : kvlab::answers::split(answer, ",;\n")) {
      std::string item = kvlab::answers::fold(piece.substr(piece.rfind(':') + 1));  // after "key:", or all of it
      item = kvlab::answers::trimmed(item, " ");
      if (item.rfind("and ", 0) == 0) item.erase(0, 4);
      const std::size_t number = item.find_first_not_of("0123456789");  // "3. x", "3) x", "- x"
      if (number != std::string::npos && item.find_first_of(".)-*", number) == number &&
          item.compare(number + 1, 1, " ") == 0)
        item.erase(0, number + 2);
      item = kvlab::answers::trimmed(item, " .\"'`");
      if (!item.empty()) items.push_back(item);
    }
    double right = 0;
    for (std::size_t i = 0; i < std::min(items.size(), references.size()); ++i)
      right += items[i] == kvlab::answers::fold(references[i]);
    return right / static_cast<double>(references.size());
  }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    one_question(env, "the list is asked for once");
    kvlab::Random random = this->random(index, env);
    const auto keys = kvlab::identifiers(kvlab::Identifier::word, items_, random),
               values = kvlab::identifiers(kvlab::Identifier::number, items_, random);
    std::vector<std::size_t> order(keys.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    if (order_ == Order::named) random.shuffle(order);
    std::vector<std::string> names, wanted, answer;
    for (const std::size_t i : order) {
      names.push_back(keys[i]);
      wanted.push_back(values[i]);
      answer.push_back(keys[i] + ": " + values[i]);
    }
    // Room for the longer form of the answer: keys and values.
    const int own = kvlab::length(env.encode_next("\n" + kvlab::joined(answer, "\n") + "\n")) + 8;
    kvlab::Prompt prompt =
        open(env,
             "Some special magic numbers are hidden within the following text. Make sure to memorize "
             "it. I will quiz you about the numbers afterwards.");
    prompt.ask(order_ == Order::named
                   ? "\nList the special magic numbers for: " + kvlab::joined(names, ", ") + "."
                   : "\nList all special magic numbers in the order in which the provided text mentions them.",
               "", wanted, max_new() > 0 ? max_new() : own);
    std::vector<kvlab::Tokens> facts;
    std::vector<double> places;
    int taken = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      facts.push_back(env.encode_next(haystack_.joint() + "One of the special magic numbers for " + keys[i] +
                                      " is: " + values[i] + "."));
      taken += kvlab::length(facts.back());
      places.push_back(random.unit());
    }
    std::sort(places.begin(), places.end());
    const int room = prompt.room(taken, std::to_string(items_) + " facts");
    const kvlab::Haystack& text = haystack_.of(env);
    return prompt.finish(kvlab::hidden(text.take(random.below(text.pieces.size()), room, env), facts, places));
  }

 private:
  kvlab::HaystackText haystack_;
  Order order_;
  int items_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<OrderedList>("ordered_list", "many values in one long answer, in a given order", 4096,
                                             0)
                 .param("items", 16, 1, 1000, "values of the list")
                 .param("order", Order::named, "the question names the keys, or wants all values in the text's order")
                 .param("haystack", std::string("bundled/niah/haystack.txt"),
                        "text file, which repeats when it is too short; or noise"))
