#include "model/tokenizer.hpp"

#include <catch2/catch.hpp>

#include "base/cache_folder.hpp"
#include "model/bundled.hpp"
#include "model/checkpoint.hpp"
#include "model/config.hpp"
#include "model/tokenizer_files.hpp"
#include "test/model/tiny_models.hpp"
#include "test/support/places.hpp"

using namespace kvlab;
using namespace kvlab::test;
using Ids = std::vector<int>;

TEST_CASE("added tokens: longest first, control tokens only where asked") {
  const TempDir dir;
  const auto t =
      tokenizer_from_json(write_file(dir / "t.json", R"({"added_tokens": [{"id": 3, "content": "<x>", "special": true},
        {"id": 4, "content": "<x><y>", "special": true}, {"id": 5, "content": "<u>", "special": false, "rstrip": true}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
        "model": {"type": "BPE", "vocab": {"a": 0, "<": 1, "x": 2, ">": 6}, "merges": []}})"),
                          {});
  CHECK(t->encode("a<x>a<x><y>") == Ids{0, 3, 0, 4});
  CHECK(t->encode("<x>", false, false) == Ids{1, 2, 6});
  CHECK(t->encode("<u>  a", false, false) == Ids{5, 0});
  CHECK(t->encode("") == Ids{});
  CHECK(t->decode(Ids{0, 3}) == "a<x>");
  CHECK(t->decode(Ids{0, 3}, true) == "a");
  CHECK_THROWS_AS(t->decode(Ids{7}), Error);
  CHECK_THROWS_AS(t->decode(Ids{-1}), Error);
}

TEST_CASE("SentencePiece-like tokenizer.json: marks for spaces, bytes for unknown characters") {
  const TempDir dir;
  const auto t = tokenizer_from_json(write_file(dir / "t.json", R"({"normalizer": {"type": "Sequence", "normalizers": [
          {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]},
        "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "fuse_unk": true,
          "vocab": {"<unk>": 0, "<s>": 1, "▁": 2, "a": 3, "▁a": 4, "<0xC3>": 5, "<0xA4>": 6}, "merges": ["▁ a"]}})"),
                                     {});
  CHECK(t->encode("a a") == Ids{4, 4});
  CHECK(t->encode("aä", true) == Ids{1, 4, 5, 6});
  CHECK(t->encode("öö") == Ids{2, 0});
  CHECK(t->decode(t->encode("a aä")) == "a aä");
}

TEST_CASE("bytes that are no UTF-8 come back as they were") {
  const auto t = tokenizer_from_gguf(GgufFile(test::source_root() / "core/test/data/vocab/ggml-vocab-gpt-2.gguf"));
  const auto s = tokenizer_from_gguf(GgufFile(test::source_root() / "core/test/data/vocab/ggml-vocab-llama-spm.gguf"));
  for (const std::string text :
       {"\xff", "a\xc3", "\xe2\x96 x", "\xed\xa0\x80", "ok \xf0\x9f\x98 \xc0\xaf end", "\0\1\2"}) {
    CHECK(t->decode(t->encode(text)) == text);
    CHECK(s->decode(s->encode(text)) == text);
  }
}

TEST_CASE("a long piece takes no quadratic time and merges as a short one does") {
  const auto t = tokenizer_from_gguf(GgufFile(test::source_root() / "core/test/data/vocab/ggml-vocab-gpt-2.gguf"));
  const std::string text(200000, 'a');
  CHECK(t->decode(t->encode(text)) == text);
}

TEST_CASE("unsupported parts of tokenizer.json are refused by name") {
  const TempDir dir;
  const auto message = [&](const std::string& text) {
    try {
      tokenizer_from_json(write_file(dir / "t.json", text), {});
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  CHECK(message(R"({"model": {"type": "WordPiece", "vocab": {}}})").find("got 'WordPiece', wanted BPE") !=
        std::string::npos);
  CHECK(message(R"({"normalizer": {"type": "NFKC"}, "model": {"vocab": {}, "merges": []}})").find("'NFKC'") !=
        std::string::npos);
  CHECK(message(R"({"pre_tokenizer": {"type": "Whitespace"}, "model": {"vocab": {}, "merges": []}})")
            .find("'Whitespace'") != std::string::npos);
  CHECK(message(R"({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated"},
                    "model": {"vocab": {}, "merges": []}})")
            .find("regular expression") != std::string::npos);
  CHECK(message(R"({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
                    "model": {"vocab": {"a": 99999999}, "merges": []}})")
            .find("id 99999999") != std::string::npos);
}

