// A long document in numbered entries. Demands name one entry, a range, or every so many entries, after LongGenBench's
// skyscraper (Wu et al. 2024). `form: document` is the original: demands are rules, entries are prose behind #*#, and
// the first heading opens the answer; small models do not follow it. `form: list` hides one use per floor in a text and
// asks for one numbered line per floor.
#include <kvlab/prompt.hpp>

#include <map>

namespace {

enum class Form { list, document };

}  // namespace

template <>
struct kvlab::Choices<Form> {
  static constexpr std::pair<Form, const char*> all[] = {{Form::list, "list"}, {Form::document, "document"}};
};

namespace {

class LongGeneration final : public kvlab::PromptTask {
 public:
  explicit LongGeneration(const kvlab::Params& p)
      : PromptTask(p),
        form_(p.get<Form>("form")),
        haystack_(p.get<std::string>("haystack")),
        entries_(p.get<int>("entries")),
        once_(p.get<int>("once")),
        range_(p.get<int>("range")),
        period_(p.get<int>("period")),
        words_(p.get<int>("words")) {
    if (once_ > entries_ || range_ > entries_)
      throw kvlab::Error(kvlab::Errc::config, "got once: " + std::to_string(once_) +
                                                  " and range: " + std::to_string(range_) +
                                                  ", wanted both within entries: " + std::to_string(entries_));
  }

  // References are "N: text": what entry N must name.
  std::string metric() const override { return form_ == Form::list ? "listed_demands" : "demands"; }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    one_question(env, "the document is written once");
    kvlab::Random random = this->random(index, env);
    const Demands demands(*this, random);
    return form_ == Form::list ? list(demands, env, random) : document(demands, env);
  }

 private:
  struct Demands {
    Demands(const LongGeneration& task, kvlab::Random& random) {
      std::vector<std::string> uses{
          "art gallery",  "bakery",        "bookshop",    "cinema",         "clinic",
          "conservatory", "dance studio",  "day nursery", "fitness center", "jewelry workshop",
          "law office",   "library",       "museum",      "music school",   "photography studio",
          "restaurant",   "swimming pool", "tea house",   "theater",        "yoga studio"};
      random.shuffle(uses);
      std::vector<int> floors;
      for (int f = 1; f <= task.entries_; ++f) floors.push_back(f);
      random.shuffle(floors);
      for (int i = 0; i < task.once_; ++i)
        once.emplace_back(floors[static_cast<std::size_t>(i)], uses[static_cast<std::size_t>(i) % (uses.size() - 2)]);
      shared = uses[uses.size() - 2];
      repeated = uses.back();
      from = 1 + static_cast<int>(random.below(static_cast<std::size_t>(task.entries_ - task.range_ + 1)));
      for (const auto& [floor, use] : once) want(floor, use);
      for (int f = from; f < from + task.range_; ++f) want(f, shared);
      if (task.period_ == 0) return;
      start = 1 + static_cast<int>(random.below(static_cast<std::size_t>(std::min(task.period_, task.entries_))));
      for (int f = start; f <= task.entries_; f += task.period_) want(f, repeated);
    }
    void want(int floor, const std::string& use) {
      references.push_back(std::to_string(floor) + ": " + use);
      std::string& all = of[floor];
      all += (all.empty() ? "" : " and ") + use;
    }

    std::vector<std::pair<int, std::string>> once;  // floor, use
    std::string shared, repeated;                   // uses of the range and of the period
    int from = 1, start = 1;                        // their first floors
    std::vector<std::string> references;
    std::map<int, std::string> of;  // all uses of a floor
  };

