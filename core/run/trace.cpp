#include "run/trace.hpp"

namespace kvlab {

TraceRecorder::TraceRecorder(const std::vector<Item>& items, results::Trace& out)
    : items_(items), out_(out), kept_(items.size()), tokens_(items.size()) {}

void TraceRecorder::kept(const Engine& engine, int slot, int item) {
  const Shape& s = engine.store().shape();
  auto& kept = kept_[static_cast<std::size_t>(item)];
  for (int layer = 0; layer < s.layers; ++layer)
    for (int head = 0; head < s.kv_heads; ++head) kept.push_back(engine.store().positions(layer, slot, head));
}

void TraceRecorder::answered(int item, const std::vector<int>& queue, const std::vector<int>& answer) {
  const auto i = static_cast<std::size_t>(item);
  std::vector<int>& fed = tokens_[i].fed;
  if (items_[i].follows) {  // if an answer's last token is fed, the queue of the next question has it
    const Tokens& before = tokens_[i - 1];
    fed = before.fed;
    fed.insert(fed.end(), before.answer.begin(), before.answer.end() - 1);
  } else {
    fed = items_[i].prompt;
  }
  fed.insert(fed.end(), queue.begin(), queue.end());
  tokens_[i].answer = answer;
}

void TraceRecorder::attended(const DecodeLayer& l, const Store& store) {
  const IndexList* list = l.read.pages ? static_cast<const IndexList*>(l.read.pages) : l.read.tokens;
  if (!list) return;
  const int unit = l.read.pages ? 1 : store.shape().page_size;  // list entries per page
  for (std::size_t r = 0; r < rows_.size(); ++r)
    for (int head = 0; head < store.shape().kv_heads; ++head) {
      const auto row = static_cast<std::int64_t>(r);
      results::TraceEvent e;
      e.sample = rows_[r].item;
      e.token = rows_[r].token;
      e.layer = l.layer;
      e.kv_head = head;
      e.begin = static_cast<std::int64_t>(out_.selected.size());
      for (int i = 0, newest = -1; i < list->count(row, head); ++i)
        if (const int page = list->index(row, head, i) / unit; page != newest) out_.selected.push_back(newest = page);
      e.count = static_cast<decltype(e.count)>(static_cast<std::int64_t>(out_.selected.size()) - e.begin);
      out_.events.push_back(e);
    }
}

void TraceRecorder::finish(const Shape& shape) {
  out_.pages = shape.max_pages();
  out_.layers = shape.layers;
  out_.kv_heads = shape.kv_heads;
  out_.samples = static_cast<decltype(out_.samples)>(kept_.size());
  for (const auto& item : kept_)
    for (const auto& kept : item) {
      out_.kept_offsets.push_back(static_cast<std::int64_t>(out_.kept.size()));
      out_.kept.insert(out_.kept.end(), kept.begin(), kept.end());
      out_.kept_offsets.push_back(static_cast<std::int64_t>(out_.kept.size()));
    }
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const auto& [fed, answer] = tokens_[i];
    const auto begin = static_cast<std::int64_t>(out_.tokens.size());
    out_.tokens.insert(out_.tokens.end(), fed.begin(), fed.end());
    out_.tokens.insert(out_.tokens.end(), answer.begin(), answer.end());
    const std::int64_t fed_end = begin + static_cast<std::int64_t>(fed.size());
    out_.token_offsets.insert(out_.token_offsets.end(),
                              {begin, begin + static_cast<std::int64_t>(items_[i].prompt.size()), fed_end,
                               fed_end + static_cast<std::int64_t>(answer.size())});
  }
}

}  // namespace kvlab
