#include "run/reference.hpp"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <kvlab/error.hpp>
#include <optional>

#include "support/contract.hpp"
#include "support/full_disk.hpp"
#include "support/temporary_folder.hpp"

using namespace kvlab;

namespace {

struct Scene {
  std::shared_ptr<const Model> model = test::tiny_model("llama-gqa3");
  ReferenceCache references;

  const ReferenceCache::Entry& get(unsigned seed) {
    Item item;
    item.prompt = test::test_text(20, model->config.vocab, seed);
    item.sha256 = std::to_string(seed);
    item.max_new = 4;
    return references.get(model, item, 16, 4);
  }
  std::vector<float> row(const ReferenceCache::Entry& entry, int t) const {
    std::vector<float> out(static_cast<std::size_t>(model->config.vocab));
    references.read(entry, t, model->config.vocab, out.data());
    return out;
  }
};

// Sets a variable of the environment; its end restores the value.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value.c_str(), 1);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

}  // namespace

TEST_CASE("reference logits: a full disk is an error that names TMPDIR, and what was written stays") {
  const test::TemporaryFolder folder;
  const Variable tmpdir("TMPDIR", folder / "");
  Scene scene;
  const ReferenceCache::Entry first = scene.get(1);
  const std::int64_t row = std::int64_t{scene.model->config.vocab} * 4;
  const auto rows = static_cast<std::int64_t>(first.tokens.size());
  const std::vector<float> logits = scene.row(first, 0);
  CHECK(std::filesystem::is_empty(folder / ""));  // the file has no name
  for (const std::int64_t room : {std::int64_t{0}, std::int64_t{1}, row - 1, row, row + 1, 2 * row - 7}) {
    const test::FileSizeLimit limit(static_cast<std::uint64_t>(rows * row + room));
    CHECK_THROWS_WITH(scene.get(2), Catch::Contains("TMPDIR") && Catch::Contains(folder / "") &&
                                        Catch::Contains("wanted room for " + std::to_string(row) + " bytes"));
  }
  const ReferenceCache::Entry second = scene.get(2);
  CHECK(second.offset == rows * row);
  CHECK(scene.row(first, 0) == logits);
  CHECK(scene.row(second, 0) != logits);
}

TEST_CASE("reference logits: a TMPDIR that is not there is said") {
  const Variable tmpdir("TMPDIR", "/nowhere/at/all");
  Scene scene;
  CHECK_THROWS_WITH(scene.get(1), Catch::Contains("TMPDIR") && Catch::Contains("/nowhere/at/all"));
}
