// What decode attention does while nobody waits for it: rows that the next request will most likely read are brought
// from memory into the caches of the workers that will read them. Most of what a policy considers in one step it
// considers again in the next.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/layer_pass.h"

namespace offload {

class CacheWarmer {
 public:
  explicit CacheWarmer(const LayerPass& pass) : pass_(pass), setup_(pass.setup) {}

  // Notes what the pass read under the policy.
  void remember();
  // Reads what was noted of a layer's rows, until *stop is not 0. `elsewhere` as in AttendOptions.
  void warm_up(int64_t layer_idx, const std::vector<QueryRow>& rows, int first_row, int32_t* stop,
               const uint8_t* elsewhere);

 private:
  // What a unit read in the last step.
  struct Remembered {
    std::vector<int32_t> scored;
    std::vector<int32_t> attended;
    bool reads_keys = false;  // of what was attended, and not only its values
  };
  // What a unit will probably read, in one of the lists above or a GPU's.
  struct Forecast {
    int row = 0;
    int kv_head = 0;
    std::span<const int32_t> scored;
    std::span<const int32_t> attended;
    bool reads_keys = false;
    bool is_certain = false;  // and it is in lists that were published
  };

  Forecast forecast(int64_t layer_idx, const QueryRow& row, int row_of_step, int unit) const;

  const LayerPass& pass_;
  AttentionSetup& setup_;
  std::vector<std::vector<Remembered>> remembered_;  // [layer][row of the step, unit]
  std::vector<Forecast> forecasts_;
};

}  // namespace offload
