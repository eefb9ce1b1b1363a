// Random edits, compared with a plain model: per head, a map from text position to the token's bytes.
#include <catch2/catch.hpp>
#include <map>
#include <random>

#include "support/store_fixture.hpp"

using namespace kvlab;
using test::Lists;
using test::StoreFixture;

namespace {

// A token as a page of its own stores it in the codec of its place.
struct Expected {
  int codec = 0;
  std::vector<std::byte> page;
  float state = 0;
};
using Head = std::map<std::int32_t, Expected>;

constexpr CodecSpec plain{}, high{{8}, {4}}, low{{4}, {2}};

void set_state(const Store& store, int layer, int slot, int head, int token, float value) {
  const std::vector<std::int32_t> slots{slot};
  for (Tier tier : {Tier::device, Tier::host}) {
    const PagedKv kv = store.view(layer, slots, tier);
    const PageEntry& e = kv.entry(0, head, token / kv.page_size);
    if (e.frame == null_frame) continue;
    std::memcpy(kv.frame(e) + kv.layout(e).state + (token % kv.page_size) * 4, &value, 4);
  }
}

class RandomEdits {
 public:
  // One codec: pages go to the host and back. Two: tokens go from one to the other.
  RandomEdits(DType dtype, const std::vector<CodecSpec>& codecs, unsigned seed)
      : rng_(seed), tiers_(codecs.size() == 1) {
    Shape& s = f_.options.shape;
    s.dtype = dtype;
    s.head_dim = 16;
    f_.options.summary = Summary::mean;
    f_.options.token_state = {"score"};
    f_.options.codecs = codecs;
    for (const CodecSpec& c : codecs) layouts_.push_back(ops::make_layout(dtype, c, s.page_size, s.head_dim, 1));
    store_ = std::make_unique<CpuStore>(f_.options);
    model_.resize(static_cast<std::size_t>(f_.options.shape.max_slots),
                  std::vector<std::vector<Head>>(2, std::vector<Head>(2)));
    open_.assign(static_cast<std::size_t>(f_.options.shape.max_slots), false);
  }

  void step() {
    const int what = pick(14);
    if (what == 0) return reopen();
    const int slot = any_open();
    if (slot < 0) return reopen();
    if (what <= 3)
      append(slot, what == 1 ? 1 + pick(9) : 1);
    else if (what <= 6)
      evict(slot, what == 6);
    else if (what == 7)
      move(slot);
    else if (what == 8)
      save_and_restore(slot);
    else if (what == 9)
      levels(slot);
    else
      pages(slot);
  }
  int lowered = 0, raised = 0;  // tokens that went to the other codec

  void check() const {
    store_->check_invariants();
    for (int slot = 0; slot < f_.options.shape.max_slots; ++slot)
      for (int layer = 0; layer < 2; ++layer)
        for (int head = 0; head < 2; ++head) {
          const Head& wanted = model(slot, layer, head);
          const auto got = test::stored_tokens(*store_, layer, slot, head);
          REQUIRE(got.size() == wanted.size());
          for (const auto& t : got) {
            const auto it = wanted.find(t.position);
            REQUIRE(it != wanted.end());
            REQUIRE(t.k == row(it->second, KvSide::key));
            REQUIRE(t.v == row(it->second, KvSide::value));
            REQUIRE(t.state[0] == it->second.state);
          }
        }
  }

