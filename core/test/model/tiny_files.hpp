// Small model files written byte by byte, so that tests know every field and can break any of them.
#pragma once
#include <unistd.h>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <kvlab/error.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvlab::test {

// A folder of the test's own, removed at the end.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvlab-test-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline std::filesystem::path write_file(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return path;
}

// The error with which `action` is refused.
inline std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

class Bytes {
 public:
  template <class T>
  Bytes& put(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Bytes& put_string(std::string_view s) {
    put(std::uint64_t{s.size()});
    text_.append(s);
    return *this;
  }
  Bytes& append(std::string_view s) {
    text_.append(s);
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

class GgufWriter {
 public:
  void number(std::string_view key, std::uint32_t value) { begin(key, 4).put(value); }
  void real(std::string_view key, float value) { begin(key, 6).put(value); }
  void boolean(std::string_view key, bool value) { begin(key, 7).put(std::uint8_t{value}); }
  void text(std::string_view key, std::string_view value) { begin(key, 8).put_string(value); }
  void texts(std::string_view key, const std::vector<std::string>& values) {
    begin(key, 9).put(std::uint32_t{8}).put(std::uint64_t{values.size()});
    for (const std::string& v : values) meta_.put_string(v);
  }
  template <class T>  // type: GGUF's number of T
  void numbers(std::string_view key, std::uint32_t type, const std::vector<T>& values) {
    begin(key, 9).put(type).put(std::uint64_t{values.size()});
    for (const T v : values) meta_.put(v);
  }
  // shape: row-major; type: GGML's number; bytes: as stored
  void tensor(std::string_view name, const std::vector<std::uint64_t>& shape, std::uint32_t type,
              std::string_view bytes) {
    infos_.put_string(name).put(static_cast<std::uint32_t>(shape.size()));
    for (auto it = shape.rbegin(); it != shape.rend(); ++it) infos_.put(*it);
    infos_.put(type).put(std::uint64_t{data_.size()});
    data_.append(bytes).append((32 - bytes.size() % 32) % 32, '\0');
    ++tensors_;
  }
  std::string file(std::uint32_t version = 3) const {
    Bytes out;
    out.append("GGUF").put(version).put(tensors_).put(keys_).append(meta_.text()).append(infos_.text());
    std::string text = out.text();
    text.append((32 - text.size() % 32) % 32, '\0');
    return text + data_;
  }

 private:
  Bytes& begin(std::string_view key, std::uint32_t type) {
    ++keys_;
    return meta_.put_string(key).put(type);
  }
  Bytes meta_, infos_;
  std::string data_;
  std::uint64_t keys_ = 0, tensors_ = 0;
};

inline std::string f32_bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
}

// header: the JSON text.
inline std::string safetensors_file(std::string_view header, std::string_view data) {
  return Bytes().put_string(header).append(data).text();
}

// Feeds every truncation (in steps) and every single broken byte of `good` to `open`, which must work or throw
// kvlab::Error. Returns the number of refusals.
inline int refused_mutations(const std::string& good, std::size_t step,
                             const std::function<void(const std::string&)>& open) {
  int refused = 0;
  const auto attempt = [&](const std::string& bytes) {
    try {
      open(bytes);
    } catch (const Error&) {
      ++refused;
    }
  };
  for (std::size_t size = 0; size < good.size(); size += step) attempt(good.substr(0, size));
  for (std::size_t at = 0; at < good.size(); at += step)
    for (const unsigned flip : {0x01u, 0x80u, 0xffu}) {
      std::string broken = good;
      broken[at] = static_cast<char>(static_cast<unsigned char>(broken[at]) ^ flip);
      attempt(broken);
    }
  return refused;
}

}  // namespace kvlab::test
