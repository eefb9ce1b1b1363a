#!/usr/bin/env python3
"""Tests tools/mutate on a small project of its own. Usage: test_mutate.py"""
import difflib
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

TOOL = Path(__file__).resolve().parent / "mutate"
PROJECT = {
    "CMakeLists.txt": """cmake_minimum_required(VERSION 3.25)
project(small LANGUAGES CXX)
enable_testing()
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_executable(test_sum test_sum.cpp sum.cpp)
target_link_libraries(test_sum PRIVATE ${CMAKE_DL_LIBS})
set_target_properties(test_sum PROPERTIES ENABLE_EXPORTS ON)
add_library(add MODULE plugins/add.cpp)
set_target_properties(add PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib PREFIX "")
add_custom_target(plugins DEPENDS add)
add_test(NAME in_dutch COMMAND test_sum)
set_tests_properties(in_dutch PROPERTIES ENVIRONMENT "WORD=som")
""",
    "CMakePresets.json": """{"version": 6, "configurePresets": [
  {"name": "release", "generator": "Ninja", "binaryDir": "${sourceDir}/build/${presetName}"}]}
""",
    ".gitignore": "/build/\n",
    "sum.cpp": """int sum(const int* x, int n) {
  int total = 0;
  for (int i = 0; i < n; ++i) total += x[i];
  return total;
}
""",
    "plugins/add.cpp": """extern "C" int add(int a, int b) { return a + b; }
""",
    # A filter names one check. The check "broken" fails whatever bug is planted.
    "test_sum.cpp": """#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>
#include <string>
int sum(const int* x, int n);
int main(int count, char** arguments) {
  const std::string filter = arguments[1];
  if (filter == "-l") {
    const bool mine = count == 3 && std::string("all none word plugin broken").find(arguments[2]) != std::string::npos;
    if (std::string(arguments[2]) == "gpu") return std::puts("skipped: no GPU"), 77;
    if (std::string(arguments[2]) == "word" && !std::getenv("WORD")) return 1;
    std::printf("Matching test cases:\\n%s\\n", mine ? "1 matching test case" : "0 matching test cases");
    return mine;
  }
  const int x[] = {1, 2, 3};
  if (filter == "all") return sum(x, 3) != 6;
  if (filter == "none") return sum(x, 0) != 0;
  if (filter == "word") return std::getenv("WORD") != std::string("som") || sum(x, 1) != 1;
  if (filter == "plugin") {
    void* library = dlopen("lib/add.so", RTLD_NOW);  // tests run in the build folder
    void* found = library ? dlsym(library, "add") : nullptr;
    return !found || reinterpret_cast<int (*)(int, int)>(found)(2, 3) != 5;
  }
  return 1;
}
""",
}
BUGS = {"last": ("i < n;", "i < n - 1;"), "start": ("total = 0", "total = 1"), "endless": ("++i", "i += 0"),
        "syntax": ("return total;", "return total"), "gone": ("total -= 1", "total -= 2"),
        "plugin": ("a + b", "a - b")}


def patch(bug):
    old, new = BUGS[bug]
    path = "plugins/add.cpp" if bug == "plugin" else "sum.cpp"
    before = PROJECT[path]
    if old not in before:  # a patch for another version of the file
        before = before.replace("total += x[i]", old)
    return "".join(difflib.unified_diff(before.splitlines(True), before.replace(old, new).splitlines(True),
                                        "a/" + path, "b/" + path, n=1))


