// What observers see of a layer when views are memory of a device: dense copies on the host.
#pragma once
#include <vector>

#include "model/executor.hpp"

namespace kvlab {

class HostCopy {
 public:
  // The copies live until the next call. Both wait for the stream.
  PromptLayer of(const PromptLayer& l, Stream s);
  DecodeLayer of(const DecodeLayer& l, Stream s);

 private:
  template <class T, int Rank>
  View<const T, Rank> copy(const View<const T, Rank>& from, std::vector<T>& to, Stream s);
  template <class Layer>
  Layer arrays_of(const Layer& l, Stream s);  // all that both kinds of layer have

  std::vector<float> floats_[7];
  std::vector<std::int32_t> index_, count_;
  PageList pages_;
};

}  // namespace kvlab
