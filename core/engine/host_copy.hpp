// What observers see of a layer when views are memory of a device: dense copies on the host.
#pragma once
#include <vector>

#include "exec/executor.hpp"

namespace kvlab {

class HostCopy {
 public:
  // The copies live until the next call. All wait for the stream, once.
  PromptLayer of(const PromptLayer& l, bool keys_and_values_only, Stream s);
  DecodeLayer of(const DecodeLayer& l, Stream s);
  LayerPrefill of(const LayerPrefill& l, Stream s);  // mass and window queries; the cache stays where it is

 private:
  template <class T>
  struct Array {
    std::vector<T> raw, dense;
  };
  template <class T, int Rank>
  void fetch(const View<const T, Rank>& from, Array<T>& to, Stream s);  // gives the copy to the stream
  template <class T, int Rank>
  View<T, Rank> dense(const View<const T, Rank>& from, Array<T>& to);  // once it is there
  template <class Layer>
  void fetch_all(const Layer& l, Stream s);  // that both kinds of layer have
  template <class Layer>
  Layer dense_all(const Layer& l);

  Array<float> floats_[7], window_;
  Array<std::int32_t> index_, count_;
  PageList pages_;
  TokenList tokens_;
};

}  // namespace kvlab
