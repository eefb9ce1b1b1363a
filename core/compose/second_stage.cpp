#include "compose/second_stage.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

namespace kvlab {
namespace {

// What both run on; an empty list stands for all.
template <class T>
std::vector<T> common(const std::vector<T>& a, const std::vector<T>& b, const char* what, const std::string& entry) {
  if (a.empty() || b.empty()) return a.empty() ? b : a;
  std::vector<T> both;
  std::copy_if(a.begin(), a.end(), std::back_inserter(both),
               [&](T x) { return std::find(b.begin(), b.end(), x) != b.end(); });
  if (both.empty())
    throw Error(Errc::config, std::string("got two methods that have no ") + what + " in common, wanted one for both",
                entry);
  return both;
}

}  // namespace

Needs with_second_stage(Needs first, const Needs& second, Role role, const std::string& entry) {
  for (const auto& [name, asked] : {std::pair{"window_queries", second.window_queries() > 0},
                                    {"mass", second.any_mass() != Mass::none},
                                    {"page_summary", second.page_summary() != Summary::none},
                                    {"min_pages", second.min_pages() > 0},
                                    {"rope", second.rope() != RopeRegime::original},
                                    {"token_state", !second.token_state().empty()},
                                    {"chunked_prompts", !second.chunked_prompts()},
                                    {"observe_beside", second.observe_beside()},
                                    {"uniform_heads", second.uniform_heads()},
                                    {"all_layers", second.all_layers()},
                                    {"planned_on_host", second.planned_on_host()},
                                    {"own_amount", second.own_amount()},
                                    {"oracle", second.oracle()},
                                    {"profile", second.profile()},
                                    {"next_queries", second.next_queries()},
                                    {"finish_prompt", second.finish_prompt()},
                                    {"functional", second.functional()},
                                    {"rebuilds_keys", second.rebuilds_keys()},
                                    {"prompt_lse", second.prompt_lse()},
                                    {"host_pages", second.host_pages()},
                                    {"archive", second.archive()},
                                    {"pauses", second.pauses()},
                                    {"steps", second.steps()},
                                    {"token_ids", second.token_ids()},
                                    {"dense_layers", second.dense_layers() > 0 && role != Role::pruner},
                                    {"output_projection", second.output_projection() && role != Role::rescorer}})
    if (asked)
      throw Error(Errc::plugin,
                  std::string("got a ") + name_of(role) + " that needs " + name +
                      ", wanted one that needs no more than kvlab/stages.hpp allows",
                  entry);
  if (first.output_projection() && second.output_projection())
    throw Error(
        Errc::config,
        "got a scorer and a rescorer that both ask for the output projection, wanted one of the two: its scratch is "
        "there once",
        entry);
  // A rescorer takes no part in decode steps.
  return first.devices(common(first.devices(), second.devices(), "device", entry))
      .dtypes(common(first.dtypes(), second.dtypes(), "element type", entry))
      .scratch_numbers(first.scratch_numbers() + second.scratch_numbers())
      .capturable(first.capturable() && (second.capturable() || role == Role::rescorer))
      .output_projection(first.output_projection() || second.output_projection());
}

}  // namespace kvlab
