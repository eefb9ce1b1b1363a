// What a step's attention did not read, by pages.
#include <fmt/format.h>

#include <limits>

#include "cases/on_caches.hpp"
#include "ops/attend/unread_mass.hpp"
#include "store/workspace.hpp"

namespace kvlab::cases {
namespace {

struct Results {
  std::vector<double> sums;
  std::vector<std::int32_t> read, nonfinite;

  Results(std::int64_t heads, std::int64_t pages)
      : sums(static_cast<std::size_t>(heads * pages * 2), -7),
        read(static_cast<std::size_t>(heads * pages), -7),
        nonfinite(static_cast<std::size_t>(heads), -7) {}
};

void check_row(OnCache& x, int row, int list, int page) {
  const std::int64_t heads = x.c.kv_heads(), total = 1 + x.c.rng() % (4 * static_cast<unsigned>(x.c.room())),
                     pages = (total + page - 1) / page;
  Numbers<2> mass(x, {x.c.heads(), total});
  if (x.n % 4 == 1) mass.own()(x.c.heads() - 1, total - 1) = std::numeric_limits<float>::quiet_NaN();
  if (x.n % 4 == 2) mass.own()(0, total / 2) = std::numeric_limits<float>::infinity();
  ListMemory memory;
  const bool rarely = x.c.rng() % 2 == 0;
  const auto keep = [&] { return x.c.rng() % (rarely ? 9 : 2) == 0; };
  const auto tokens = [&](int r, int h) { return x.kv.tokens(r, h); };
  const PageList listed_pages{memory.choose_pages(x.c.cache, x.c.cache.options(), keep)}, pages_there = x.place.put(listed_pages);
  ListMemory of_tokens;
  const TokenList listed_tokens{of_tokens.choose(x.c.cache.options(), x.c.room(), tokens, keep)},
      tokens_there = x.place.put(listed_tokens);

  ops::UnreadMass a{.kv = x.kv, .row = row, .mass = mass.view(), .window = x.c.pick({0, 0, 5, 40}), .page = page};
  ops::UnreadMass there = a;
  there.kv = x.there;
  there.mass = mass.put();
  if (list == 1) a.pages = &listed_pages, there.pages = &pages_there;
  if (list == 2) a.tokens = &listed_tokens, there.tokens = &tokens_there;
  Results wanted(heads, pages);
  const auto into = [&](ops::UnreadMass& to) {
    to.sums = View<double, 3>::dense(wanted.sums.data(), {heads, pages, 2});
    to.read = View<std::int32_t, 2>::dense(wanted.read.data(), {heads, pages});
    to.nonfinite = View<std::int32_t, 1>::dense(wanted.nonfinite.data(), {heads});
  };
  into(there);
  there.sums = x.place.put(there.sums), there.read = x.place.put(there.read);
  there.nonfinite = x.place.put(there.nonfinite);
  into(a);
  ops::unread_mass_reference(a);
  Ledger ledger;
  StoreWorkspace w(ledger, x.stream());
  ops::unread_mass(there, w, x.stream());
  const std::vector<double> sums = x.place.get(there.sums);
  x.check.equal("sums", {sums.begin(), sums.end()}, {wanted.sums.begin(), wanted.sums.end()}, 1e-6);
  x.check.equal("pages read", x.place.get(there.read), wanted.read);
  x.check.equal("numbers that are not finite", x.place.get(there.nonfinite), wanted.nonfinite);
}

void check_all(OnCache& x) {
  for (const int list : {0, 1, 2})
    for (int row = 0; row < x.c.rows(); ++row) {
      const int page = x.c.pick({1, 4, 16, 1000});
      const auto scope = x.check.in(fmt::format("row {}, list {}, pages of {}", row, list, page));
      check_row(x, row, list, page);
    }
}

std::vector<Case> list() { return {on_caches("unread_mass", "caches of every kind", 36, check_all)}; }

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
