// The file of a recording: what it holds, and what is refused.
#include "replay/recording_file.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "replay/recorder.hpp"
#include "replay/replayed_rows.hpp"
#include "result/cell_file.hpp"
#include "result/output.hpp"
#include "result/profile_file.hpp"
#include "result/sealed.hpp"
#include "support/contract.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;
namespace fs = std::filesystem;

namespace {

// The full cache of a tiny model, prompt and some steps, written down once by the recorder and once by hand.
class Both final : public EngineObserver {
 public:
  explicit Both(DType dtype = DType::f32) : model(test::tiny_model("llama-gqa3", dtype)) {
    EngineOptions o;
    o.max_tokens = prompt_tokens + steps;
    o.page_size = 8;
    Engine engine(model, std::make_shared<RecordedCache>(), o);
    engine.observe(this);
    text = test::test_text(prompt_tokens + steps + 1, model->config.vocab);
    rows_.resize(static_cast<std::size_t>(model->config.layers));
    const int slot = engine.open();
    REQUIRE(engine.prefill(slot, std::span(text).first(prompt_tokens), true, {}) == Fit::ok);
    for (int i = 0; i < steps; ++i)
      REQUIRE(engine.step({slot}, {&text[static_cast<std::size_t>(prompt_tokens + i)], 1}, {}) == Fit::ok);
    layers = recorder_.take();
    head.model = model;
    head.info.kvlab_version = "9.9.9";
    one.task = "{}";
    one.prompt.assign(text.begin(), text.begin() + prompt_tokens);
    one.fed = {text[prompt_tokens]};
    one.answer.assign(text.begin() + prompt_tokens + 1, text.end());
  }
  void prompt(const PromptLayer& l, const Store& store) override { add(l), recorder_.prompt(l, store); }
  void attended(const DecodeLayer& l, const Store& store) override { add(l), recorder_.attended(l, store); }
  void write(const std::string& path) const {
    write_recording(path, head, 1, [&](std::size_t, RecordedCase& c, RecordedLayers& to) { c = one, to = layers; });
  }
  // Of text position t.
  float query(int layer, int t, int h, int d) const { return rows_[static_cast<std::size_t>(layer)][0].at(t, h, d); }
  float key(int layer, int t, int h, int d) const { return rows_[static_cast<std::size_t>(layer)][1].at(t, h, d); }
  float value(int layer, int t, int h, int d) const { return rows_[static_cast<std::size_t>(layer)][2].at(t, h, d); }

  static constexpr int prompt_tokens = 20, steps = 4;
  std::shared_ptr<const Model> model;
  std::vector<int> text;
  RecordingHead head;
  RecordedCase one;
  RecordedLayers layers;

 private:
  struct Rows {
    std::vector<std::vector<std::vector<float>>> all;
    float at(int t, int h, int d) const {
      return all[static_cast<std::size_t>(t)][static_cast<std::size_t>(h)][static_cast<std::size_t>(d)];
    }
    void add(const View<const float, 3>& x) {
      for (std::int64_t t = 0; t < x.extent[0]; ++t) {
        auto& heads = all.emplace_back();
        for (std::int64_t h = 0; h < x.extent[1]; ++h) heads.emplace_back(&x(t, h, 0), &x(t, h, 0) + x.extent[2]);
      }
    }
  };
  void add(const LayerRows& l) {
    auto& to = rows_[static_cast<std::size_t>(l.layer)];
    to.resize(3);
    to[0].add(l.queries), to[1].add(l.keys), to[2].add(l.values);
  }
  Recorder recorder_;
  std::vector<std::vector<Rows>> rows_;
};

// What `path` holds, written anew with changes.
void rewrite(const std::string& path, const std::string& to, int schema, const std::string& left_out) {
  const auto lock = h5::lock();
  const h5::File from = results::open_sealed(path);
  results::write_sealed(to, [&](const h5::File& file) {
    results::write_info(file, results::read_info(from));
    for (const char* text : {"kind", "model", "model_fingerprint", "dtype"})
      file.set_attribute(".", text, from.text_attribute(".", text));
    for (const char* number :
         {"synthetic", "layers", "query_heads", "kv_heads", "head_dim", "vocab", "context", "sliding_window"})
      file.set_attribute(".", number, from.integer_attribute(".", number));
    file.set_attribute(".", "recording_schema", std::int64_t{schema});
    from.copy_to("inverse_frequencies", file, "inverse_frequencies");
    const h5::Location one = from.group("cases/000000"), copy = file.create_group("cases/000000");
    for (const char* text : {"task", "prompt_sha256"}) copy.set_attribute(".", text, one.text_attribute(".", text));
    for (const char* number : {"seed", "sample", "question", "shared", "max_new"})
      copy.set_attribute(".", number, one.integer_attribute(".", number));
    for (const std::string& array : one.children("."))
      if (array != left_out) one.copy_to(array, copy, array);
    if (left_out != "values") return;
    std::vector<std::int64_t> extent = one.extent("values");
    --extent[0];  // a layer
    std::int64_t count = 1;
    for (const std::int64_t n : extent) count *= n;
    copy.write("values", std::vector<float>(static_cast<std::size_t>(count)), extent, "");
  });
}

}  // namespace

