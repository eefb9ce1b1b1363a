// Gives an edit once more, of those that keep tokens at their places, but for lists to attend to.
#pragma once
#include <kvlab/policy.hpp>

#include <algorithm>

namespace kvlab {

// newest: so many tokens of each head are pinned in any case by an edit that places pages.
inline void repeat(const Edit& e, Edits& edits, int newest = 0) {
  edits.for_layer(e.layer);
  const PageList pages{e.list};
  Pins pins = e.pins;
  pins.last = std::max(pins.last, newest);
  if (e.verb == Edit::place)
    edits.place(pages, {.heads = e.heads,
                        .pins = pins,
                        .room = e.room,
                        .reuse = e.reuse,
                        .when = e.when,
                        .rooms = e.rooms,
                        .order = e.order,
                        .keys = e.keys});
  else if (e.verb == Edit::offload)
    edits.offload(pages, e.when);
  else if (e.verb == Edit::drop)
    edits.drop(e.tier, pages, e.when);
  else if (e.verb == Edit::recall)
    edits.recall(pages, e.when);
  else if (e.verb == Edit::encode)
    edits.encode(pages, e.codec, e.when);
}

}  // namespace kvlab
