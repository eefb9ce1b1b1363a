// Who gave a policy's latest edits. The store finds out what is wrong with a list, and has only numbers.
#pragma once
#include <string>

namespace kvlab {

class EditsAuthor {
 public:
  virtual ~EditsAuthor() = default;
  virtual std::string author() const = 0;  // "plugin quest (/path/libquest.so), select()"
};

// Of a policy or of the role that makes its edits; empty for what came from no plugin.
template <class Interface>
std::string author_of(const Interface& object) {
  const auto* known = dynamic_cast<const EditsAuthor*>(&object);
  return known ? known->author() : std::string();
}

}  // namespace kvlab
