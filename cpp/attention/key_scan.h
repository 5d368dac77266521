// Exact attention weights of all tokens, for policies that want every key scored: they select from these, which then
// stand in for the scores of the selection.
//
// Keys are scanned in waves of KV heads whose scratch stays in the cache. Tasks of a wave: ranges of chunks, scored for
// all its heads in memory order; then, per head, turning scores into weights and selecting. The list interleaves them
// so that no thread idles: ranges of wave w + 1 come before the selections of wave w. Tasks start in order, so a task
// only ever waits for tasks that are already running.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "attention/layer_pass.h"
#include "attention/selector.h"

namespace offload {

class KeyScan {
 public:
  KeyScan(LayerPass& pass, Selector& selector) : pass_(pass), setup_(pass.setup), selector_(selector) {}

  // Scans and selects for all units of the pass's sparse rows that are scanned.
  void run();

 private:
  static constexpr int kMaxWaveHeads = 32;

  // Scratch of a wave: some KV heads of a row whose keys are scanned together.
  struct Slot {
    std::vector<float> weights;     // [heads, group_size, tokens of the wave], relative to each chunk's maximum
    std::vector<float> importance;  // [heads, tokens]
    std::vector<float> chunk_max;   // [heads, group_size, chunks of those tokens]
    std::vector<float> chunk_sum;
  };
  struct Wave {
    int row;
    int heads[kMaxWaveHeads];
    int num_heads = 0;
    int64_t tokens = 0;  // of the head that has most
    std::atomic<int> ranges_left{0};
    std::atomic<int> heads_left{0};  // to be finished
  };

  void scan_chunks(const Wave& wave, int64_t first_chunk, int64_t num_chunks, Slot& slot, int worker);
  void finish(const Wave& wave, int head_of_wave, Slot& slot, int worker);
  void select_for_all(int r, int worker);

  LayerPass& pass_;
  AttentionSetup& setup_;
  Selector& selector_;
  Slot slots_[3];
};

}  // namespace offload
