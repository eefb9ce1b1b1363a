// A promise of a policy. A class states it as a base beside Policy.
#pragma once

namespace kvlab {

// All tokens stay in the cache, at the places of their text positions, on the device, with the keys and values that the
// model made. The policy gives no edit but attend: it chooses what attention reads. Another edit is Errc::plugin where
// core relies on it. Its entry may then have a codec with a residual or with groups, or one with a format of its own.
class KeepsTokens {
 public:
  virtual ~KeepsTokens() = default;
};

}  // namespace kvlab
