// Borrowed, trivially copyable views; strides are in elements. A view never owns and is valid for the call it is passed
// to.
#pragma once
#include <array>
#include <cstdint>
#include <type_traits>

#include "kvlab/dtype.hpp"

namespace kvlab {

template <class T, int Rank>
struct View {
  T* data = nullptr;
  std::array<std::int64_t, Rank> extent{}, stride{};

  // Contiguous, last index fastest.
  static View dense(T* data, std::array<std::int64_t, Rank> extent) {
    View v{data, extent, {}};
    std::int64_t step = 1;
    for (int i = Rank - 1; i >= 0; --i) {
      v.stride[i] = step;
      step *= extent[i];
    }
    return v;
  }

  template <class... I>
  constexpr T& operator()(I... index) const {
    static_assert(sizeof...(I) == Rank);
    const std::int64_t at[] = {static_cast<std::int64_t>(index)...};
    std::int64_t offset = 0;
    for (int i = 0; i < Rank; ++i) offset += at[i] * stride[i];
    return data[offset];
  }

  // The sub-view at one value of the first index.
  View<T, Rank - 1> operator[](std::int64_t index) const requires(Rank > 1) {
    View<T, Rank - 1> v{data + index * stride[0], {}, {}};
    for (int i = 1; i < Rank; ++i) {
      v.extent[i - 1] = extent[i];
      v.stride[i - 1] = stride[i];
    }
    return v;
  }

  operator View<const T, Rank>() const requires(!std::is_const_v<T>) { return {data, extent, stride}; }

  explicit operator bool() const { return data != nullptr; }
};

// A view whose element type is known at run time (activations: f32 on the CPU backend).
template <int Rank>
struct Tensor {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::array<std::int64_t, Rank> extent{}, stride{};

  Tensor() = default;
  Tensor(View<const float, Rank> v) : data(v.data), dtype(DType::f32), extent(v.extent), stride(v.stride) {}
  Tensor(View<float, Rank> v) : Tensor(View<const float, Rank>(v)) {}

  View<const float, Rank> f32() const { return {static_cast<const float*>(data), extent, stride}; }
  explicit operator bool() const { return data != nullptr; }
};

}  // namespace kvlab
