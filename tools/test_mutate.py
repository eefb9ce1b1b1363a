#!/usr/bin/env python3
"""tools/mutate on a small project of its own. Usage: test_mutate.py"""
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
add_custom_target(plugins)
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
    # Its filter is the name of what it looks at; "broken" fails whatever is planted.
    "test_sum.cpp": """#include <cstdlib>
#include <string>
int sum(const int* x, int n);
int main(int, char** arguments) {
  const std::string filter = arguments[1];
  const int x[] = {1, 2, 3};
  if (filter == "all") return sum(x, 3) != 6;
  if (filter == "none") return sum(x, 0) != 0;
  if (filter == "word") return std::getenv("WORD") != std::string("som") || sum(x, 1) != 1;
  return 1;
}
""",
}
BUGS = {"last": ("i < n;", "i < n - 1;"), "start": ("total = 0", "total = 1"), "endless": ("++i", "i += 0"),
        "syntax": ("return total;", "return total"), "gone": ("total -= 1", "total -= 2")}


def patch(bug):
    old, new = BUGS[bug]
    before = PROJECT["sum.cpp"]
    if old not in before:  # a patch for another version of the file
        before = before.replace("total += x[i]", old)
    return "".join(difflib.unified_diff(before.splitlines(True), before.replace(old, new).splitlines(True),
                                        "a/sum.cpp", "b/sum.cpp", n=1))


class Mutate(unittest.TestCase):
    def setUp(self):
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        for name, text in PROJECT.items():
            (self.root / name).write_text(text)
        (self.root / "tools" / "mutants").mkdir(parents=True)
        shutil.copy(TOOL, self.root / "tools" / "mutate")
        for command in ("init -q", "add .", "-c user.name=t -c user.email=t@t commit -q -m all"):
            subprocess.run(["git", *command.split()], cwd=self.root, check=True)

    def plant(self, name, bug, test, **more):
        header = {"Bug": "It is wrong.", "Caught by": test, **more}
        text = "".join(f"{k}: {v}\n" for k, v in header.items()) + patch(bug)
        (self.root / "tools" / "mutants" / (name + ".patch")).write_text(text)

    def mutate(self, *arguments):
        done = subprocess.run([self.root / "tools" / "mutate", *arguments], cwd=self.root, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**os.environ, "MUTATE_LEAST_SECONDS": "3"})
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
        self.plant("a", "last", "test_sum all")
        self.assertIn("wanted names of tools/mutants", self.mutate("nobody")[1])


if __name__ == "__main__":
    unittest.main()
