#include "model/checkpoint.hpp"

#include <catch2/catch.hpp>

#include "model/gguf.hpp"
#include "test/model/tiny_models.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

std::unique_ptr<Checkpoint> open_gguf_text(const TempDir& dir, const std::string& text) {
  return open_checkpoint(write_file(dir / "m.gguf", text));
}

void write_folder(const TempDir& dir) {
  write_file(dir / "config.json", tiny_config);
  write_file(dir / "model.safetensors", tiny_safetensors());
  write_file(dir / "tokenizer.json", tiny_tokenizer);
}

}  // namespace

TEST_CASE("GGUF: Hugging Face names, shapes, and Q and K rows in half-split order") {
  const TempDir dir;
  const auto llama = open_gguf_text(dir, tiny_gguf());
  CHECK(llama->config().family == "llama");
  CHECK(llama->config().head_dim == 4);
  CHECK(llama->config().tied_embeddings);
  CHECK_FALSE(llama->has("lm_head.weight"));
  CHECK(llama->names().size() == tiny_tensors().size());
  CHECK(llama->shape("model.layers.0.mlp.down_proj.weight") == std::vector<std::int64_t>{8, 16});
  CHECK(llama->read("model.norm.weight") == counting({8}));
  // Stored row 2i of a head is its half-split row i, stored row 2i + 1 its row i + 2 (head_dim 4).
  const std::vector<float> q = llama->read("model.layers.0.self_attn.q_proj.weight");
  std::vector<float> first_column;
  for (std::size_t row = 0; row < 8; ++row) first_column.push_back(q[row * 8] / 8);
  CHECK(first_column == std::vector<float>{0, 2, 1, 3, 4, 6, 5, 7});
  std::vector<float> row(8);
  llama->read_rows("model.layers.0.self_attn.q_proj.weight", 5, 1, row.data());
  CHECK(row[0] == 6 * 8);
  CHECK(llama->read("model.layers.0.self_attn.v_proj.weight") == counting({4, 8}));
  CHECK(llama->tokenizer()->encode("ab ab") == std::vector<int>{2, 4});
  CHECK(llama->config().eos_ids == std::vector<int>{5});
}

TEST_CASE("GGUF: data that ends a byte or a block early is refused, in every type") {
  const TempDir dir;
  struct Stored {
    std::uint32_t type;           // GGML's number
    std::size_t elements, bytes;  // of a block
  };
  for (const Stored& s : {Stored{0, 1, 4}, {1, 1, 2}, {2, 32, 18}, {8, 32, 34}, {12, 256, 144}, {14, 256, 210}}) {
    CAPTURE(s.type);
    GgufWriter w;
    w.tensor("t", {2, 512}, s.type, std::string(1024 / s.elements * s.bytes, '\0'));
    const std::string whole = w.file();
    const std::size_t padding = (32 - 1024 / s.elements * s.bytes % 32) % 32;
    const auto open = [&](std::size_t short_of) {
      return message_of([&] { GgufFile(write_file(dir / "m.gguf", whole.substr(0, whole.size() - short_of))); });
    };
    CHECK(open(padding) == "no error");
    for (const std::size_t less : {std::size_t{1}, s.bytes})
      CHECK_THAT(open(padding + less), Catch::Contains("wanted data inside the file"));
  }
}

TEST_CASE("safetensors: one file, shards with an index, a tied head under either name") {
  const TempDir dir;
  write_folder(dir);
  const auto whole = open_checkpoint(dir.path());
  CHECK(whole->config().kv_heads == 1);
  CHECK(whole->stored_type("model.norm.weight") == "f32");
  CHECK(whole->read("model.layers.0.self_attn.q_proj.weight") == counting({8, 8}));
  CHECK(whole->tokenizer()->encode("ab ab<|endoftext|>") == std::vector<int>{2, 4, 5});

  auto tensors = tiny_tensors();
  tensors[0].hugging_face = "lm_head.weight";
  const std::vector<TinyTensor> first(tensors.begin(), tensors.begin() + 5), second(tensors.begin() + 5, tensors.end());
  write_file(dir / "a.safetensors", tiny_safetensors(first));
  write_file(dir / "b.safetensors", tiny_safetensors(second));
  write_file(dir / "model.safetensors.index.json", R"({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})");
  const auto shards = open_checkpoint(dir.path());
  CHECK(shards->names() == whole->names());
  CHECK(shards->read("model.embed_tokens.weight") == counting({6, 8}));
  CHECK(shards->fingerprint() != whole->fingerprint());
  write_file(dir / "model.safetensors.index.json", R"({"weight_map": {"x": "../a.safetensors"}})");
  CHECK(message_of([&] { open_checkpoint(dir.path()); }).find("wanted a file of this folder") != std::string::npos);
}

