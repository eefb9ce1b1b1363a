#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("extract: every row of the table is a sentence of the record") {
  const TaskFixture f("extract");
  const auto env = f.env(2);
  const TaskSample s = f.task({{"context", std::int64_t{1000}}})->sample(0, env);
  const std::string text = env.decode(s.context);
  const auto& table = s.questions[0].references;
  REQUIRE(table.size() > 10);
  CHECK(table[0] == "day | sender | crates | goods | place");
  std::size_t sentences = 0;
  for (std::size_t at = text.find("\nOn day "); at != std::string::npos; at = text.find("\nOn day ", at + 1))
    ++sentences;
  CHECK(sentences + 1 == table.size());
  std::string all;
  for (std::size_t i = 1; i < table.size(); ++i) {
    std::vector<std::string> cells(1);
    for (const char c : table[i]) c == '|' ? cells.emplace_back() : cells.back() += std::string(1, c);
    REQUIRE(cells.size() == 5);
    const auto cell = [&](std::size_t k) {
      const std::size_t a = cells[k].find_first_not_of(' ');
      return cells[k].substr(a, cells[k].find_last_not_of(' ') - a + 1);
    };
    CHECK(text.find("\nOn day " + cell(0) + ", " + cell(1) + " sent " + cell(2) + " crates of " + cell(3) + " to " +
                    cell(4) + ".") != std::string::npos);
    all += table[i] + "\n";
  }
  CHECK(static_cast<int>(env.encode(all).size()) < s.questions[0].max_new_tokens);  // room for the whole table
}

TEST_CASE("extract: more rows than tokens are refused before any is made") {
  const TaskFixture f("extract");
  const auto task = f.task({{"context", std::int64_t{512}}, {"rows", std::int64_t{100000}}});
  CHECK_THROWS_WITH(task->sample(0, f.env(1)),
                    Catch::Contains("got context: 512, wanted at least 100000: so many rows"));
}

TEST_CASE("extract: the score counts cells by row, column and value") {
  const TaskFixture f("extract");
  const auto task = f.task({{"context", std::int64_t{1000}}});
  const auto score = [&](const char* answer, const std::vector<std::string>& references) {
    return task->score(answer, references).value();
  };
  const std::vector<std::string> wanted{"day | what | n", "1 | tea | 5",
                                        "2 | rope | 7"};  // four cells beside the names of the rows
  CHECK(score("1 | tea | 5\n2 | rope | 7\n", wanted) == 1);
  CHECK(score("| day | what | n |\n|---|:--|---|\n| 2 | Rope | 7 |\n| 1 | tea | 5 |", wanted) == 1);
  CHECK(score("1 | tea | 5", wanted) == Approx(2. * 2 / (2 + 4)));
  CHECK(score("1 | tea | 6\n2 | rope | 7", wanted) == Approx(2. * 3 / (4 + 4)));
  CHECK(score("1 | 5 | tea", wanted) == 0);  // the right values in the wrong columns
  CHECK(score("1 | tea | 5\n1 | tea | 5\n2 | rope | 7", wanted) == Approx(2. * 4 / (6 + 4)));
  CHECK(score("no table", wanted) == 0);
}
