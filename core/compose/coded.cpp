#include "compose/coded.hpp"

#include <kvlab/error.hpp>

#include <utility>
#include <vector>

#include "compose/compose.hpp"
#include "compose/forwarding.hpp"

namespace kvlab {
namespace {

class CodedPolicy final : public ForwardingPolicy {
 public:
  CodedPolicy(std::shared_ptr<Policy> inner, const CodecSpec& codec)
      : ForwardingPolicy(std::move(inner)), codec_(codec) {}
  std::vector<CodecSpec> codecs() const override { return {codec_}; }
  CodecSpec host_codec() const override { return codec_; }

 private:
  CodecSpec codec_;
};

}  // namespace

const char* takes_no_codec(const Policy& policy) {
  const Needs needs = policy.needs();
  if (policy.codecs() != std::vector<CodecSpec>{CodecSpec{}}) return "that has codecs of its own, wanted none";
  if (needs.functional() || needs.rebuilds_keys())
    return "that stores other keys or values than the model's, wanted none: it stores them in the run's dtype";
  return nullptr;
}

std::shared_ptr<Policy> coded(std::shared_ptr<Policy> policy, const Codec& codec, const std::string& name) {
  const auto refuse = [&](const std::string& what) { throw Error(Errc::config, what, name); };
  const CodecSpec spec = codec.spec();
  if (spec.packs)
    refuse("got a codec that packs pages for those on the device, wanted placement: {tier: host, codec: NAME}");
  if (pages_age(codec))
    refuse(
        "got a codec with a residual or with groups beside a policy plugin, wanted one that encodes token by token: "
        "encoded pages keep their tokens, and a policy may evict or move them");
  if (const char* why = takes_no_codec(*policy)) refuse(std::string("got a codec beside a policy plugin ") + why);
  return std::make_shared<CodedPolicy>(std::move(policy), spec);
}

}  // namespace kvlab
