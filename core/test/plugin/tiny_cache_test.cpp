// The cache of the tests that tools/new-policy makes: what a policy that places pages meets in it.
#include "../tools/templates/tiny_cache.hpp.in"

#include <catch2/catch.hpp>

using namespace kvlab;

TEST_CASE("the template's cache has pages on the host and counts steps by slot") {
  TinyCache cache(2, 1, 2);
  for (int row = 0; row < 2; ++row)
    for (const float x : {1.f, 3.f, 5.f, 7.f, 2.f}) cache.append(row, 0, {x, 0}, {x, 0});
  cache.query(0, 0, {1, 0});
  cache.query(1, 0, {1, 0});
  cache.steps(0, 4);
  cache.steps(1, 5);
  cache.to_host(0, 0, 0);
  cache.to_host(0, 0, 1, true);

  const LayerStep step = cache.step(1);
  CHECK(step.step[0] == 4);
  CHECK(step.steps[step.slots[0]] == 4);
  CHECK(step.steps[step.slots[1]] == 5);
  const auto on = [](const PagedKv& kv, int row, int page) { return kv.entry(row, 0, page).frame != null_frame; };
  CHECK((!on(step.pages, 0, 0) && on(step.pages, 0, 1) && on(step.pages, 0, 2)));
  CHECK((on(step.host_pages, 0, 0) && on(step.host_pages, 0, 1) && !on(step.host_pages, 0, 2)));
  CHECK((on(step.pages, 1, 0) && !on(step.host_pages, 1, 0)));
  float key = 0;
  std::memcpy(&key, step.host_pages.frame(step.host_pages.entry(0, 0, 0)) + TinyCache::dim * sizeof key, sizeof key);
  CHECK(key == 3);

  // Every second step chooses a page anew. The first row is due, although its best page may lie on the host.
  const Heads due = Heads::every(step.steps, 2), others = Heads::every(step.steps, 5);
  const PageList pages = step.list<PageList>("pages", step.max_pages);
  pages.count(1, 0) = -1;
  PageChoice choice;
  choice.budget = 1;
  ops::choose_pages(step, step.queries, choice.among(due), ops::PageCounts{}, pages, Stream::cpu());
  CHECK(pages.count(0, 0) == 1);
  CHECK(pages.index(0, 0, 0) == 1);
  CHECK(pages.count(1, 0) == -1);

  const Scores norms = step.kv_head_scores("norms");
  CHECK_THROWS_AS(ops::row_norm(step.keys, norms, Stream::cpu()), Error);
  ops::row_norm(step.keys, norms, Stream::cpu(), others);
  CHECK(norms(1, 0, 3) == 7);
}
