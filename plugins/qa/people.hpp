// Lives of invented people: documents made by rule, and one question about each.
#pragma once
#include <kvlab/random.hpp>

#include <string>
#include <utility>
#include <vector>

namespace qa {

struct Document {
  std::string text, question;
  std::vector<std::string> answers;
};

inline constexpr int most_people = 1500;

inline std::vector<Document> people(int count, kvlab::Random& random) {
  static constexpr const char *
      first[] = {"Ada",   "Alma",   "Arthur", "Bram",   "Bruno", "Celia",  "Clara", "Dario", "Dora",  "Edith",
                 "Emil",  "Felix",  "Flora",  "Frank",  "Greta", "Gustav", "Helen", "Hugo",  "Irene", "Ivan",
                 "Jonas", "Julia",  "Karin",  "Konrad", "Laura", "Lucas",  "Mabel", "Marta", "Nils",  "Nora",
                 "Olive", "Oscar",  "Pavel",  "Petra",  "Ralph", "Rosa",   "Ruben", "Silas", "Sonja", "Thea",
                 "Tomas", "Ursula", "Vera",   "Viktor", "Wanda", "Willem", "Xenia", "Yusuf"},
     *last[] = {"Abbot",  "Archer",  "Bergman",  "Brook",    "Castell", "Chandler", "Dunmore",   "Draper",
                "Ekberg", "Ellis",   "Farrow",   "Fletcher", "Gilroy",  "Gordon",   "Hollis",    "Hunter",
                "Ingram", "Irving",  "Jarvis",   "Jordan",   "Keller",  "Kramer",   "Lambert",   "Marlow",
                "Mercer", "Newton",  "Norrby",   "Osgood",   "Osborne", "Palmer",   "Pruett",    "Quimby",
                "Ramsey", "Rowland", "Sandoval", "Spencer",  "Thorne",  "Turner",   "Underhill", "Vance",
                "Vogel",  "Walton",  "Warner",   "Whitlock", "Wilder",  "Yates",    "Young",     "Zimmer"},
     *town[] = {"Alder", "Birch", "Clay",  "Dun", "Elm",  "Fern",  "Glen",  "Hazel", "Iron", "Kings",
                "Lang",  "Mill",  "North", "Oak", "Pine", "Raven", "Stone", "Thorn", "West", "Wolf"},
     *ending[] = {"bridge", "bury", "cliff", "dale", "field", "ford", "gate", "haven", "mouth", "stead", "ton", "wick"},
     *subject[] = {"bees", "birds",  "bridges", "clocks", "clouds", "coins", "ferns", "fossils", "glaciers", "laws",
                   "maps", "metals", "moths",   "rivers", "rocks",  "songs", "stars", "storms",  "tides",    "winds"};
  const auto pick = [&](const auto& list) { return std::string(list[random.below(std::size(list))]); };
  const auto names = kvlab::distinct(count, [&] {
    std::string name = pick(first) + " ";
    return name += pick(last);
  });
  std::vector<Document> out;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string &name = names[i], teacher = names[(i + 1) % names.size()], home = pick(town) + pick(ending),
                      studied = pick(subject);
    Document d;
    d.text = name + " lives in the town of " + home + ". " + name + " studies the " + studied + ". The teacher of " +
             name + " is " + teacher + ".";
    const std::pair<std::string, std::string> asked[] = {{"Where does " + name + " live?", home},
                                                         {"What does " + name + " study?", studied},
                                                         {"Who is the teacher of " + name + "?", teacher}};
    const auto& [question, answer] = asked[random.below(std::size(asked))];
    d.question = question;
    d.answers = {answer};
    out.push_back(std::move(d));
  }
  return out;
}

}  // namespace qa