TEST_CASE("a recording gives back every query, key and value that attention saw") {
  const DType dtype = GENERATE(DType::f32, DType::bf16);
  const Both both(dtype);
  const test::TempDir folder;
  both.write(folder / "r.h5");
  const auto recording = std::make_shared<Recording>(folder / "r.h5");
  const ModelConfig& m = both.model->config;
  const ModelConfig& got = recording->head().model->config;
  CHECK(got.layers == m.layers);
  CHECK(got.heads == m.heads);
  CHECK(got.kv_heads == m.kv_heads);
  CHECK(got.head_dim == m.head_dim);
  CHECK(recording->head().model->dtype == dtype);
  CHECK(recording->head().model->fingerprint == both.model->fingerprint);
  CHECK(recording->head().model->inv_freq == both.model->inv_freq);
  REQUIRE(recording->cases().size() == 1);
  CHECK(recording->cases()[0].prompt == both.one.prompt);
  CHECK(recording->cases()[0].fed == both.one.fed);
  CHECK(recording->cases()[0].answer == both.one.answer);
  CHECK(recording->cases_of("{}", 0) == std::vector<std::size_t>{0});
  CHECK(recording->cases_of("{}", 1).empty());

  ReplayedRows rows(recording, {0});
  rows.use(0);
  const int all = Both::prompt_tokens + Both::steps;
  const auto stored = [dtype](float x) { return dtype == DType::bf16 ? static_cast<float>(bf16(x)) : x; };
  int wrong = 0;
  for (int layer = 0; layer < m.layers; ++layer)
    for (const auto& [first, n] : {std::pair{0, Both::prompt_tokens}, {3, 9}, {16, 8}, {all - 1, 1}}) {
      std::vector<float> q(static_cast<std::size_t>(n * m.heads * m.head_dim)),
          k(static_cast<std::size_t>(n * m.kv_heads * m.head_dim)), v(k.size());
      rows.read(layer, first, n, q.data(), k.data(), v.data());
      std::size_t i = 0;
      for (int t = first; t < first + n; ++t)
        for (int h = 0; h < m.heads; ++h)
          for (int d = 0; d < m.head_dim; ++d, ++i)
            // Attention of a step takes the query in f32.
            wrong +=
                q[i] != (t < Both::prompt_tokens ? stored(both.query(layer, t, h, d)) : both.query(layer, t, h, d));
      i = 0;
      for (int t = first; t < first + n; ++t)
        for (int h = 0; h < m.kv_heads; ++h)
          for (int d = 0; d < m.head_dim; ++d, ++i) {
            wrong += k[i] != stored(both.key(layer, t, h, d));
            wrong += v[i] != stored(both.value(layer, t, h, d));
          }
    }
  for (int layer = 0; layer < m.layers; ++layer) {
    const RecordedRows::Prompt prompt = rows.prompt(layer);
    REQUIRE(prompt.tokens == Both::prompt_tokens);
    std::vector<float> q(static_cast<std::size_t>(Both::prompt_tokens * m.heads * m.head_dim)),
        k(static_cast<std::size_t>(Both::prompt_tokens * m.kv_heads * m.head_dim)), v(k.size());
    rows.read(layer, 0, Both::prompt_tokens, q.data(), k.data(), v.data());
    wrong += !std::equal(q.begin(), q.end(), prompt.queries);
    wrong += !std::equal(k.begin(), k.end(), prompt.keys);
    wrong += !std::equal(v.begin(), v.end(), prompt.values);
    REQUIRE((prompt.key_bits && prompt.value_bits) == (dtype == DType::bf16));
    for (int h = 0, at = 0; prompt.key_bits && h < m.kv_heads; ++h)
      for (int t = 0; t < Both::prompt_tokens; ++t)
        for (int d = 0; d < m.head_dim; ++d, ++at) {
          const auto i = static_cast<std::size_t>((t * m.kv_heads + h) * m.head_dim + d);
          wrong += bf16(k[i]).bits != prompt.key_bits[at] || bf16(v[i]).bits != prompt.value_bits[at];
        }
  }
  CHECK(wrong == 0);
  std::vector<float> to(1000);
  CHECK_THROWS_WITH(rows.read(0, all, 1, to.data(), to.data(), to.data()), Catch::Contains("as many as were recorded"));
}

TEST_CASE("a recording's prompt mass is the sum of softmax over its queries") {
  const Both both;
  const ModelConfig& m = both.model->config;
  const int n = Both::prompt_tokens;
  for (int layer = 0; layer < m.layers; ++layer)
    for (int h = 0; h < m.heads; ++h) {
      std::vector<double> sums(static_cast<std::size_t>(n));
      for (int t = 0; t < n; ++t) {
        std::vector<double> p;
        double all = 0;
        for (int s = 0; s <= t; ++s) {
          double dot = 0;
          for (int d = 0; d < m.head_dim; ++d)
            dot += double{both.query(layer, t, h, d)} * double{both.key(layer, s, h / m.group(), d)};
          p.push_back(std::exp(dot / std::sqrt(m.head_dim)));
          all += p.back();
        }
        for (std::size_t s = 0; s < p.size(); ++s) sums[s] += p[s] / all;
      }
      for (int t = 0; t < n; ++t) {
        CAPTURE(layer, h, t);
        REQUIRE(both.layers.prompt_mass[static_cast<std::size_t>((layer * m.heads + h) * n + t)] ==
                Approx(sums[static_cast<std::size_t>(t)]).margin(1e-4));
      }
    }
}

