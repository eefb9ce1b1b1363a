#include "run/reference.hpp"

#include <unistd.h>
#include <kvlab/error.hpp>

#include <cerrno>
#include <cstring>

#include "base/sha256.hpp"
#include "host/compose.hpp"
#include "run/answer.hpp"

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
                                                 int fidelity_tokens, Device device) {
  std::string key = model->fingerprint + "/" + name_of(model->dtype) + "/" + item.sha256 + "/" +
                    std::to_string(item.prompt.size()) + "/" + std::to_string(page_size) + "/" +
                    std::to_string(item.max_new);
  if (!item.forced.empty())
    key += "/" + sha256_hex({reinterpret_cast<const char*>(item.forced.data()), item.forced.size() * sizeof(int)});
  if (const auto it = entries_.find(key); it != entries_.end()) return it->second;

  EngineOptions o;
  o.device = device;
  o.max_tokens = item.most_tokens();
  o.page_size = page_size;
  Engine engine(model, compose({}), o);
  Sequence full(engine);
  full.begin(item);

  Entry e;
  e.offset = end_;
  Answer answer(item, fidelity_tokens);
  while (!answer.ended()) {
    if (!answer.tokens().empty()) full.feed(answer.tokens().back());
    const std::size_t bytes = full.logits().size_bytes();
    if (pwrite(fileno(file_), full.logits().data(), bytes, end_) != static_cast<ssize_t>(bytes)) io_failure();
    end_ += static_cast<std::int64_t>(bytes);
    answer.take(full.logits(), *model->tokenizer);
  }
  e.tokens = answer.tokens();
  return entries_.emplace(std::move(key), std::move(e)).first->second;
}

void ReferenceCache::read(const Entry& entry, int t, int vocab, float* out) const {
  const auto bytes = static_cast<std::size_t>(vocab) * sizeof(float);
  if (pread(fileno(file_), out, bytes, entry.offset + std::int64_t{t} * static_cast<std::int64_t>(bytes)) !=
      static_cast<ssize_t>(bytes))
    io_failure();
}

}  // namespace kvlab
