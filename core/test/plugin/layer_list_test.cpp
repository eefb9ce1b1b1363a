#include <kvlab/layer_list.hpp>

#include <catch2/catch.hpp>

using namespace kvlab;

TEST_CASE("a list of layers is read, and any other text refused") {
  const auto list = [](const char* text) { return layer_list(Params({{"layers", std::string(text)}}), "layers"); };
  CHECK(list("").empty());
  CHECK(list("7") == std::vector<int>{7});
  CHECK(list("0,16") == std::vector<int>{0, 16});
  CHECK(list("0, 3,  20") == std::vector<int>{0, 3, 20});
  for (const char* bad : {" ", "2,", "2, ", ",2", "0,,2", "2,2", "8,2", "a", "2;8", "-1", "1.5", "2 ", "99999999999"}) {
    CAPTURE(bad);
    CHECK_THROWS_WITH(
        list(bad), "got layers '" + std::string(bad) + "', wanted layers from 0 on in ascending order, such as '0,16'");
  }
}
