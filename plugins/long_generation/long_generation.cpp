// A long document in numbered entries, some of which have to meet demands: one entry, a range, every so many. After
// LongGenBench's skyscraper (Wu et al. 2024), in its form: entries begin with #*# and the first one's heading opens the
// answer. Score: the share of demanded entries that name what they must, checked by rule.
#include <kvlab/prompt.hpp>

#include <map>

namespace {

class LongGeneration final : public kvlab::PromptTask {
 public:
  explicit LongGeneration(const kvlab::Params& p)
      : PromptTask(p),
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

  std::string metric() const override { return "demands"; }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    one_question(env, "the document is written once");
    kvlab::Random random = this->random(index, env);
    std::vector<std::string> uses{
        "art gallery",  "bakery",        "bookshop",    "cinema",         "clinic",
        "conservatory", "dance studio",  "day nursery", "fitness center", "jewelry workshop",
        "law office",   "library",       "museum",      "music school",   "photography studio",
        "restaurant",   "swimming pool", "tea house",   "theater",        "yoga studio"};
    random.shuffle(uses);
    const std::string n = std::to_string(entries_);
    std::vector<std::string> demands;
    std::string text =
        "Construct a skyscraper with " + n +
        " floors. Please follow the detailed floor assignments below:\n1) Specific floors requirements:\n";
    std::vector<int> floors;
    for (int f = 1; f <= entries_; ++f) floors.push_back(f);
    random.shuffle(floors);
    const auto want = [&](int floor, const std::string& use) { demands.push_back(std::to_string(floor) + ": " + use); };
    for (int i = 0; i < once_; ++i) {
      const int floor = floors[static_cast<std::size_t>(i)];
      const std::string& use = uses[static_cast<std::size_t>(i) % (uses.size() - 2)];
      text += "  - Designate Floor " + std::to_string(floor) + " for " + use + " use.\n";
      want(floor, use);
    }
    const int from = 1 + static_cast<int>(random.below(static_cast<std::size_t>(entries_ - range_ + 1)));
    if (range_ > 0) {
      const std::string& use = uses[uses.size() - 2];
      text += "2) Range floors requirements: Allocate Floors " + std::to_string(from) + " to " +
              std::to_string(from + range_ - 1) + " for a " + use + ".\n";
      for (int f = from; f < from + range_; ++f) want(f, use);
    }
    if (period_ > 0) {
      const int start = 1 + static_cast<int>(random.below(static_cast<std::size_t>(std::min(period_, entries_))));
      text += "3) Periodic floors requirements: Include a " + uses.back() + " every " + std::to_string(period_) +
              " floors, starting from Floor " + std::to_string(start) + ".\n";
      for (int f = start; f <= entries_; f += period_) want(f, uses.back());
    }
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
    // Without a limit of its own the answer has the whole rest of the context.
    kvlab::Prompt prompt = asked(max_new() > 0 ? max_new() : asked(0).room(0, "no text", 1));
    prompt.room(0, "no text", 0);
    kvlab::TaskSample out = prompt.finish({});
    out.questions[0].references = demands;
    return out;
  }

 private:
  int entries_, once_, range_, period_, words_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<LongGeneration>("long_generation", "a long document whose entries have to meet demands",
                                                4096, 0)
                 .param("entries", 100, 1, 10000, "floors to describe")
                 .param("once", 5, 0, 10000, "floors with a demand of their own")
                 .param("range", 5, 0, 10000, "neighbours that share one")
                 .param("period", 10, 0, 10000, "one floor in so many has the same; 0 = none")
                 .param("words", 150, 1, 10000, "of each entry, at least; not checked"))