 private:
  int pick(int n) { return std::uniform_int_distribution<int>(0, n - 1)(rng_); }
  const Head& model(int slot, int layer, int head) const {
    return model_[static_cast<std::size_t>(slot)][static_cast<std::size_t>(layer)][static_cast<std::size_t>(head)];
  }
  Head& model(int slot, int layer, int head) {
    return const_cast<Head&>(std::as_const(*this).model(slot, layer, head));
  }
  std::vector<float> row(const Expected& e, KvSide side) const {
    std::vector<float> out(static_cast<std::size_t>(f_.options.shape.head_dim));
    ops::read_row(e.page.data(), layouts_[static_cast<std::size_t>(e.codec)], side, 0, out.data());
    return out;
  }
  // Codecs of a head's places. Pages on the host alone have the first.
  std::vector<int> codecs(int slot, int layer, int head) const {
    const std::vector<std::int32_t> slots{slot};
    const PagedKv kv = store_->view(layer, slots);
    std::vector<int> out;
    for (int t = 0; t < store_->length(layer, slot, head); ++t)
      out.push_back(kv.entry(0, head, t / f_.options.shape.page_size).codec);
    return out;
  }
  void become(Expected& token, int codec) {
    if (token.codec == codec) return;
    const auto &from = layouts_[static_cast<std::size_t>(token.codec)], &to = layouts_[static_cast<std::size_t>(codec)];
    std::vector<std::byte> page(static_cast<std::size_t>(to.bytes));
    ops::copy_token(token.page.data(), from, 0, page.data(), to, 0);
    token.page = page, token.codec = codec;
    ++(codec > 0 ? lowered : raised);
  }
  // Each token was copied once, if at all, from its place before the edit to the one that it has now.
  void follow(int slot, int layer) {
    for (int head = 0; head < 2; ++head) {
      const auto position = store_->positions_by_place(layer, slot, head);
      const auto codec = codecs(slot, layer, head);
      for (std::size_t t = 0; t < position.size(); ++t) become(model(slot, layer, head).at(position[t]), codec[t]);
    }
  }
  int any_open() {
    std::vector<int> open;
    for (std::size_t i = 0; i < open_.size(); ++i)
      if (open_[i]) open.push_back(static_cast<int>(i));
    return open.empty() ? -1 : open[static_cast<std::size_t>(pick(static_cast<int>(open.size())))];
  }

  void reopen() {
    const int slot = any_open();
    if (slot >= 0 && pick(2)) {
      store_->close(slot);
      open_[static_cast<std::size_t>(slot)] = false;
      for (int layer = 0; layer < 2; ++layer)
        for (int head = 0; head < 2; ++head) model(slot, layer, head).clear();
    } else if (const int fresh = store_->open(); fresh >= 0) {
      open_[static_cast<std::size_t>(fresh)] = true;
    }
  }

  void append(int slot, int tokens) {
    if (store_->position(slot) + tokens > f_.options.shape.max_tokens) return;
    const int first = store_->position(slot);
    REQUIRE(f_.fill(*store_, slot, tokens) == Fit::ok);
    for (int layer = 0; layer < 2; ++layer)
      for (int head = 0; head < 2; ++head) {
        const auto codec = codecs(slot, layer, head);
        for (int t = 0; t < tokens; ++t) {
          const int place = store_->length(layer, slot, head) - tokens + t;
          Expected& token = model(slot, layer, head)[first + t];
          token.codec = codec[static_cast<std::size_t>(place)];
          token.state = static_cast<float>(++states_);
          const PageLayout& l = layouts_[static_cast<std::size_t>(token.codec)];
          token.page.resize(static_cast<std::size_t>(l.bytes));
          ops::write_token(token.page.data(), l, 0, f_.row(0, layer, slot, head, first + t).data(),
                           f_.row(1, layer, slot, head, first + t).data(), first + t);
          set_state(*store_, layer, slot, head, place, token.state);
        }
      }
  }

  void evict(int slot, bool rest) {
    const int layer = pick(2), odds = 1 + pick(10);
    std::vector<std::vector<std::int32_t>> lists(2);
    for (int head = 0; head < 2; ++head) {
      const auto tokens = test::stored_tokens(*store_, layer, slot, head);
      for (std::size_t t = 0; t < tokens.size(); ++t)
        if (pick(11) >= odds)
          lists[static_cast<std::size_t>(head)].push_back(static_cast<std::int32_t>(t));
        else if (rest)
          model(slot, layer, head).erase(tokens[t].position);
      if (!rest)
        for (std::int32_t t : lists[static_cast<std::size_t>(head)])
          model(slot, layer, head).erase(tokens[static_cast<std::size_t>(t)].position);
    }
    const Lists l(lists);
    Edits e(layer);
    if (rest)
      e.evict_rest(l.tokens());
    else
      e.evict(l.tokens());
    REQUIRE(store_->apply(e.all(), {slot}).fit == Fit::ok);
    follow(slot, layer);
  }