TEST_CASE("chat templates are recognised and written") {
  const ChatTemplate smollm = recognise_chat_template(
      "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
      "are "
      "SmolLM<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
      "'<|im_end|>\n'}}");
  CHECK(render_chat(smollm, "Hi", {}) ==
        "<|im_start|>system\nYou are SmolLM<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  CHECK(render_chat(smollm, "Hi", "S") ==
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  const ChatTemplate qwen3 =
      recognise_chat_template("{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}");
  CHECK(render_chat(qwen3, "Hi", {}) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  const ChatTemplate llama2 = recognise_chat_template("{{ '[INST] ' + '<<SYS>>\\n' }}");
  CHECK(render_chat(llama2, " Hi ", {}) == "[INST] Hi [/INST]");
  CHECK(render_chat(llama2, "Hi", "S") == "[INST] <<SYS>>\nS\n<</SYS>>\n\nHi [/INST]");
  const ChatTemplate llama3 = recognise_chat_template("{{ '<|start_header_id|>' + role }}");
  CHECK(render_chat(llama3, "Hi", {}) ==
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n");
  CHECK(render_chat(recognise_chat_template("{{ '[INST] ' + content + ' [/INST]' }}"), "Hi", {}) ==
        "[INST] Hi [/INST]");
  CHECK(render_chat({}, "Hi", "S") == "S\n\nHi");
  CHECK(chat_turn(qwen3) == "<|im_end|>\n<|im_start|>user\n");
  CHECK(chat_turn(llama2) == "</s><s>[INST] ");
  CHECK(chat_turn(llama3) == "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n");
  CHECK(chat_turn({}).empty());
  CHECK(recognise_chat_template("{{ something }}").kind == ChatTemplate::Kind::none);
  CHECK(recognise_chat_template("{{ something }}").hash != recognise_chat_template("{{ another }}").hash);
}

TEST_CASE("validate refuses nonsense by name; rotary frequencies follow their scaling") {
  ModelConfig c;
  c.family = "llama";
  c.layers = 1, c.hidden = 8, c.heads = 2, c.kv_heads = 1, c.head_dim = 4, c.ffn = 16, c.vocab = 6, c.context = 64;
  c.rope_theta = 10000;
  CHECK_NOTHROW(validate(c, "x"));
  const auto refused = [&](auto change, const char* word) {
    ModelConfig bad = c;
    change(bad);
    CHECK_THROWS_WITH(validate(bad, "x"), Catch::Contains(word));
  };
  refused([](ModelConfig& m) { m.layers = 0; }, "layers 0");
  refused([](ModelConfig& m) { m.ffn = -3; }, "ffn -3");
  refused([](ModelConfig& m) { m.heads = 3, m.kv_heads = 2; }, "kv_heads 2");
  refused([](ModelConfig& m) { m.head_dim = 5; }, "head_dim 5");
  refused([](ModelConfig& m) { m.eos_ids = {6}; }, "eos id 6");
  refused([](ModelConfig& m) { m.family = "gpt"; }, "'gpt'");

  CHECK(inverse_frequencies(c) == std::vector<float>{1.0f, 0.01f});
  c.rope_scaling.kind = RopeScaling::Kind::linear;
  c.rope_scaling.factor = 4;
  CHECK(inverse_frequencies(c)[0] == 0.25f);
  // Over 64 positions pair 0 turns 10.2 times and is kept. Pair 1 makes a tenth of a turn and is divided by the factor.
  c.rope_scaling = {RopeScaling::Kind::llama3, 8, 1, 4, 64, {}};
  CHECK(inverse_frequencies(c)[0] == 1.0f);
  CHECK(inverse_frequencies(c)[1] == Approx(0.01 / 8));
}

TEST_CASE("model paths") {
  const TempDir dir;
  ::setenv("XDG_CACHE_HOME", dir.path().c_str(), 1);
  ::setenv("KVLAB_DATA_DIR", dir.path().c_str(), 1);
  CHECK(cache_folder() == dir / "kvlab");
  const auto smollm2 = [] { return message_of([] { resolve_model_path("bundled/smollm2", "."); }); };
  CHECK_THAT(smollm2(), Catch::Contains("got no such file") && Catch::Contains("98362432 bytes"));
  std::filesystem::create_directory(dir / "kvlab");
  const auto file = write_file(dir / "kvlab/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF");
  CHECK_THAT(smollm2(), Catch::Contains("got a file of 4 bytes") && Catch::Contains("run tools/fetch-model"));
  std::filesystem::resize_file(file, 98362432);  // the right size is not enough
  CHECK_THAT(smollm2(), Catch::Contains("got a file with sha256 ") && Catch::Contains("remove it, then run") &&
                            Catch::Contains("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"));
  std::filesystem::create_directories(dir / "models/tiny");
  CHECK(resolve_model_path("bundled/tiny", ".") == dir / "models/tiny");
  CHECK_THROWS_AS(resolve_model_path("bundled/none", "."), Error);
  CHECK_THROWS_AS(resolve_model_path("", dir.path()), Error);
  write_file(dir / "m.gguf", tiny_gguf());
  CHECK(resolve_model_path("m.gguf", dir.path()) == dir / "m.gguf");
  ::unsetenv("XDG_CACHE_HOME");
  ::unsetenv("KVLAB_DATA_DIR");
}
