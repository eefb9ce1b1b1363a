#include "test/support/metric_fixture.hpp"
#include "test/support/skipped.hpp"

#include <cstdlib>
#include <kvlab/confined.hpp>
#include <sstream>

#include "harness.hpp"

using namespace kvlab;
using test::confines;
using test::metric;

namespace {

const std::string right = "def next_one(n):\n    return n + 1\n";
const std::vector<std::string> tests{"def check(f):\n    assert f(2) == 3\n\ncheck(next_one)\n"};
const Record record{{"entry_point", {"next_one"}}, {"input", {"def next_one(n):\n    \"\"\"The next number.\"\"\""}}};

using Given = std::map<std::string, ParamValue>;
Given allowed(Given given = {}) {
  given["execute_code"] = true;
  given.emplace("python", std::string("/usr/bin/python3"));
  return given;
}

double score(const std::string& answer, const std::vector<std::string>& references = tests, const Given& given = {}) {
  return metric("unit_tests", allowed(given))->score(answer, references, record);
}

}  // namespace

TEST_CASE("unit_tests: no code runs unless the experiment says so") {
  const auto off = metric("unit_tests");
  CHECK_THROWS_WITH(off->check(tests, record), Catch::Contains("got execute_code: false, wanted true") &&
                                                   Catch::Contains("runs the code that a model wrote"));
  CHECK_THROWS_WITH(off->score(right, tests, record), Catch::Contains("got execute_code: false"));
}

TEST_CASE("unit_tests: right code passes, and wrong code does not") {
  if (!confines()) return;
  CHECK(score(right) == 1);
  CHECK(score("def next_one(n):\n    return n + 2\n") == 0);
  CHECK(score("I do not know.") == 0);
  CHECK(score("") == 0);
  CHECK(score(right, {"assert False", tests[0]}) == 1);  // any reference will do
  CHECK(score("def next_one(n):\n    return 1 / 0\n") == 0);
}

TEST_CASE("unit_tests: the code is taken out of the answer") {
  if (!confines()) return;
  CHECK(score(right + "```\nIt adds one.\n") == 1);         // the prompt opened the block
  CHECK(score("```python\n" + right + "```\nDone.") == 1);  // a block of the answer
  CHECK(score("This is it:\n\n" + right + "\nIt adds one.") == 1);
  CHECK(score(right + "\nassert next_one(2) == 9\n") == 1);  // statements that define nothing are left out
  CHECK(score(right + "\nif __name__ == '__main__':\n    import no_such_module\n") == 1);
  CHECK(score("from math import floor\n\nONE = floor(1.5)\n\n\ndef add(a):\n    return a + ONE\n\n\n"
              "def next_one(n):\n    return add(n)\n") == 1);
  CHECK(score("broken = no_such_name\n\n\n" + right) == 1);           // nothing needs it
  CHECK(score(right + "\n\ndef next_one(n):\n    return 0\n") == 1);  // the first of a name counts
  CHECK(score("def two():\n    return 2\n\n\n" + right, {"assert next_one(two()) == 3\n"}) == 1);
  CHECK(score("    return n + 1\n") == 0);
  CHECK(score("    return n + 1\n", tests, {{"before", std::string("input")}}) == 1);
}

TEST_CASE("unit_tests: the code of an answer is what EvalPlus takes out of it") {
  if (!confines()) return;
  std::stringstream cases;
  cases << std::ifstream(test::source_root() / "core/test/golden/code.json").rdbuf();
  std::string program = unit_tests::harness;
  program.replace(program.rfind("main()"), 6, R"(
import json
cases = json.load(sys.stdin)
print([c for c in cases if sanitize(c["answer"], c["entry"]) != c["code"]], len(cases))
)");
  const ConfinedEnd end = run_confined(
      {.words = {"/usr/bin/python3", "-I", "-W", "ignore", "-c", program}, .input = cases.str(), .seconds = 120});
  CHECK(end.said == "[] 250\n");
}