TEST_CASE("a recording takes no more bytes than it says") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Both both(dtype);
    const ModelConfig& m = both.model->config;
    // The queries of 4 steps and the mass of 20 tokens in f32; 20 queries, 24 keys and values in the model's dtype.
    const std::int64_t wanted = std::int64_t{m.layers} * (4 * (4 * m.heads * m.head_dim + m.heads * 20) +
                                                          static_cast<std::int64_t>(size_of(dtype)) * m.head_dim *
                                                              (20 * m.heads + 2 * 24 * m.kv_heads));
    CHECK(case_bytes(both.head, Both::prompt_tokens, Both::steps) == wanted);
    const test::TempDir folder;
    both.write(folder / "r.h5");
    constexpr std::int64_t layout = 64 * 1024;  // HDF5's own, of a file however small
    CHECK(static_cast<std::int64_t>(fs::file_size(folder / "r.h5")) < wanted + layout);
  }
}

TEST_CASE("a recording of equal numbers, which deflate to almost nothing, can be read") {
  Both both(DType::bf16);
  std::fill(both.layers.keys.begin(), both.layers.keys.end(), 1.5f);
  std::fill(both.layers.values.begin(), both.layers.values.end(), 0.f);
  std::fill(both.layers.prompt_queries.begin(), both.layers.prompt_queries.end(), -2.f);
  const test::TempDir folder;
  both.write(folder / "r.h5");
  const Recording recording(folder / "r.h5");
  const RecordedLayers& read = *recording.layers(0);
  CHECK(read.keys == both.layers.keys);
  CHECK(read.values == both.layers.values);
  CHECK(read.prompt_queries == both.layers.prompt_queries);
  CHECK(read.step_queries == both.layers.step_queries);
}

TEST_CASE("no run, profile or recording overwrites a file of another kind") {
  const Both both;
  const test::TempDir folder;
  const std::string path = folder / "r.h5";
  both.write(path);
  using results::OutputKind;
  CHECK_NOTHROW(results::check_output(path, OutputKind::recording));
  CHECK_THROWS_WITH(results::check_output(path), Catch::Contains("got a recording as the output of a run"));
  CHECK_THROWS_WITH(results::check_output(path, OutputKind::profile),
                    Catch::Contains("got a recording as the output of a profile"));
  results::write_profile(folder / "p.h5", {}, {});
  CHECK_THROWS_WITH(results::check_output(folder / "p.h5", OutputKind::recording),
                    Catch::Contains("got a result file as the output of a recording") ||
                        Catch::Contains("got a profile file as the output of a recording"));
}

TEST_CASE("recordings that are cut, changed, of another kind or schema, or incomplete are refused") {
  const Both both;
  const test::TempDir folder;
  const std::string path = folder / "r.h5";
  both.write(path);
  REQUIRE_NOTHROW(Recording(path));
  const auto open = [&](const std::string& name) { Recording(folder / name); };

  std::ifstream in(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  std::ofstream(folder / "cut.h5", std::ios::binary) << bytes.substr(0, bytes.size() / 2);
  CHECK_THROWS_WITH(open("cut.h5"), Catch::Contains("cut.h5") && Catch::Contains("bytes, wanted"));
  std::string changed = bytes;
  changed[changed.size() / 2] ^= 1;
  std::ofstream(folder / "changed.h5", std::ios::binary) << changed;
  CHECK_THROWS_WITH(open("changed.h5"), Catch::Contains("got other bytes than kvlab wrote"));
  results::write_sealed(folder / "other.h5", [](const h5::File& file) { file.set_attribute(".", "kind", "profile"); });
  CHECK_THROWS_WITH(open("other.h5"), Catch::Contains("wanted one that `kvlab record` wrote"));
  CHECK_THROWS_WITH(open("nosuch.h5"), Catch::Contains("nosuch.h5"));

  rewrite(path, folder / "same.h5", recording_schema, "");
  CHECK_NOTHROW(open("same.h5"));
  rewrite(path, folder / "later.h5", recording_schema + 1, "");
  CHECK_THROWS_WITH(open("later.h5"), Catch::Contains("got a recording of schema 2, wanted 1: kvlab 9.9.9 wrote it"));
  rewrite(path, folder / "keys.h5", recording_schema, "keys");
  CHECK_THROWS_WITH(open("keys.h5"), Catch::Contains("got no array 'keys'"));
  rewrite(path, folder / "layer.h5", recording_schema, "values");
  CHECK_THROWS_WITH(open("layer.h5"), Catch::Contains("got an array 'values' of [2, ") &&
                                          Catch::Contains("wanted [3, ") && Catch::Contains("counts layers"));
}
