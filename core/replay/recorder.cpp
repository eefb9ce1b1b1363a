#include "replay/recorder.hpp"

namespace kvlab {
namespace {

// The rows of a dense view.
void add_rows(const View<const float, 3>& from, std::vector<float>& to) {
  to.insert(to.end(), from.data, from.data + from.extent[0] * from.stride[0]);
}

void join(std::vector<float>& to, const std::vector<float>& more) { to.insert(to.end(), more.begin(), more.end()); }

}  // namespace

void Recorder::prompt(const PromptLayer& l, const Store& store) {
  layers_.resize(static_cast<std::size_t>(store.shape().layers));
  Layer& layer = layers_[static_cast<std::size_t>(l.layer)];
  add_rows(l.queries, layer.prompt_queries);
  add_rows(l.keys, layer.keys);
  add_rows(l.values, layer.values);
  for (std::int64_t head = 0; head < l.mass.extent[0]; ++head)
    layer.mass.insert(layer.mass.end(), &l.mass(head, 0), &l.mass(head, 0) + l.mass.extent[1]);
}

void Recorder::attended(const DecodeLayer& l, const Store&) {
  Layer& layer = layers_[static_cast<std::size_t>(l.layer)];
  add_rows(l.queries, layer.step_queries);
  add_rows(l.keys, layer.keys);
  add_rows(l.values, layer.values);
}

RecordedLayers Recorder::take() {
  RecordedLayers out;
  for (const Layer& layer : layers_) {
    join(out.prompt_queries, layer.prompt_queries);
    join(out.step_queries, layer.step_queries);
    join(out.keys, layer.keys);
    join(out.values, layer.values);
    join(out.prompt_mass, layer.mass);
  }
  layers_.clear();
  return out;
}

}  // namespace kvlab
