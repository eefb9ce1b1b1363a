#include "compose/coded.hpp"

#include <kvlab/error.hpp>

#include <utility>
#include <vector>

#include "compose/aged.hpp"
#include "compose/compose.hpp"
#include "compose/forwarding.hpp"
#include "compose/keeping.hpp"
#include "plugin/tokens_stay.hpp"

namespace kvlab {
namespace {

class CodedPolicy final : public ForwardingPolicy {
 public:
  CodedPolicy(std::shared_ptr<Policy> inner, std::vector<CodecSpec> codecs, const CodecSpec& host_codec)
      : ForwardingPolicy(std::move(inner)), codecs_(std::move(codecs)), host_codec_(host_codec) {}
  std::vector<CodecSpec> codecs() const override { return codecs_; }
  CodecSpec host_codec() const override { return host_codec_; }

 private:
  std::vector<CodecSpec> codecs_;
  CodecSpec host_codec_;
};

// The policy keeps all tokens, and its pages become codes when they are old.
class AgedPolicy final : public KeepingPolicy {
 public:
  AgedPolicy(std::shared_ptr<Policy> inner, const CodecSpec& codec, int residual)
      : KeepingPolicy(std::move(inner)), codec_(codec), residual_(residual) {}
  Needs needs() const override { return inner().needs().all_layers(true); }
  std::vector<CodecSpec> codecs() const override { return {{}, codec_}; }
  CodecSpec host_codec() const override { return {}; }
  void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
    KeepingPolicy::prefill(kv, edits, s);
    if (kv.last[0]) encode_aged(kv, {}, residual_, edits, s);
  }
  void finish_step(const Step& step, Edits& edits, Stream s) override {
    KeepingPolicy::finish_step(step, edits, s);
    encode_aged(step, residual_, edits, s);
  }

 private:
  CodecSpec codec_;
  int residual_;
};

}  // namespace

const char* takes_no_codec(const Policy& policy) {
  const Needs needs = policy.needs();
  if (policy.codecs() != std::vector<CodecSpec>{CodecSpec{}}) return "that has codecs of its own, wanted none";
  if (needs.functional() || needs.rebuilds_keys())
    return "that stores other keys or values than the model's, wanted none: it stores them in the run's dtype";
  return nullptr;
}

std::shared_ptr<Policy> coded(std::shared_ptr<Policy> policy, const Codec* codec, const Codec* host_codec,
                              const std::string& name) {
  const auto refuse = [&](const std::string& what) { throw Error(Errc::config, what, name); };
  if (codec && codec->spec().packs)
    refuse("got a codec that packs pages for those on the device, wanted placement: {tier: host, codec: NAME}");
  const bool ages = codec && pages_age(*codec);
  if (ages && !tokens_stay(*policy))
    refuse(
        "got a codec with a residual or with groups beside a policy plugin, wanted one that encodes token by token: "
        "encoded pages keep their tokens, and the policy may evict or move them");
  if (const char* why = codec ? takes_no_codec(*policy) : nullptr)
    refuse(std::string("got a codec beside a policy plugin ") + why);
  if (host_codec) {
    if (policy->needs().archive())
      refuse(
          "got a codec for pages on the host beside a policy plugin that archives heads there, wanted none: archived "
          "tokens come back one by one into the device's pages, so both have one codec");
    if (!policy->needs().host_pages())
      refuse("got a codec for pages on the host beside a policy plugin, wanted none: it places no pages there");
    if (const char* why = no_host_codec(*host_codec)) refuse(why);
    if (codec && host_codec->spec().packs) refuse(packs_beside_codes);
  }
  if (ages) return std::make_shared<AgedPolicy>(std::move(policy), codec->spec(), codec->residual());
  std::vector<CodecSpec> codecs = codec ? std::vector<CodecSpec>{codec->spec()} : policy->codecs();
  const CodecSpec below = host_codec ? host_codec->spec() : codec ? codec->spec() : policy->host_codec();
  return std::make_shared<CodedPolicy>(std::move(policy), std::move(codecs), below);
}

}  // namespace kvlab
