#include "model/checkpoint.hpp"

#include <catch2/catch.hpp>

#include "model/gguf.hpp"
#include "model/hf_checkpoint.hpp"
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

TEST_CASE("a fingerprint follows every file that the model reads, not the folder") {
  const TempDir dir, copy;
  write_folder(dir);
  write_folder(copy);
  const auto print = [&] { return open_checkpoint(dir.path())->fingerprint(); };
  const std::string first = print();
  CHECK(open_checkpoint(copy.path())->fingerprint() == first);

  // A retrained model: the same header and size, one other number.
  std::string weights = tiny_safetensors();
  weights[weights.size() - 1] = static_cast<char>(weights[weights.size() - 1] ^ 1);
  write_file(dir / "model.safetensors", weights);
  CHECK(print() != first);
  write_file(dir / "model.safetensors", tiny_safetensors());
  CHECK(print() == first);

  std::string tokenizer = tiny_tokenizer;
  tokenizer.replace(tokenizer.find(R"(["a b", )"), 8, "[");
  write_file(dir / "tokenizer.json", tokenizer);
  CHECK(print() != first);
  write_file(dir / "tokenizer.json", tiny_tokenizer);
  for (const char* name : {"generation_config.json", "tokenizer_config.json", "chat_template.jinja"}) {
    INFO(name);
    write_file(dir / name, "{}");
    const std::string with = print();
    CHECK(with != first);
    write_file(dir / name, "{ }");
    CHECK(print() != with);
    std::filesystem::remove(dir / name);
    CHECK(print() == first);
  }

  std::string gguf = tiny_gguf();
  const std::string before = open_gguf_text(dir, gguf)->fingerprint();
  CHECK(open_gguf_text(copy, gguf)->fingerprint() == before);
  gguf[gguf.size() - 1] = static_cast<char>(gguf[gguf.size() - 1] ^ 1);
  CHECK(open_gguf_text(dir, gguf)->fingerprint() != before);
}

TEST_CASE("GGUF: each byte of data belongs to one tensor") {
  const TempDir dir;
  const auto refused = [&](const std::string& bytes) { return message_of([&] { open_gguf_text(dir, bytes); }); };
  const std::string good = tiny_gguf();
  REQUIRE(refused(good) == "no error");
  CHECK(refused(good + "x").find("got 1 bytes after the last tensor") != std::string::npos);
  CHECK(refused(good + std::string(32, '\0')).find("got 32 bytes after the last tensor") != std::string::npos);
  // The last tensor, [8, 16] of f32, fills its padding, so a shorter file lacks values.
  CHECK(refused(good.substr(0, good.size() - 4)).find("blk.0.ffn_down.weight: got 512 bytes") != std::string::npos);

  // The offset stands at the end of a tensor's entry.
  const auto moved = [&](const char* tensor, std::uint64_t offset) {
    std::string bytes = good;
    const std::size_t at = good.find(tensor) + std::strlen(tensor) + 4 + 2 * 8 + 4;
    std::memcpy(bytes.data() + at, &offset, sizeof offset);
    return refused(bytes);
  };
  // token_embd [6, 8] is 192 bytes, output_norm 32, both norms 32: attn_q begins at 288 and ends at 544.
  REQUIRE(moved("blk.0.attn_k.weight", 544) == "no error");
  CHECK(moved("blk.0.attn_k.weight", 288).find("got offset 288, wanted 544, where the tensor before it ends") !=
        std::string::npos);
  CHECK(moved("blk.0.attn_k.weight", 576).find("got offset 576, wanted 544") != std::string::npos);
}

