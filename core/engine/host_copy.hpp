// Dense host copies of a layer's views, for observers of an engine whose views are device memory.
#pragma once
#include <vector>

#include "exec/executor.hpp"

namespace kvlab {

class HostCopy {
 public:
  // The copies live until the next call. Each call waits for the stream once.
  PromptLayer of(const PromptLayer& l, bool keys_and_values_only, Stream s);
  DecodeLayer of(const DecodeLayer& l, Stream s);
  LayerPrefill of(const LayerPrefill& l, Stream s);  // copies mass and window queries, not the cache

 private:
  template <class T>
  struct Array {
    std::vector<T> raw, dense;
  };
  template <class T, int Rank>
  void fetch(const View<const T, Rank>& from, Array<T>& to, Stream s);  // starts the copy on the stream
  template <class T, int Rank>
  View<T, Rank> dense(const View<const T, Rank>& from, Array<T>& to);  // after the copy has ended
  template <class Layer>
  void fetch_all(const Layer& l, Stream s);  // the views that both kinds of layer have
  template <class Layer>
  Layer dense_all(const Layer& l);

  Array<float> floats_[7], window_;
  Array<std::int32_t> index_, count_;
  PageList pages_;
  TokenList tokens_;
};

}  // namespace kvlab
