#include "result/h5_detail.hpp"
#include "result/h5_text.hpp"

namespace kvlab::h5 {

using namespace detail;

namespace {

void put_attribute(hid_t at, const std::string& object, const std::string& name, hid_t type, hid_t space,
                   const void* data, const std::string& file) {
  const Handle attribute =
      own(H5Acreate_by_name(at, object.c_str(), name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
          H5Aclose, "create an attribute", file, name);
  if (data) check(H5Awrite(attribute.get(), type, data), "write an attribute", file, name);
}

}  // namespace

void Location::set_attribute(const std::string& object, const std::string& name, const std::string& value) const {
  const Handle type = text_type(H5T_VARIABLE, H5T_CSET_UTF8, file_);
  const Handle space = own(H5Screate(H5S_SCALAR), H5Sclose, "make a data space", file_, name);
  const std::string text = valid_utf8(value);
  const char* pointer = text.c_str();
  put_attribute(handle_.get(), object, name, type.get(), space.get(), &pointer, file_);
}

void Location::set_attribute(const std::string& object, const std::string& name, std::int64_t value) const {
  const Handle space = own(H5Screate(H5S_SCALAR), H5Sclose, "make a data space", file_, name);
  put_attribute(handle_.get(), object, name, H5T_NATIVE_INT64, space.get(), &value, file_);
}

void Location::set_attribute(const std::string& object, const std::string& name,
                             const std::vector<std::string>& values) const {
  const Handle type = text_type(H5T_VARIABLE, H5T_CSET_UTF8, file_);
  const Handle space = simple_space({static_cast<std::int64_t>(values.size())}, file_, name);
  std::vector<std::string> texts;
  for (const std::string& v : values) texts.push_back(valid_utf8(v));
  std::vector<const char*> pointers;
  for (const std::string& t : texts) pointers.push_back(t.c_str());
  put_attribute(handle_.get(), object, name, type.get(), space.get(), pointers.empty() ? nullptr : pointers.data(),
                file_);
}

bool Location::has_attribute(const std::string& object, const std::string& name) const {
  const htri_t found = H5Aexists_by_name(handle_.get(), object.c_str(), name.c_str(), H5P_DEFAULT);
  check(found, "look for an attribute", file_, name);
  return found > 0;
}

std::vector<std::string> Location::texts_attribute(const std::string& object, const std::string& name) const {
  const Handle attribute = own(H5Aopen_by_name(handle_.get(), object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT),
                               H5Aclose, "open an attribute", file_, name);
  const Handle stored = own(H5Aget_type(attribute.get()), H5Tclose, "read an attribute's type", file_, name);
  if (H5Tget_class(stored.get()) != H5T_STRING || H5Tis_variable_str(stored.get()) <= 0)
    fail("got an attribute of another type, wanted variable-length text", file_, name);
  const Handle space = own(H5Aget_space(attribute.get()), H5Sclose, "read an attribute's extent", file_, name);
  const hssize_t count = H5Sget_simple_extent_npoints(space.get());
  // Every element of an attribute of variable-length text takes 16 bytes of the file.
  const hsize_t bytes = file_size(attribute.get(), file_);
  if (count < 0 || static_cast<hsize_t>(count) > bytes / 16) fail("got an attribute larger than its file", file_, name);
  const Handle type = text_type(H5T_VARIABLE, H5Tget_cset(stored.get()), file_);
  std::vector<char*> pointers(static_cast<std::size_t>(count), nullptr);
  const Reclaim reclaim{type.get(), space.get(), pointers.data()};
  if (count) check(H5Aread(attribute.get(), type.get(), pointers.data()), "read an attribute", file_, name);
  std::vector<std::string> texts;
  for (const char* p : pointers) texts.emplace_back(p ? p : "");
  return texts;
}

std::string Location::text_attribute(const std::string& object, const std::string& name) const {
  const auto texts = texts_attribute(object, name);
  if (texts.size() != 1) fail("got " + std::to_string(texts.size()) + " texts, wanted one", file_, name);
  return texts.front();
}

std::int64_t Location::integer_attribute(const std::string& object, const std::string& name) const {
  const Handle attribute = own(H5Aopen_by_name(handle_.get(), object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT),
                               H5Aclose, "open an attribute", file_, name);
  const Handle stored = own(H5Aget_type(attribute.get()), H5Tclose, "read an attribute's type", file_, name);
  const Handle space = own(H5Aget_space(attribute.get()), H5Sclose, "read an attribute's extent", file_, name);
  if (H5Tget_class(stored.get()) != H5T_INTEGER || H5Sget_simple_extent_npoints(space.get()) != 1)
    fail("got an attribute of another type, wanted one integer", file_, name);
  std::int64_t value = 0;
  check(H5Aread(attribute.get(), H5T_NATIVE_INT64, &value), "read an attribute", file_, name);
  return value;
}

}  // namespace kvlab::h5
