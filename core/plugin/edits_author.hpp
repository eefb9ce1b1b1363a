// Names the author of a policy's latest edits. The store finds errors in a list but knows no plugins.
#pragma once
#include <string>

namespace kvlab {

class EditsAuthor {
 public:
  virtual ~EditsAuthor() = default;
  virtual std::string author() const = 0;  // "plugin quest (/path/libquest.so), select()"
};

// The author for a policy, or for the role that makes its edits. Empty if no plugin made them.
template <class Interface>
std::string author_of(const Interface& object) {
  const auto* known = dynamic_cast<const EditsAuthor*>(&object);
  return known ? known->author() : std::string();
}

}  // namespace kvlab
