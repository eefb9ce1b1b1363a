// attend's pipelined kernel for caches of codes: which codecs it has.
#include "ops/attend/attend_codes.cuh"

#include <type_traits>

#include "ops/attend/attend.cuh"
#include "ops/attend/attend_groups.cuh"

namespace kvlab::ops::decode {
namespace {

constexpr int codes_of(int k, int v) { return 16 * k + v; }
constexpr int e4m3 = 9;  // beside the numbers of bits

// Calls f with the rows of a codec; false if there are none. Few: the group has at most four heads.
template <bool Few, int Dim, int Page, class F>
bool with_rows(CodecSpec codec, const F& f) {
  const auto number = [](const CodecSide& s) { return s.kind == CodeKind::e4m3 ? e4m3 : static_cast<int>(s.bits); };
  const auto is = [&](auto k, auto v) {
    return f(std::type_identity<CodeRows<decltype(k), decltype(v), Dim, Page, Few>>{}), true;
  };
  switch (codes_of(number(codec.k), number(codec.v))) {
    case codes_of(8, 8): return is(Codes<8>{}, Codes<8>{});
    case codes_of(8, 4): return is(Codes<8>{}, Codes<4>{});
    case codes_of(4, 8): return is(Codes<4>{}, Codes<8>{});
    case codes_of(4, 4): return is(Codes<4>{}, Codes<4>{});
    case codes_of(2, 4):
      if constexpr (Dim == 128 || Page == 16) return is(Codes<2>{}, Codes<4>{});
      return false;
    case codes_of(e4m3, e4m3): return is(E4m3{}, E4m3{});
    case codes_of(4, 2):
      if constexpr (Dim == 128) return is(Codes<4>{}, Codes<2>{});  // a lane has at least four bytes of a value
      return false;
    default: return false;
  }
}
// The same for KIVI's groups.
template <int Dim, int Page, class F>
bool with_groups(CodecSpec codec, const F& f) {
  const auto is = [&](std::uint8_t bits) {
    return codec == CodecSpec{{bits, CodeKind::integer, CodeAxis::channel, 0},
                              {bits, CodeKind::integer, CodeAxis::token, value_group}};
  };
  if (is(4)) return f(std::type_identity<GroupRows<4, Dim, Page>>{}), true;
  if constexpr (Dim == 128)
    if (is(2)) return f(std::type_identity<GroupRows<2, Dim, Page>>{}), true;
  return false;
}
template <bool Few, class F>
bool with_rows(const PageLayout& l, const F& f) {
  if (l.codec.grouped()) {
    if (l.page_size == 16)
      return l.head_dim == 128 ? with_groups<128, 16>(l.codec, f) : l.head_dim == 64 && with_groups<64, 16>(l.codec, f);
    if (l.page_size == 32)
      return l.head_dim == 128 ? with_groups<128, 32>(l.codec, f) : l.head_dim == 64 && with_groups<64, 32>(l.codec, f);
    return false;
  }
  if (l.page_size == 16)
    return l.head_dim == 128 ? with_rows<Few, 128, 16>(l.codec, f)
                             : l.head_dim == 64 && with_rows<Few, 64, 16>(l.codec, f);
  if (l.page_size == 32)
    return l.head_dim == 128 ? with_rows<Few, 128, 32>(l.codec, f)
                             : l.head_dim == 64 && with_rows<Few, 64, 32>(l.codec, f);
  return false;
}

}  // namespace

bool takes_codes(const PageLayout& l) {
  return with_rows<true>(l, [](auto) {});
}

template <class Rows>
static const CUtensorMap& map_of(const Args& a) {
  return unit_map(a.base, Rows::page_bytes / static_cast<int>(granule_bytes), false);
}

void launch_codes(const Args& a, const PageLayout& l, cudaStream_t stream) {
  const auto launch_rows = [&](auto type) {
    using Rows = typename decltype(type)::type;
    launch<Rows>(a, map_of<Rows>(a), nullptr, stream);
  };
  a.group <= 4 ? with_rows<true>(l, launch_rows) : with_rows<false>(l, launch_rows);
}

// Calls f with the rows of both codecs; false if the kernel does not read them together. Only pairs that plugins store
// are here, because each one is a kernel.
template <bool Few, class F>
static bool with_both(const PageLayout& l, const PageLayout& lower, const F& f) {
  const auto with = [&]<int Page>(std::integral_constant<int, Page>) {
    const auto are = [&](int k, int v, int lower_k, int lower_v) {
      const CodecSpec high{{static_cast<std::uint8_t>(k)}, {static_cast<std::uint8_t>(v)}},
          low{{static_cast<std::uint8_t>(lower_k)}, {static_cast<std::uint8_t>(lower_v)}};
      return l.codec == high && lower.codec == low;
    };
    if (are(8, 4, 4, 2)) {
      f(std::type_identity<CodeRows<Codes<8>, Codes<4>, 128, Page, Few>>{},
        std::type_identity<CodeRows<Codes<4>, Codes<2>, 128, Page, Few>>{});
      return true;
    }
    if (are(8, 8, 4, 4)) {
      f(std::type_identity<CodeRows<Codes<8>, Codes<8>, 128, Page, Few>>{},
        std::type_identity<CodeRows<Codes<4>, Codes<4>, 128, Page, Few>>{});
      return true;
    }
    return false;
  };
  if (l.head_dim != 128) return false;
  return l.page_size == 16   ? with(std::integral_constant<int, 16>{})
         : l.page_size == 32 ? with(std::integral_constant<int, 32>{})
                             : false;
}

bool takes_both(const PageLayout& l, const PageLayout& lower, int group, int pairs) {
  bool fits = false;
  const auto measure = [&](auto type, auto lower_type) {
    fits = Memory<typename decltype(type)::type, typename decltype(lower_type)::type>(group, pairs).stages() > 0;
  };
  group <= 4 ? with_both<true>(l, lower, measure) : with_both<false>(l, lower, measure);
  return fits;
}

void launch_both(const Args& a, const PageLayout& l, const PageLayout& lower, cudaStream_t stream) {
  const auto launch_rows = [&](auto type, auto lower_type) {
    using Rows = typename decltype(type)::type;
    using Lower = typename decltype(lower_type)::type;
    launch<Rows, Lower>(a, map_of<Rows>(a), &map_of<Lower>(a), stream);
  };
  a.group <= 4 ? with_both<true>(l, lower, launch_rows) : with_both<false>(l, lower, launch_rows);
}

}  // namespace kvlab::ops::decode
