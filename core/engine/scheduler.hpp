// Continuous batching: requests arrive, wait, take a slot when the device has room for them, and decode together, each
// at its own length. An iteration runs at most `prefill_chunk` tokens of prompts, then one decode step of every request
// whose prompt is done.
//
// Requests are served in the order of their arrival. When the next decode step might not fit, the latest request is
// preempted. Its cache waits in host memory until there is room again. Where the host has no room, or as the options
// say, the cache is lost: later its prompt is prefilled again and its own tokens are fed one by one. Its policy then
// sees the same steps as before. Its text is the same either way. The earliest request is never preempted for room, so
// every request ends.
#pragma once
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "engine/engine.hpp"

namespace kvlab {

struct Request {
  std::vector<int> prompt;     // not empty
  std::vector<int> fed;        // fed one by one after the prompt, before the answer
  int max_new = 1;             // tokens of the answer, at least 1
  double arrival_ms = 0;       // since the start
  std::uint32_t sequence = 0;  // for Engine::open
  std::uint32_t question = 0;  // for Engine::ask
};

// Times are since the start; NaN = not yet.
struct Served {
  double arrival_ms = 0, admitted_ms = std::numeric_limits<double>::quiet_NaN();
  std::vector<int> tokens;       // of the answer
  std::vector<double> token_ms;  // time of each token
  int preemptions = 0;
  int pauses = 0;        // steps that went on without it, while its pages were under way
  bool ended = false;    // by its last token, which is no part of the text
  bool stopped = false;  // by SchedulerOptions::stops
};

// What becomes of a preempted request's cache.
enum class Preemption : std::uint8_t { swap, recompute };

struct SchedulerOptions {
  Preemption preemption = Preemption::swap;
  int prefill_chunk = 0;          // prompt tokens per iteration; 0 = every prompt that fits, whole
  std::function<bool(int)> ends;  // whether this token ends an answer; none = every answer has max_new tokens
  // Whether the answer to the request of this index ends with the tokens that it has, asked after each; none = no.
  std::function<bool(std::size_t, const std::vector<int>&)> stops;
  // The next token of the answer to the request of this index, of logits [vocab]; none = the most likely one. It
  // is asked for several requests at once.
  std::function<int(std::size_t, std::span<const float>)> choose;
  std::function<double()> clock;                                          // ms, for tests; none = the steady clock
  std::function<void(double)> prompted;                                   // after each chunk of a prompt: its ms
  std::function<void(double, const std::vector<std::int32_t>&)> stepped;  // after each decode step: its ms and slots
  std::function<void(std::size_t)> finished;                              // after a request: its index
};

class Scheduler {
 public:
  // Borrows the engine, whose slots must all be free. Throws Errc::data for a request without a prompt, without an
  // answer, or longer than a slot.
  Scheduler(Engine& engine, std::vector<Request> requests, SchedulerOptions options);

  bool done() const { return finished_ == requests_.size(); }

  // Runs one iteration. When there is nothing to do, the scheduler's time skips to the next arrival. out_of_memory: a
  // request does not fit even alone, and the scheduler cannot go on.
  Fit iterate();

  const std::vector<Served>& served() const { return served_; }  // in the order of the requests given
  std::vector<std::int32_t> slots() const;                       // in use, prompts under way included
  int active() const { return static_cast<int>(active_.size()); }
  int waiting() const { return static_cast<int>(waiting_.size()); }

 private:
  // A request in its slot.
  struct Active {
    std::size_t rank = 0;  // of its arrival
    std::int32_t slot = -1;
    std::size_t prefilled = 0, given = 0;  // tokens done of the prompt; of known() tokens after it
    std::int64_t kept = 0, below = 0;      // bytes that its prompt took so far, of the device and of the host
  };
  // A preempted request whose cache waits.
  struct Aside {
    AsideSequence sequence;
    Active state;  // its slot says nothing
  };
  // The cache that one prompt left on the device, and what it takes of the host when it spills.
  struct Left {
    std::size_t tokens;
    std::int64_t bytes, below;
  };

  std::size_t index(const Active& a) const { return order_[a.rank]; }
  const Request& request(const Active& a) const { return requests_[index(a)]; }
  bool prompting(const Active& a) const { return a.prefilled < request(a).prompt.size(); }
  std::size_t known(std::size_t index) const { return requests_[index].fed.size() + served_[index].tokens.size(); }
  int next_token(const Active& a) const;

  std::int64_t vocab() const { return engine_.model().config.vocab; }
  double now() const;
  void arrive();
  bool admit();
  bool fits(std::size_t index) const;
  bool resume(std::size_t rank);
  Left left_by(std::size_t prompt, const Engine::Demanded& says) const;
  Fit prompts();
  Fit decode();
  std::vector<std::int32_t> make_room();
  std::vector<std::size_t> rows_of_step();     // of active_
  std::vector<std::int32_t> decoding() const;  // the slots of the next decode step
  std::vector<std::int32_t> chosen(const std::vector<std::size_t>& rows) const;
  bool take(Active& a, int token, double at);
  enum class Cache : std::uint8_t { of_use, of_no_use };
  void put_back(std::size_t active, Cache cache);
  void finish(std::size_t active);

  Engine& engine_;
  std::vector<Request> requests_;
  SchedulerOptions options_;
  std::vector<Served> served_;
  std::vector<std::size_t> order_;  // requests by arrival
  std::size_t arrived_ = 0, finished_ = 0, most_active_;
  std::set<std::size_t> waiting_;       // ranks, all higher than those of active_
  std::map<std::size_t, Aside> aside_;  // by rank; those of waiting_ that have a cache
  std::vector<Active> active_;          // ascending ranks; at most the last one is still prompting
  bool full_ = false;                   // a prompt or a step did not fit: nothing is admitted before something ends
  double start_ = 0, skipped_ = 0;
  std::int64_t growth_;        // bytes that a row's decode step added at most; used unless Engine::growth_known()
  std::vector<Left> left_;     // one per prompt so far
  std::vector<float> logits_;  // [vocab], or [row, vocab] with SchedulerOptions::choose
};

}  // namespace kvlab