TEST_CASE("safetensors: each byte of data belongs to one tensor") {
  const TempDir dir;
  write_folder(dir);
  const auto refused = [&](const std::string& bytes) {
    write_file(dir / "model.safetensors", bytes);
    return message_of([&] { open_checkpoint(dir.path()); });
  };
  const std::string good = tiny_safetensors();
  REQUIRE(refused(good) == "no error");
  CHECK(refused(good + "xy").find("got 2 bytes after the last tensor") != std::string::npos);
  const auto with = [&](const std::string& offsets, const std::string& others) {
    std::string bytes = good;
    REQUIRE(offsets.size() == others.size());
    bytes.replace(bytes.find(offsets), offsets.size(), others);
    return refused(bytes);
  };
  // The layer's two norms have 32 bytes each. First both claim the first one's bytes. Last they swap and leave a hole.
  CHECK(with("[256, 288]", "[224, 256]")
            .find("post_attention_layernorm.weight: got data from byte 224, wanted it from "
                  "byte 256, where 'model.layers.0.input_layernorm.weight' ends") != std::string::npos);
  CHECK(with("[16, 8]", "[17, 8]").find("wanted 544 bytes") != std::string::npos);  // one row more than its bytes
  CHECK(with("[224, 256]", "[256, 288]").find("got data from byte 256, wanted it from byte 224") != std::string::npos);
}

TEST_CASE("a tensor that nobody would read is refused by name") {
  const TempDir dir;
  write_folder(dir);
  auto tensors = tiny_tensors();
  const std::size_t own = tensors.size();
  for (const char* name :
       {"model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight"}) {
    tensors.resize(own);
    tensors.push_back({"", name, {8}});
    write_file(dir / "model.safetensors", tiny_safetensors(tensors));
    CHECK(message_of([&] { open_checkpoint(dir.path()); }).find(std::string(name) + ": got a tensor that") !=
          std::string::npos);
  }
  // Old exports carry the rotary frequencies, which follow from the configuration.
  tensors.resize(own);
  tensors.push_back({"", "model.layers.0.self_attn.rotary_emb.inv_freq", {2}});
  write_file(dir / "model.safetensors", tiny_safetensors(tensors));
  CHECK(open_checkpoint(dir.path())->names().size() == own + 1);

  // A GGUF file with more layers than its header counts.
  const std::string two = tiny_gguf("llama", {{"blk.1.attn_q.weight", "", {8, 8}}});
  CHECK(message_of([&] {
          open_gguf_text(dir, two);
        }).find("model.layers.1.self_attn.q_proj.weight: got a tensor that") != std::string::npos);
  const std::string odd = tiny_gguf("llama", {{"blk.0.attn_odd.weight", "", {8}}});
  CHECK(message_of([&] { open_gguf_text(dir, odd); }).find("blk.0.attn_odd.weight: got a tensor that") !=
        std::string::npos);
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

TEST_CASE("a model has the sliding window that its family's config.json switches on") {
  const auto window = [](const std::string& family, const std::string& more, const char* layers = "1") {
    std::string config = tiny_config;
    config.replace(config.find("llama"), 5, family);
    config.replace(config.find("layers\": 1") + 9, 1, layers);
    config.insert(1, more);
    return read_hf_config(config, "config.json").sliding_window;
  };
  const std::string size = "\"sliding_window\": 32, ", on = "\"use_sliding_window\": true, ";
  CHECK(window("mistral", "") == 0);
  CHECK(window("mistral", "\"sliding_window\": null, ") == 0);
  CHECK(window("mistral", size) == 32);
  for (const char* qwen : {"qwen2", "qwen3"}) {
    CAPTURE(qwen);
    const std::string everywhere = size + "\"max_window_layers\": 0, ";
    CHECK(window(qwen, everywhere) == 0);  // Hugging Face's default is off
    CHECK(window(qwen, everywhere + "\"use_sliding_window\": false, ") == 0);
    CHECK(window(qwen, everywhere + on) == 32);
    CHECK(window(qwen, size + on + "\"max_window_layers\": 1, ") == 0);  // the only layer attends to everything
  }
  CHECK(message_of([&] {
          window("qwen2", size + on + "\"max_window_layers\": 1, ", "2");
        }).find("max_window_layers: got 1, wanted 0, or all layers") != std::string::npos);
}

TEST_CASE("a broken model file is refused or read, never a crash") {
  const TempDir dir;
  const auto read_all = [](const Checkpoint& model) {
    for (const std::string& name : model.names()) model.read(name);
    if (model.tokenizer() != nullptr) model.tokenizer()->encode("ab <|endoftext|> a\xff");
  };
  const auto metadata = static_cast<std::size_t>(1900);  // metadata ends before; values behind it may be any bytes
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
