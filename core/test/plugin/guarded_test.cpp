// Each error of a plugin's callback names the plugin, its file and the callback.
#include <kvlab/error.hpp>

#include <catch2/catch.hpp>
#include <functional>
#include <new>

#include "cases/paged_fixture.hpp"
#include "compose/compose.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "support/places.hpp"

namespace fs = std::filesystem;
using namespace kvlab;

namespace {

const fs::path file = test::build_root() / "lib" / "bad_plugins" / "libmisbehaving.so";

template <class Interface>
Instance<Interface> told(const char* in, const char* deed) {
  for (const PluginInfo& info : load_library(file))
    if (info.role == role_of<Interface>)
      return create<Interface>(info, resolve(info, {{"in", std::string(in)}, {"deed", std::string(deed)}}));
  throw Error(Errc::internal, "no such role");
}

template <class Body>
Error error_of(Body body) {
  try {
    body();
  } catch (const Error& e) {
    return e;
  }
  FAIL("nothing was thrown");
  return Error(Errc::internal, "");
}

// Messages go to terminals and tables, so they have no control characters.
void is_plain(const std::string& text) {
  for (const char c : text) CHECK((static_cast<unsigned char>(c) >= 0x20 && c != 0x7f));
}

std::string place(const char* plugin, const char* callback) {
  return "plugin " + std::string(plugin) + " (" + file.string() + "), " + callback + "()";
}

}  // namespace

TEST_CASE("what a callback throws names plugin, file and callback, whatever it is") {
  const Stream cpu = Stream::cpu();
  cases::HeapWorkspace w;
  struct Call {
    const char *plugin, *callback;
    std::function<void(const char* deed)> make;
  };
  const Call calls[] = {
      {"bad_scorer", "constructor", [](const char* d) { told<Scorer>("constructor", d); }},
      {"bad_scorer", "needs", [](const char* d) { told<Scorer>("needs", d)->needs(); }},
      {"bad_scorer", "pins", [](const char* d) { told<Scorer>("pins", d)->pins(8); }},
      {"bad_scorer", "every", [](const char* d) { told<Scorer>("every", d)->every(); }},
      {"bad_scorer", "observe", [&](const char* d) { told<Scorer>("observe", d)->observe({}, cpu); }},
      {"bad_scorer", "score", [&](const char* d) { told<Scorer>("score", d)->score({}, {}, cpu); }},
      {"bad_scorer", "attach", [&](const char* d) { told<Scorer>("attach", d)->attach({}, {}, w); }},
      {"bad_scorer", "load_profile", [](const char* d) { told<Scorer>("load_profile", d)->load_profile({}); }},
      {"bad_scorer", "release", [](const char* d) { told<Scorer>("release", d)->release(0); }},
      {"bad_selector", "needs", [](const char* d) { told<Selector>("needs", d)->needs(); }},
      {"bad_selector", "attach", [&](const char* d) { told<Selector>("attach", d)->attach({}, {}, w); }},
      {"bad_selector", "prefill", [&](const char* d) { told<Selector>("prefill", d)->prefill({}, cpu); }},
      {"bad_selector", "observe", [&](const char* d) { told<Selector>("observe", d)->observe({}, cpu); }},
      {"bad_selector", "load_profile", [](const char* d) { told<Selector>("load_profile", d)->load_profile({}); }},
      {"bad_selector", "release", [](const char* d) { told<Selector>("release", d)->release(0); }},
      {"bad_selector", "select", [&](const char* d) { told<Selector>("select", d)->select({}, {}, cpu); }},
      {"bad_selector", "pins", [](const char* d) { told<Selector>("pins", d)->pins(); }},
      {"bad_budget", "allot", [&](const char* d) { told<Budget>("allot", d)->allot({}, cpu); }},
      {"bad_budget", "uniform_heads", [](const char* d) { told<Budget>("uniform_heads", d)->uniform_heads(); }},
      {"bad_budget", "numbers", [](const char* d) { told<Budget>("numbers", d)->numbers(); }},
      {"bad_budget", "window_queries", [](const char* d) { told<Budget>("window_queries", d)->window_queries(); }},
      {"bad_budget", "measure", [&](const char* d) { told<Budget>("measure", d)->measure({}, {}, {}, {}, cpu); }},
      {"bad_budget", "divide", [](const char* d) { told<Budget>("divide", d)->divide({}); }},
      {"bad_budget", "reads_profile", [](const char* d) { told<Budget>("reads_profile", d)->reads_profile(); }},
      {"bad_budget", "load_profile", [](const char* d) { told<Budget>("load_profile", d)->load_profile({}); }},
      {"bad_budget", "attach", [](const char* d) { told<Budget>("attach", d)->attach({}); }},
      {"bad_policy", "finish_prompt",
       [&](const char* d) {
         Edits edits;
         told<Policy>("finish_prompt", d)->finish_prompt({}, edits, cpu);
       }},
      {"bad_policy", "needs", [](const char* d) { told<Policy>("needs", d)->needs(); }},
      {"bad_policy", "load_profile", [](const char* d) { told<Policy>("load_profile", d)->load_profile({}); }},
      {"bad_policy", "release", [](const char* d) { told<Policy>("release", d)->release(0); }},
      {"bad_profiler", "observe", [&](const char* d) { told<Profiler>("observe", d)->observe({}, cpu); }},
      {"bad_profiler", "finish",
       [](const char* d) {
         Profile p;
         told<Profiler>("finish", d)->finish(p);
       }},
      {"bad_metric", "score", [](const char* d) { told<AnswerMetric>("score", d)->score("", {"x"}, {}); }},
      {"bad_metric", "check", [](const char* d) { told<AnswerMetric>("check", d)->check({"x"}, {}); }},
  };
  for (const Call& call : calls) {
    CAPTURE(call.plugin, call.callback);
    const Error number = error_of([&] { call.make("throw_int"); });
    CHECK(number.code() == Errc::plugin);
    CHECK(number.where() == place(call.plugin, call.callback));
    const Error other = error_of([&] { call.make("throw"); });
    CHECK(other.code() == Errc::plugin);
    CHECK(other.where() == place(call.plugin, call.callback));
    CHECK_THAT(other.message(), Catch::Contains("red\\x1b[31m\\nbell\\x07"));
    is_plain(other.what());
    try {
      call.make("no_memory");
      FAIL("nothing was thrown");
    } catch (const std::bad_alloc& e) {
      CHECK_THAT(e.what(), Catch::Contains(place(call.plugin, call.callback)));
    }
    if (std::string(call.callback) == "constructor") continue;  // a constructor's error passes on its text only
    const Error own = error_of([&] { call.make("throw_error"); });
    CHECK(own.code() == Errc::data);
    CHECK(own.where() == place(call.plugin, call.callback));
    CHECK(own.message() == "got a bad\\x1b[2J day, wanted a good one");
    CHECK(error_of([&] { call.make("throw_internal"); }).code() == Errc::plugin);
  }
}