TEST_CASE("unit_tests: a long answer without code is read in time") {
  if (!confines()) return;
  std::string answer;
  for (int i = 0; i < 400; ++i) answer += "Line " + std::to_string(i) + " of the answer says nothing.\n";
  const Given soon{{"timeout", 20.}};
  CHECK(score(answer + "\n" + right + "\n" + answer, tests, soon) == 1);
  std::string halves;
  for (int i = 0; i < 150; ++i) halves += "x" + std::to_string(i) + " = 1\n";
  CHECK(score(halves + "This is no code.\n" + halves + right, tests, soon) == 1);
}

TEST_CASE("unit_tests: code may start threads and programs") {
  if (!confines()) return;
  CHECK(score("from threading import Thread\nfrom subprocess import run\n\ndef next_one(n):\n    out = []\n"
              "    thread = Thread(target=lambda: out.append(run(['echo', '1'], capture_output=True).stdout))\n"
              "    thread.start()\n    thread.join()\n    return n + int(out[0])\n") == 1);
}

TEST_CASE("unit_tests: a program that ends early has passed nothing") {
  if (!confines()) return;
  for (const char* text :
       {"import sys\n\ndef next_one(n):\n    sys.exit(0)\n    return 1\n",
        "import os\n\ndef next_one(n):\n    os._exit(0)\n    return 1\n",
        "def next_one(n):\n    print('passed')\n    raise SystemExit\n    return 1\n",
        "import os, signal\n\ndef next_one(n):\n    os.kill(os.getpid(), signal.SIGKILL)\n    return 1\n"}) {
    CAPTURE(text);
    CHECK(score(text) == 0);
  }
}

TEST_CASE("unit_tests: a loop, a memory bomb and a fork bomb end, and are wrong") {
  if (!confines()) return;
  const Given soon{{"timeout", 2.}, {"memory", std::int64_t{256}}};
  for (const char* text : {"def next_one(n):\n    while True:\n        pass\n    return 1\n",
                           "def next_one(n):\n    x = bytearray(1 << 40)\n    return 3\n",
                           "def next_one(n):\n    x = [0]\n    while True:\n        x += x\n    return 3\n",
                           "import os\n\ndef next_one(n):\n    while True:\n        os.fork()\n    return 3\n"}) {
    CAPTURE(text);
    CHECK(score(text, tests, soon) == 0);
  }
}

TEST_CASE("unit_tests: code has no network and writes no file of the machine") {
  if (!confines()) return;
  CHECK(score("import socket\n\ndef next_one(n):\n    socket.socket()\n    return n + 1\n") == 0);
  CHECK(score("def next_one(n):\n    open('/usr/kvlab-was-here', 'w')\n    return n + 1\n") == 0);
  CHECK(score("def next_one(n):\n    open('/var/tmp/kvlab-was-here', 'w')\n    return n + 1\n") == 0);
  CHECK(score("def next_one(n):\n    open('own', 'w').write('x')\n    return n + 1\n") == 1);
  setenv("KVLAB_SECRET_OF_TEST", "x", 1);
  CHECK(score("import os\n\ndef next_one(n):\n    return n + 1 + ('KVLAB_SECRET_OF_TEST' in os.environ)\n") == 1);
  unsetenv("KVLAB_SECRET_OF_TEST");
}

TEST_CASE("unit_tests: a Python that cannot run the tests is an error, never a score") {
  if (!confines()) return;
  const std::vector<std::string> others{"import math\nfrom no_such_module import x\n" + tests[0]};
  for (const bool scored : {false, true}) {
    const auto one = metric("unit_tests", allowed());
    const auto ask = [&] { scored ? void(one->score(right, others, record)) : one->check(others, record); };
    CHECK_THROWS_WITH(ask(), Catch::Contains("got 'ModuleNotFoundError: No module named 'no_such_module'' of "
                                             "/usr/bin/python3") &&
                                 Catch::Contains("wanted a Python that starts"));
  }
  CHECK_THROWS_WITH(score(right, tests, {{"python", std::string("/no/such")}}),
                    Catch::Contains("got no program '/no/such'"));
  CHECK_THROWS_WITH(score(right, tests, {{"python", std::string("false")}}), Catch::Contains("got 'nothing' of false"));
  CHECK_THROWS_WITH(score(right, tests, {{"before", std::string("prompt")}}),
                    Catch::Contains("got no text in the field 'prompt'"));
}