  kvlab::TaskSample list(const Demands& demands, const kvlab::TaskEnv& env, kvlab::Random& random) const {
    const std::string n = std::to_string(entries_);
    std::vector<kvlab::Tokens> facts;
    std::vector<double> places;
    std::string answer;
    int taken = 0;
    for (int f = 1; f <= entries_; ++f) {
      const auto it = demands.of.find(f);
      const std::string use = it == demands.of.end() ? "offices" : it->second;
      facts.push_back(env.encode_next("\nFloor " + std::to_string(f) + ": " + use));
      taken += kvlab::length(facts.back());
      answer += "\n" + std::to_string(f) + ". " + use;
      places.push_back(random.unit());
    }
    std::sort(places.begin(), places.end());
    constexpr int spare = 8;
    kvlab::Prompt prompt =
        open(env, "Construct a skyscraper with " + n +
                      " floors. What each floor is for is hidden in the following text. Remember it.");
    prompt.ask("\nWrite the complete list, from floor 1 to floor " + n + ". Number the lines.", "", {},
               max_new() > 0 ? max_new() : kvlab::length(env.encode_next(answer)) + spare);
    const int room = prompt.room(taken, n + " floors");
    const kvlab::Haystack& text = haystack_.of(env);
    kvlab::TaskSample out =
        prompt.finish(kvlab::hidden(text.take(random.below(text.pieces.size()), room, env), facts, places));
    out.questions[0].references = demands.references;
    return out;
  }

  kvlab::TaskSample document(const Demands& demands, const kvlab::TaskEnv& env) const {
    const std::string n = std::to_string(entries_);
    std::string text =
        "Construct a skyscraper with " + n +
        " floors. Please follow the detailed floor assignments below:\n1) Specific floors requirements:\n";
    for (const auto& [floor, use] : demands.once)
      text += "  - Designate Floor " + std::to_string(floor) + " for " + use + " use.\n";
    if (range_ > 0)
      text += "2) Range floors requirements: Allocate Floors " + std::to_string(demands.from) + " to " +
              std::to_string(demands.from + range_ - 1) + " for a " + demands.shared + ".\n";
    if (period_ > 0)
      text += "3) Periodic floors requirements: Include a " + demands.repeated + " every " + std::to_string(period_) +
              " floors, starting from Floor " + std::to_string(demands.start) + ".\n";
    text +=
        "4) Document each floor independently with a description of its facilities and design.\n5) Use '#*#' to "
        "separate "
        "the documentation for each floor (e.g. #*# Floor 1: \nThe lobby receives visitors under a high ceiling.).\n"
        "Ensure that the document consists of " +
        n + " entries, each containing at least " + std::to_string(words_) + " words. When the design of all " + n +
        " floors is complete, use '*** finished' to indicate the end of the document.";
    const auto asked = [&](int most) {
      kvlab::Prompt prompt = open(env, most > 0 && max_new() > 0 ? "Some notes first." : "");
      prompt.ask((max_new() > 0 ? "\n" : "") + text, "*** started ***\n#*# Floor 1:", {}, most);
      return prompt;
    };
    // Without a limit of its own the answer gets the whole rest of the context.
    kvlab::Prompt prompt = asked(max_new() > 0 ? max_new() : asked(0).room(0, "no text", 1));
    prompt.room(0, "no text", 0);
    kvlab::TaskSample out = prompt.finish({});
    out.questions[0].references = demands.references;
    return out;
  }

  Form form_;
  kvlab::HaystackText haystack_;
  int entries_, once_, range_, period_, words_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<LongGeneration>("long_generation", "a long document whose entries have to meet demands",
                                                4096, 0)
                 .param("form", Form::list, "a line for each entry, or LongGenBench's prose")
                 .param("entries", 30, 1, 10000, "floors to describe")
                 .param("once", 5, 0, 10000, "floors with a demand of their own")
                 .param("range", 5, 0, 10000, "neighbours that share one")
                 .param("period", 10, 0, 10000, "one floor in so many has the same; 0 = none")
                 .param("words", 150, 1, 10000, "of each entry in prose, at least; not checked")
                 .param("haystack", std::string("bundled/niah/haystack.txt"),
                        "of a list: text file, which repeats when it is too short; or noise"))
