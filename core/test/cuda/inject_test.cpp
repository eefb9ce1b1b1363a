#include "ops/select/inject.hpp"

#include <catch2/catch.hpp>

#include "cases/place.hpp"
#include "support/inject_fixture.hpp"

using namespace kvlab;
using namespace kvlab::test;
using namespace kvlab::cases;

TEST_CASE("cuda inject_pages equals its reference") {
  for (unsigned n = 0; n < 40; ++n) {
    CAPTURE(n);
    RandomInjection r(n);
    OnDevice on;
    ops::InjectArgs a = r.f.args;
    a.pages = on.put(a.pages, r.f.frame.size());
    a.list = on.put(a.list);
    a.state = on.put(a.state);
    a.sequence = on.put(r.f.sequence.data(), r.f.sequence.size());
    if (a.recorded.first) {
      a.recorded.first = on.put(r.first.data(), r.first.size());
      a.recorded.steps = on.put(r.steps.data(), r.steps.size());
      a.recorded.begin = on.put(r.begin.data(), r.begin.size());
      a.recorded.page = on.put(r.page.data(), r.page.size());
    }
    for (int step = 0; step < 4; ++step) {
      CAPTURE(step);
      r.next();
      a.list = on.put(r.f.args.list);
      a.question = on.put(r.f.question.data(), r.f.question.size());
      a.pages.length = on.put(r.f.args.pages.length);
      ops::inject_pages(a, on.stream());
      ops::inject_pages_reference(r.f.args);
      CHECK(on.get(a.list.index) == r.f.index);
      CHECK(on.get(a.list.count) == r.f.count);
      CHECK(on.get(a.state) == r.f.state);
    }
  }
}