  void levels(int slot) {
    const int layer = pick(2), gone = 1 + pick(10), rest = pick(11);
    std::int64_t n = 1;
    for (int head = 0; head < 2; ++head) n = std::max<std::int64_t>(n, store_->length(layer, slot, head));
    std::vector<std::uint8_t> numbers(static_cast<std::size_t>(2 * n), 7);
    const auto of_heads = View<std::uint8_t, 3>::dense(numbers.data(), {1, 2, n});
    for (int head = 0; head < 2; ++head) {
      const auto position = store_->positions_by_place(layer, slot, head);
      for (std::size_t t = 0; t < position.size(); ++t) {
        const bool stays = pick(11) >= gone;
        of_heads(0, head, static_cast<std::int64_t>(t)) = !stays ? level_gone : !tiers_ && pick(10) < rest;
        if (!stays) model(slot, layer, head).erase(position[t]);
      }
    }
    Edits e(layer);
    e.store_as(of_heads);
    REQUIRE(store_->apply(e.all(), {slot}).fit == Fit::ok);
    follow(slot, layer);
  }

  void move(int slot) {
    const int layer = pick(2);
    std::vector<std::vector<std::int32_t>> lists(2);
    for (int head = 0; head < 2; ++head)
      if (const int n = store_->length(layer, slot, head); n > 0)
        for (int i = 2 * (1 + pick(3)); i > 0; --i) lists[static_cast<std::size_t>(head)].push_back(pick(n));
    for (int head = 0; head < 2; ++head) {  // pair by pair, and a token may move twice
      auto position = store_->positions_by_place(layer, slot, head);
      const auto codec = codecs(slot, layer, head);
      const auto& list = lists[static_cast<std::size_t>(head)];
      for (std::size_t i = 0; i < list.size(); i += 2) {
        const auto a = static_cast<std::size_t>(list[i]), b = static_cast<std::size_t>(list[i + 1]);
        std::swap(position[a], position[b]);
        for (const std::size_t t : {a, b}) become(model(slot, layer, head).at(position[t]), codec[t]);
      }
    }
    const Lists l(lists);
    Edits e(layer);
    e.move(l.tokens());
    REQUIRE(store_->apply(e.all(), {slot}).fit == Fit::ok);
  }

  // Offloads, recalls, encodes, or drops pages that another tier holds, too.
  void pages(int slot) {
    const int layer = pick(2), verb = tiers_ ? pick(5) : 2, p = f_.options.shape.page_size;
    const Tier tier = pick(2) ? Tier::device : Tier::host, other = tier == Tier::host ? Tier::device : Tier::host;
    std::vector<std::vector<std::int32_t>> lists(2);
    for (int head = 0; head < 2; ++head)
      for (int page = 0; page * p < store_->length(layer, slot, head); ++page) {
        if (pick(3) == 0) continue;
        if (verb >= 3 && !test::on(*store_, other, layer, slot, head, page)) continue;
        if (verb == 2 && !test::on(*store_, Tier::device, layer, slot, head, page)) continue;
        lists[static_cast<std::size_t>(head)].push_back(page);
      }
    const Lists l(lists);
    Edits e(layer);
    if (verb == 0)
      e.offload(l.pages());
    else if (verb == 1)
      e.recall(l.pages());
    else if (verb == 3)
      e.drop(tier, l.pages());
    REQUIRE(store_->apply(verb == 2 ? test::encode(l.pages(), tiers_ ? 0 : pick(2), layer) : e.all(), {slot}).fit ==
            Fit::ok);
    if (verb == 2) follow(slot, layer);
  }

  void save_and_restore(int slot) {
    const auto saved = store_->save(slot);
    if (pick(2)) store_->close(slot);
    REQUIRE(store_->restore(slot, saved) == Fit::ok);
  }

  StoreFixture f_;
  std::unique_ptr<CpuStore> store_;
  std::vector<std::vector<std::vector<Head>>> model_;
  std::vector<bool> open_;
  std::mt19937 rng_;
  bool tiers_;
  std::vector<PageLayout> layouts_;  // by codec
  int states_ = 0;
};

}  // namespace

TEST_CASE("random edits leave exactly the tokens that a map would hold") {
  const auto dtype = GENERATE(DType::f32, DType::bf16);
  const auto codecs = GENERATE(std::vector{plain}, std::vector{high, low});
  int lowered = 0, raised = 0;
  for (unsigned seed = 1; seed <= 12; ++seed) {
    RandomEdits run(dtype, codecs, seed);
    for (int i = 0; i < 250; ++i) {
      CAPTURE(seed, i);
      run.step();
      run.check();
    }
    lowered += run.lowered, raised += run.raised;
  }
  CHECK((lowered > 0) == (codecs.size() == 2));
  CHECK((raised > 0) == (codecs.size() == 2));
}
