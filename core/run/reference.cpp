#include "run/reference.hpp"

#include <unistd.h>
#include <kvlab/error.hpp>

#include <cerrno>
#include <cstring>

#include "base/sha256.hpp"
#include "host/compose.hpp"
#include "run/sampling.hpp"

namespace kvlab {
namespace {

[[noreturn]] void io_failure() {
  throw Error(Errc::io, std::string("temporary file of reference logits: ") + std::strerror(errno) +
                            ", wanted room for it in TMPDIR or /tmp");
}

}  // namespace

ReferenceCache::ReferenceCache() : file_(std::tmpfile()) {
  if (!file_) io_failure();
}
ReferenceCache::~ReferenceCache() { std::fclose(file_); }

const ReferenceCache::Entry& ReferenceCache::get(std::shared_ptr<const Model> model, const Item& item, int page_size,
                                                 int fidelity_tokens) {
  std::string key = model->fingerprint + "/" + name_of(model->dtype) + "/" + item.sha256 + "/" +
                    std::to_string(item.prompt.size()) + "/" + std::to_string(page_size) + "/" +
                    std::to_string(item.max_new);
  if (!item.forced.empty())
    key += "/" + sha256_hex({reinterpret_cast<const char*>(item.forced.data()), item.forced.size() * sizeof(int)});
  if (const auto it = entries_.find(key); it != entries_.end()) return it->second;

  EngineOptions o;
  o.max_tokens = item.most_tokens();
  o.page_size = page_size;
  Engine engine(model, compose({}), o);
  const int vocab = model->config.vocab;
  std::vector<float> logits(static_cast<std::size_t>(vocab));
  const auto view = View<float, 2>::dense(logits.data(), {1, vocab});
  const int slot = engine.open();
  engine.prefill(slot, item.prompt, true, view);
  for (int token : item.fed) engine.step({slot}, {&token, 1}, view);

  Entry e;
  e.offset = end_;
  const std::size_t most =
      item.forced.empty() ? static_cast<std::size_t>(std::min(item.max_new, fidelity_tokens)) : item.forced.size();
  for (std::size_t t = 0; t < most; ++t) {
    const auto bytes = static_cast<std::size_t>(vocab) * sizeof(float);
    if (pwrite(fileno(file_), logits.data(), bytes, end_) != static_cast<ssize_t>(bytes)) io_failure();
    end_ += static_cast<std::int64_t>(bytes);
    const int token = item.forced.empty() ? argmax(logits) : item.forced[t];
    e.tokens.push_back(token);
    if (t + 1 == most || (item.forced.empty() && model->tokenizer->is_eos(token))) break;
    engine.step({slot}, {&token, 1}, view);
  }
  return entries_.emplace(std::move(key), std::move(e)).first->second;
}

void ReferenceCache::read(const Entry& entry, int t, int vocab, float* out) const {
  const auto bytes = static_cast<std::size_t>(vocab) * sizeof(float);
  if (pread(fileno(file_), out, bytes, entry.offset + std::int64_t{t} * static_cast<std::int64_t>(bytes)) !=
      static_cast<ssize_t>(bytes))
    io_failure();
}

}  // namespace kvlab
