// The value of one key of a JSON object: InfiniteBench's Retrieve.KV (Zhang et al. 2024, after Liu et al. 2023). Keys
// and values are UUIDs. Score: 1 if the value is a word of the answer.
#include <kvlab/prompt.hpp>

namespace {

class Kv final : public kvlab::PromptTask {
 public:
  explicit Kv(const kvlab::Params& p)
      : PromptTask(p),
        key_(p.get<kvlab::Identifier>("key")),
        value_(p.get<kvlab::Identifier>("value")),
        pairs_(p.get<int>("pairs")),
        depths_(p.get<int>("depth")) {}

  int samples(const kvlab::TaskEnv&) const override { return depths_ * per_depth(); }
  std::string metric() const override { return "word"; }

  kvlab::TaskSample sample(int index, const kvlab::TaskEnv& env) const override {
    kvlab::Random random = this->random(index, env);
    const int asked = env.questions(), most = pairs_ > 0 ? pairs_ : std::max(asked, context() / 8);
    if (asked > most)
      throw kvlab::Error(kvlab::Errc::config,
                         "got " + std::to_string(asked) + " questions, wanted at most pairs: " + std::to_string(most));
    if (pairs_ > context())
      throw kvlab::Error(kvlab::Errc::config, "got context: " + std::to_string(context()) + ", wanted at least " +
                                                  std::to_string(pairs_) +
                                                  ": so many pairs take a token each and more");
    const auto keys = kvlab::identifiers(key_, most, random), values = kvlab::identifiers(value_, most, random);
    kvlab::Prompt prompt =
        open(env, "Extract the value corresponding to the specified key in the JSON object below.\n");
    for (int i = 0; i < asked; ++i)
      prompt.ask("\nKey: \"" + keys[static_cast<std::size_t>(i)] + "\"\n",
                 "The value associated with the specified key is:", {values[static_cast<std::size_t>(i)]}, max_new());
    const kvlab::Tokens head = env.encode_next("\n\nJSON data:\n{"), joint = env.encode_next(", "),
                        tail = env.encode_next("}");
    int taken = kvlab::length(head) + kvlab::length(tail);
    std::vector<kvlab::Tokens> pairs;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      kvlab::Tokens t = env.encode_next("\"" + keys[i] + "\": \"" + values[i] + "\"");
      const int more = kvlab::length(t) + kvlab::length(joint);
      if (pairs_ == 0 && static_cast<int>(i) >= asked && taken + more > prompt.left()) break;
      taken += more;
      pairs.push_back(std::move(t));
    }
    prompt.room(taken, std::to_string(pairs.size()) + " pairs", 0);
    // The first question's pair is at the grid's depth, the others anywhere.
    std::vector<kvlab::Tokens> order(pairs.begin() + 1, pairs.end());
    random.shuffle(order);
    order.insert(
        order.begin() + static_cast<std::ptrdiff_t>(depth(index, depths_) * static_cast<double>(order.size()) + 0.5),
        pairs.front());
    kvlab::Tokens body = head;
    for (const kvlab::Tokens& t : order) {
      if (&t != &order.front()) kvlab::append(body, joint);
      kvlab::append(body, t);
    }
    kvlab::append(body, tail);
    return prompt.finish(body);
  }

 private:
  kvlab::Identifier key_, value_;
  int pairs_, depths_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::prompt_task<Kv>("kv", "the value of one key of a long JSON object", 4096, 48)
                 .param("pairs", 0, 0, 100000, "keys in the object; 0 = as many as fit, fewer are preceded by noise")
                 .param("key", kvlab::Identifier::uuid, "a number of 7 digits, words, or a UUID")
                 .param("value", kvlab::Identifier::uuid, "the same")
                 .param("depth", 5, 1, 1000,
                        "depths of the first question's pair, evenly from 0 to 100 %; 1 = the middle"))
