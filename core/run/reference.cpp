#include "run/reference.hpp"

#include <fcntl.h>
#include <unistd.h>
#include <kvlab/error.hpp>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/new_file.hpp"
#include "base/sha256.hpp"
#include "compose/compose.hpp"
#include "run/answer.hpp"
#include "run/cannot_go_on.hpp"
#include "run/cell_input.hpp"
#include "run/nonfinite.hpp"

namespace kvlab {
namespace {

std::string temporary_folder() {
  const char* named = std::getenv("TMPDIR");
  return named && *named ? named : "/tmp";
}

[[noreturn]] void io_failure(int reason, const std::string& wanted) {
  const std::string folder = temporary_folder();
  throw CannotGoOn(Errc::io,
                   std::string("got '") + std::strerror(reason) +
                       "' (free there: " + std::to_string(free_bytes(folder)) + " bytes), wanted " + wanted +
                       ": TMPDIR=FOLDER names another place for temporary files",
                   folder);
}

}  // namespace

ReferenceCache::~ReferenceCache() {
  if (file_ >= 0) ::close(file_);
}

// Opens a file without a name, which vanishes with the process however that ends.
void ReferenceCache::open() {
  std::string name = temporary_folder() + "/kvlab-reference-XXXXXX";
  file_ = ::mkostemp(name.data(), O_CLOEXEC);
  if (file_ < 0) io_failure(errno, "a temporary file of reference logits");
  ::unlink(name.c_str());
}

void ReferenceCache::append(const void* data, std::size_t size) {
  if (file_ < 0) open();
  const char* at = static_cast<const char*>(data);
  for (std::size_t done = 0; done < size;) {
    const ssize_t n = ::pwrite(file_, at + done, size - done, end_ + static_cast<std::int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      io_failure(n < 0 ? errno : ENOSPC, "room for " + std::to_string(size) + " bytes of reference logits after " +
                                             std::to_string(end_) + " bytes of others");
    done += static_cast<std::size_t>(n);
  }
  end_ += static_cast<std::int64_t>(size);
}

// Half an answer leaves its room to the answers that follow.
void ReferenceCache::give_back(std::int64_t from) noexcept {
  end_ = from;
  if (file_ >= 0 && ::ftruncate(file_, end_) != 0) errno = 0;  // later answers overwrite it in any case
}

const ReferenceCache::Entry& ReferenceCache::get(std::shared_ptr<const Model> model, const Item& item, int page_size,
                                                 int fidelity_tokens, Device device) {
  std::string key = model->fingerprint + "/" + name_of(model->dtype) + "/" + item.sha256 + "/" +
                    std::to_string(item.prompt.size()) + "/" + std::to_string(page_size) + "/" +
                    std::to_string(item.max_new);
  if (!item.forced.empty())
    key += "/" + sha256_hex({reinterpret_cast<const char*>(item.forced.data()), item.forced.size() * sizeof(int)});
  for (const std::string& stop : item.stops) key += "/" + sha256_hex(stop);
  if (const auto it = entries_.find(key); it != entries_.end()) return it->second;

  EngineOptions o;
  o.device = device;
  o.max_tokens = item.most_tokens();
  o.page_size = page_size;
  o.batch_invariant = device == Device::cuda;  // fidelity compares with rows of a batch
  try {
    return entries_.emplace(std::move(key), run(model, item, fidelity_tokens, o)).first->second;
  } catch (const NonFiniteStep& e) {
    const NonFinite found = located(
        model, [] { return compose({}); }, o, e);
    throw NonFinite(found.count(), Error(found.code(), found.message(), "the full cache's run, " + found.where()));
  }
}

Engine& ReferenceCache::engine(const std::shared_ptr<const Model>& model, const EngineOptions& options) {
  const EngineOptions& is = kept_.options;
  if (kept_.model != model.get() || is.page_size != options.page_size || is.device != options.device ||
      is.max_tokens < options.max_tokens) {
    kept_ = {};
    kept_ = {model.get(), options, std::make_unique<Engine>(model, compose({}), options)};
  }
  return *kept_.engine;
}

ReferenceCache::Entry ReferenceCache::run(const std::shared_ptr<const Model>& model, const Item& item,
                                          int fidelity_tokens, const EngineOptions& options) {
  Engine& engine = this->engine(model, options);
  Sequence full(engine);
  const Sequence::Asked asked[] = {{0, static_cast<std::uint32_t>(item.sample)}};
  Entry e;
  e.offset = end_;
  Answer answer(item, fidelity_tokens);
  try {
    want_room(full.begin(item, asked), engine);
    while (!answer.ended()) {
      if (!answer.tokens().empty()) want_room(full.feed(answer.tokens().back()), engine);
      append(full.logits().data(), full.logits().size_bytes());
      answer.take(full.logits(), *model->tokenizer);
    }
  } catch (...) {
    give_back(e.offset);
    release();
    throw;
  }
  full.close();
  e.tokens = answer.tokens();
  return e;
}

void ReferenceCache::read(const Entry& entry, int t, int vocab, float* out) const {
  const auto bytes = static_cast<std::int64_t>(vocab) * static_cast<std::int64_t>(sizeof(float));
  char* to = reinterpret_cast<char*>(out);
  for (std::int64_t done = 0; done < bytes;) {
    const ssize_t n =
        ::pread(file_, to + done, static_cast<std::size_t>(bytes - done), entry.offset + t * bytes + done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) io_failure(n < 0 ? errno : EIO, "to read the reference logits that were written there");
    done += n;
  }
}

}  // namespace kvlab