TEST_CASE("errors name the file, the tensor or key, and both values") {
  const TempDir dir;
  const auto model = open_gguf_text(dir, tiny_gguf());
  float out[8];
  CHECK(message_of([&] { model->read_rows("model.norm.weight", 1, 1, out); }).find("got rows 1 + 1") !=
        std::string::npos);
  CHECK(message_of([&] { model->shape("nothing"); }).find("'nothing'") != std::string::npos);
  CHECK(message_of([&] { open_gguf_text(dir, tiny_gguf("mamba")); }).find("got architecture 'mamba'") !=
        std::string::npos);
  CHECK(message_of([&] { open_checkpoint(dir / "absent.gguf"); }).find("no such file") != std::string::npos);
  write_folder(dir);
  std::string config = tiny_config;
  config.replace(config.find("\"vocab_size\": 6"), 15, "\"vocab_size\": 7");
  write_file(dir / "config.json", config);
  CHECK(message_of([&] {
          open_checkpoint(dir.path());
        }).find("model.embed_tokens.weight: got shape [6, 8], wanted [7, 8]") != std::string::npos);
}

TEST_CASE("a broken model file is refused or read, never a crash") {
  const TempDir dir;
  const auto read_all = [](const Checkpoint& model) {
    for (const std::string& name : model.names()) model.read(name);
    if (model.tokenizer() != nullptr) model.tokenizer()->encode("ab <|endoftext|> a\xff");
  };
  const auto metadata = static_cast<std::size_t>(1900);  // beyond lie values, in which nothing can be wrong
  const std::string gguf = tiny_gguf();
  const auto open = [&](const std::string& bytes) { read_all(*open_gguf_text(dir, bytes)); };
  CHECK(refused_mutations(gguf.substr(0, metadata), 1, open) > 1000);
  CHECK(refused_mutations(gguf, 61, open) > 10);

  write_folder(dir);
  const auto open_folder = [&](const std::string& bytes) {
    write_file(dir / "model.safetensors", bytes);
    read_all(*open_checkpoint(dir.path()));
  };
  CHECK(refused_mutations(tiny_safetensors(), 7, open_folder) > 100);
  write_file(dir / "model.safetensors", tiny_safetensors());
  CHECK(refused_mutations(tiny_tokenizer, 3, [&](const std::string& bytes) {
          write_file(dir / "tokenizer.json", bytes);
          read_all(*open_checkpoint(dir.path()));
        }) > 100);
  write_file(dir / "tokenizer.json", std::string(100000, '['));
  CHECK(message_of([&] { open_checkpoint(dir.path()); }).find("levels deep") != std::string::npos);
}

TEST_CASE("counts that no file could hold are refused before anything is allocated") {
  const TempDir dir;
  const std::string head = Bytes().append("GGUF").put(std::uint32_t{3}).text();
  const auto huge = std::uint64_t{1} << 60;
  for (const std::string& bytes :
       {head + Bytes().put(huge).put(std::uint64_t{0}).text(), head + Bytes().put(std::uint64_t{0}).put(huge).text(),
        head + Bytes()
                   .put(std::uint64_t{0})
                   .put(std::uint64_t{1})
                   .put_string("k")
                   .put(std::uint32_t{9})
                   .put(std::uint32_t{4})
                   .put(huge)
                   .text(),
        head + Bytes().put(std::uint64_t{0}).put(std::uint64_t{1}).put(huge).append(std::string(64, 'x')).text()})
    CHECK_THROWS_AS(open_gguf_text(dir, bytes), Error);
}
