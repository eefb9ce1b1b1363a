// Lives of people who never were: documents made by rule, and one question about each.
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

inline std::vector<Document> people(int count, kvlab::Random& random) {
  static constexpr const char *
      first[] = {"Ada",     "Bram",  "Celia", "Dario", "Edith",  "Felix",  "Greta", "Hugo",
                 "Irene",   "Jonas", "Karin", "Lucas", "Mabel",  "Nils",   "Olive", "Pavel",
                 "Queenie", "Ruben", "Sonja", "Tomas", "Ursula", "Viktor", "Wanda", "Yusuf"},
     *last[] = {"Abbot",  "Bergman", "Castell",  "Dunmore",   "Ekberg",    "Farrow", "Gilroy",   "Hollis",
                "Ingram", "Jarvis",  "Keller",   "Lindqvist", "Marlow",    "Norrby", "Osgood",   "Pruett",
                "Quimby", "Rowland", "Sandoval", "Thorne",    "Underhill", "Vance",  "Whitlock", "Yates"},
     *town[] = {"Alder", "Birch", "Clay",  "Dun", "Elm",  "Fern",  "Glen",  "Hazel", "Iron", "Kings",
                "Lang",  "Mill",  "North", "Oak", "Pine", "Raven", "Stone", "Thorn", "West", "Wolf"},
     *ending[] = {"bridge", "bury", "cliff", "dale", "field", "ford", "gate", "haven", "mouth", "stead", "ton", "wick"},
     *subject[] = {"astronomy", "botany",      "chemistry", "geology", "history",
                   "law",       "mathematics", "medicine",  "music",   "philosophy"},
     *job[] = {"baker",     "bookbinder", "carpenter", "clockmaker", "gardener", "glassblower", "lighthouse keeper",
               "librarian", "printer",    "surveyor",  "tailor",     "teacher"},
     *work[] = {"a bridge", "a choir", "a garden", "a library", "a museum", "a newspaper", "a school", "a theatre"};
  const auto pick = [&](const auto& list) { return std::string(list[random.below(std::size(list))]); };
  const auto place = [&] {
    std::string out = pick(town);
    return out += pick(ending);
  };
  const auto names = kvlab::distinct(count, [&] {
    std::string name = pick(first) + " ";
    name += random.letters(1, 'A') + ". ";
    return name += pick(last);
  });
  std::vector<Document> out;
  for (const std::string& name : names) {
    const std::string birthplace = place(), studied = pick(subject), home = place(), trade = pick(job),
                      founded = pick(work);
    const int born = 1800 + static_cast<int>(random.below(120)), moved = born + 21 + static_cast<int>(random.below(20));
    Document d;
    d.text = name + " was born in " + birthplace + " in " + std::to_string(born) +
             ". After some years at the university, "
             "where the subject was " +
             studied + ", " + name + " moved to " + home + " in " + std::to_string(moved) + " and worked there as a " +
             trade + ". Late in life " + name + " founded " + founded + ".";
    const std::pair<std::string, std::string> asked[] = {
        {"In which town was " + name + " born?", birthplace},
        {"In which year was " + name + " born?", std::to_string(born)},
        {"Which subject did " + name + " study?", studied},
        {"To which town did " + name + " move?", home},
        {"In which year did " + name + " move?", std::to_string(moved)},
        {"What did " + name + " work as?", trade},
        {"What did " + name + " found?", founded}};
    const auto& [question, answer] = asked[random.below(std::size(asked))];
    d.question = question;
    d.answers = {answer};
    out.push_back(std::move(d));
  }
  return out;
}

}  // namespace qa