class Mutate(unittest.TestCase):
    def setUp(self):
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        for name, text in PROJECT.items():
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_text(text)
        (self.root / "tools" / "mutants").mkdir(parents=True)
        shutil.copy(TOOL, self.root / "tools" / "mutate")
        for command in ("init -q", "add .", "-c user.name=t -c user.email=t@t commit -q -m all"):
            subprocess.run(["git", *command.split()], cwd=self.root, check=True)

    def plant(self, name, bug, test, **more):
        header = {"Bug": "It is wrong.", "Caught by": test, **more}
        text = "".join(f"{k}: {v}\n" for k, v in header.items()) + patch(bug)
        (self.root / "tools" / "mutants" / (name + ".patch")).write_text(text)

    def mutate(self, *arguments, **more):
        environment = {k: v for k, v in os.environ.items() if k != "KVLAB_BUILD"}
        done = subprocess.run([self.root / "tools" / "mutate", *arguments], cwd=self.root, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**environment, "MUTATE_LEAST_SECONDS": "3", **more})
        return done.returncode, done.stdout

    def test_caught_and_not_caught(self):
        self.plant("last", "last", "test_sum all")
        self.plant("hangs", "endless", "test_sum all")
        self.plant("environment", "start", "test_sum word", Environment="in_dutch")
        status, output = self.mutate()
        self.assertEqual(status, 0, output)
        self.assertIn("3 of 3 caught", output)
        self.plant("unseen", "last", "test_sum none")
        status, output = self.mutate("last", "unseen")
        self.assertEqual(status, 1, output)
        self.assertIn("NOT CAUGHT: unseen", output)
        self.assertIn("1 of 2 caught", output)
        self.assertEqual(self.mutate("last", "unseen", "--at-least", "1")[0], 0)

    def test_plugins_are_built_with_the_bug_and_again_without_it(self):
        self.plant("a_plugin", "plugin", "test_sum plugin")
        self.plant("later", "last", "test_sum plugin")
        status, output = self.mutate()
        self.assertEqual(status, 1, output)
        self.assertIn("1 of 2 caught", output)
        self.assertIn("NOT CAUGHT: later", output)

    def test_check_runs_the_filters_of_what_is_built(self):
        self.plant("good", "last", "test_sum all")
        self.plant("typo", "last", "test_sum al*l")
        self.plant("environment", "last", "test_sum word", Environment="in_dutch")
        self.plant("gpu", "last", "test_sum gpu")
        self.plant("unbuilt", "last", "test_other all")
        status, output = self.mutate("--check")
        self.assertEqual(status, 0, output)
        self.assertIn("5 of 5 apply", output)
        self.assertIn("filters not checked, test_sum is not built: 4", output)
        build = self.root / "build" / "own"
        for command in (["cmake", "-G", "Ninja", "-S", ".", "-B", build], ["ninja", "-C", build, "test_sum"]):
            subprocess.run(command, cwd=self.root, check=True, stdout=subprocess.DEVNULL)
        status, output = self.mutate("--check", KVLAB_BUILD=str(build))
        self.assertEqual(status, 2, output)
        self.assertIn("typo: 'al*l' matches no test case", output)
        self.assertIn("filters not checked, test_other is not built: 1", output)
        self.assertIn("filters not checked, test_sum cannot run here: 1", output)
        self.assertIn("2 of 3 filters match a test case", output)
        shutil.move(build, self.root / "build" / "ci")
        self.assertIn("typo: 'al*l' matches no test case", self.mutate("--check", "typo")[1])

    def test_errors_of_the_list_are_no_catches(self):
        self.plant("applies_not", "gone", "test_sum all")
        self.plant("compiles_not", "syntax", "test_sum all")
        self.plant("fails_anyway", "last", "test_sum broken")
        self.plant("good", "last", "test_sum all")
        status, output = self.mutate()
        self.assertEqual(status, 2, output)
        self.assertIn("1 of 4 caught", output)
        for name in ("applies_not", "compiles_not", "fails_anyway"):
            self.assertIn(f"error: {name}\n", output)
        status, output = self.mutate("--check")
        self.assertEqual(status, 2, output)
        self.assertIn("3 of 4 apply", output)

    def test_a_wrong_header_is_named(self):
        self.plant("a", "last", "test_sum")
        status, output = self.mutate("--check")
        self.assertEqual(status, 2)
        self.assertIn("a.patch: got a header without Bug or Caught by", output)
        self.plant("a", "last", "test_sum all", Cought="typo")
        self.assertIn("got the header line 'Cought: typo'", self.mutate("--check")[1])
        self.plant("a", "last", "test_sum --all")
        self.assertIn("got the filter '--all'", self.mutate("--check")[1])
        self.plant("a", "last", "test_sum all")
        self.assertIn("wanted names of tools/mutants", self.mutate("nobody")[1])


if __name__ == "__main__":
    unittest.main()
