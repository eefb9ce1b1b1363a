// What a step's attention did not read, by pages.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "cases/on_caches.hpp"
#include "ops/attend/unread_mass.hpp"
#include "store/workspace.hpp"

namespace kvlab::cases {
namespace {

struct Results {
  std::vector<double> sums;
  std::vector<std::int32_t> read, nonfinite;

  Results(std::int64_t rows, std::int64_t heads, std::int64_t pages)
      : sums(static_cast<std::size_t>(rows * heads * pages * 2), -7),
        read(static_cast<std::size_t>(rows * heads * pages), -7),
        nonfinite(static_cast<std::size_t>(rows * heads), -7) {}
};

// list: 0 = none, 1 = of pages, 2 = of tokens.
void check_list(OnCache& x, int list, int page) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(),
                     total = 1 + x.c.rng() % (4 * static_cast<unsigned>(x.c.room())), pages = (total + page - 1) / page;
  Numbers<3> mass(x, {rows, x.c.heads(), total});
  if (x.n % 4 == 1) mass.own()(rows - 1, x.c.heads() - 1, 0) = std::numeric_limits<float>::quiet_NaN();
  if (x.n % 4 == 2) mass.own()(0, 0, total / 2) = std::numeric_limits<float>::infinity();
  std::vector<std::int32_t> last;
  for (std::int64_t r = 0; r < rows; ++r)
    last.push_back(static_cast<int>(r == 0 ? total - 1 : x.c.rng() % static_cast<unsigned>(total)));
  const bool rarely = x.c.rng() % 2 == 0;
  const auto keep = [&] { return x.c.rng() % (rarely ? 9 : 2) == 0; };
  const auto tokens = [&](int r, int h) { return x.kv.tokens(r, h); };
  ListMemory memory, of_tokens;
  const PageList listed_pages{memory.choose_pages(x.c.cache, x.c.cache.options(), keep)},
      pages_there = x.place.put(listed_pages);
  const TokenList listed_tokens{of_tokens.choose(x.c.cache.options(), x.c.room(), tokens, keep)},
      tokens_there = x.place.put(listed_tokens);

  ops::UnreadMass a{
      .kv = x.kv, .mass = mass.view(), .last = last.data(), .window = x.c.pick({0, 0, 5, 40}), .page = page};
  Results wanted(rows, heads, pages);
  a.sums = View<double, 4>::dense(wanted.sums.data(), {rows, heads, pages, 2});
  a.read = View<std::int32_t, 3>::dense(wanted.read.data(), {rows, heads, pages});
  a.nonfinite = View<std::int32_t, 2>::dense(wanted.nonfinite.data(), {rows, heads});
  ops::UnreadMass there = a;
  there.kv = x.there;
  there.mass = mass.put();
  there.last = x.place.put(last);
  there.sums = x.place.put(a.sums), there.read = x.place.put(a.read), there.nonfinite = x.place.put(a.nonfinite);
  if (list == 1) a.pages = &listed_pages, there.pages = &pages_there;
  if (list == 2) a.tokens = &listed_tokens, there.tokens = &tokens_there;
  ops::unread_mass_reference(a);
  Ledger ledger;
  StoreWorkspace w(ledger, x.stream());
  ops::unread_mass(there, w, x.stream());
  const std::vector<double> sums = x.place.get(there.sums);
  x.check.equal("sums", {sums.begin(), sums.end()}, {wanted.sums.begin(), wanted.sums.end()}, 1e-6);
  x.check.equal("pages read", x.place.get(there.read), wanted.read);
  x.check.equal("numbers that are not finite", x.place.get(there.nonfinite), wanted.nonfinite);

  if (x.stream().device() == Device::cuda || std::ranges::count(wanted.nonfinite, 0) != rows * heads) return;
  std::vector<double> known;
  for (std::size_t i = 0; i < sums.size(); i += 2) known.push_back(sums[i]);
  Results again(rows, heads, pages);
  there.sums.data = again.sums.data(), there.read.data = again.read.data();
  there.nonfinite.data = again.nonfinite.data(), there.known = known.data();
  ops::unread_mass(there, w, x.stream());
  x.check.that("the same bits where sums are known", again.sums == sums);
  x.check.equal("pages read where sums are known", again.read, wanted.read);
  x.check.equal("finite numbers where sums are known", again.nonfinite, wanted.nonfinite);
}

void check_all(OnCache& x) {
  for (const int list : {0, 1, 2}) {
    const int page = x.c.pick({1, 4, 16, 1000});
    const auto scope = x.check.in(fmt::format("list {}, pages of {}", list, page));
    check_list(x, list, page);
  }
}

std::vector<Case> list() { return {on_caches("unread_mass", "caches of every kind", 36, check_all)}; }

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
