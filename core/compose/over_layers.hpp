// Divides a prompt's budget over its layers by a Budget that has numbers(). What layers leave for it lies here until
// the last layer is computed.
#pragma once
#include <kvlab/roles.hpp>

#include <cstdint>
#include <vector>

namespace kvlab {

class OverLayers {
 public:
  // Borrows both. of_scorer: what the scorer needs by itself.
  OverLayers(Budget& budget, Scorer& scorer, const Needs& of_scorer);

  // What the scorer and the budget need together.
  Needs needs() const;
  void attach(const Shape& shape, int dense_layers, Workspace& w);

  // Of a prompt's callback: with the queries that the scorer asked for.
  LayerPrefill for_scorer(const LayerPrefill& kv) const;

  // A new prompt: no layer is measured yet.
  void begin() { tokens_ = 0; }
  // Scores the layer and lets the budget measure it. tokens: the mean to keep. The layer has one row.
  void measure(const LayerPrefill& kv, int tokens, Stream s);
  // In the first layer of Policy::finish_prompt. Divides what was measured, in multiples of `unit` tokens. `whole`: the
  // tokens that decode steps may hold of each head where nothing was measured.
  void divide(const LayerKv& kv, int unit, int whole, Stream s);
  bool divided() const { return tokens_ > 0; }
  // Of a layer that divide() saw: its scores, the tokens that its heads keep, [row, kv_head], and the pins.
  Scores scores(const LayerKv& kv) const { return held(kv); }
  View<const std::int32_t, 2> keep(const LayerKv& kv) const;
  const Pins* pins(const LayerKv& kv) const { return kv.upload("pins", &pins_); }
  Pins pins() const { return pins_; }

  // keep(row, kv_head) = the numbers of the rows' heads since their prompt's end.
  void keep_of_rows(const LayerKv& kv, View<std::int32_t, 2> keep, Stream s) const;

 private:
  Scores held(const LayerKv& kv) const;
  std::int64_t first_head(const LayerKv& kv) const { return std::int64_t{kv.layer - dense_layers_} * shape_.kv_heads; }

  Budget& budget_;
  Scorer& scorer_;
  Needs of_scorer_;
  Shape shape_;
  int dense_layers_ = 0, count_ = 0;      // count_: numbers of a head
  std::int64_t heads_ = 0, longest_ = 0;  // of all divided layers; tokens of a head that there is room for
  int tokens_ = 0;                        // the mean to keep of the prompt that is measured; 0 = none
  Pins pins_;
  // Memory of the device. Of a prompt: [layer, kv_head, token], [layer, kv_head, i] and [layer, kv_head]. That of
  // sequences: [slot, layer, kv_head].
  float *scores_ = nullptr, *measured_ = nullptr;
  std::int32_t *lengths_ = nullptr, *of_slots_ = nullptr;
  std::vector<std::int32_t> keep_;  // [layer, kv_head]
};

}  // namespace kvlab