TEST_CASE("numbers that no contract allows are refused where they enter") {
  CHECK(error_of([] { told<Scorer>("pins", "negative")->pins(8); }).where() == place("bad_scorer", "pins"));
  CHECK(error_of([] { told<Scorer>("pins", "huge")->pins(8); }).where() == place("bad_scorer", "pins"));
  CHECK(error_of([] { told<Selector>("pins", "negative")->pins(); }).where() == place("bad_selector", "pins"));
  CHECK(error_of([] { told<Policy>("needs", "negative")->needs(); }).where() == place("bad_policy", "needs"));
  const Error every = error_of([] { told<Scorer>("every", "negative")->every(); });
  CHECK(every.where() == place("bad_scorer", "every"));
  CHECK_THAT(every.message(), Catch::Contains("got -1"));
  CHECK_NOTHROW(told<Scorer>("nowhere", "nothing")->pins(8));
  for (const char* deed : {"nan", "high"}) {
    const Error score = error_of([&] { told<AnswerMetric>("score", deed)->score("", {"x"}, {}); });
    CHECK(score.where() == place("bad_metric", "score"));
    CHECK_THAT(score.message(), Catch::Contains("wanted 0 to 1"));
  }
}

TEST_CASE("a division over layers that no contract allows is refused") {
  Division d;
  d.layers = 2, d.kv_heads = 2, d.tokens = 5, d.length = {9, 9, 9, 9};
  CHECK(told<Budget>("divide", "nothing")->divide(d) == std::vector<std::int32_t>{5, 5, 5, 5});
  const auto refused = [&](const char* deed) {
    const Error e = error_of([&] { told<Budget>("divide", deed)->divide(d); });
    CHECK(e.code() == Errc::plugin);
    CHECK(e.where() == place("bad_budget", "divide"));
    return e.message();
  };
  CHECK(refused("negative") ==
        "got -1 tokens to keep in divided layer 0, KV head 1, wanted none below 0 and at most "
        "the 9 that it holds");
  CHECK_THAT(refused("long"), Catch::Contains("got 10 tokens to keep in divided layer 1, KV head 0"));
  CHECK(refused("few") == "got numbers for 3 KV heads of the layers, wanted 4");
  CHECK(refused("many") == "got 21 tokens to keep over all layers and KV heads, wanted at most 20");
  d.pinned = 6;  // 24 tokens stay in any case
  CHECK_NOTHROW(told<Budget>("divide", "many")->divide(d));
  CHECK(error_of([] { told<Budget>("numbers", "negative")->numbers(); }).where() == place("bad_budget", "numbers"));
}

TEST_CASE("an array that the profile does not have is told with those that it has") {
  const Profile profile{{"votes", {}}, {"windows", {}}};
  const Error scorer = error_of([&] { told<Scorer>("load_profile", "absent")->load_profile(profile); });
  CHECK(scorer.code() == Errc::config);
  CHECK(scorer.where() == place("bad_scorer", "load_profile"));
  CHECK_THAT(scorer.message(), Catch::Contains("measured votes, windows"));
  CHECK(error_of([&] { told<Selector>("load_profile", "absent")->load_profile(profile); }).code() == Errc::config);
  CHECK(error_of([&] { told<Budget>("load_profile", "absent")->load_profile(profile); }).code() == Errc::config);
  CHECK_THAT(error_of([&] { told<Policy>("load_profile", "absent")->load_profile({}); }).message(),
             Catch::Contains("measured nothing"));
}
