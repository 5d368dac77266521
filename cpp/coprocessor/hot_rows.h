// Which tokens of a KV head have their rows on the GPU, where the GPU attends to a bounded set of them: the map is the
// CPU's, which says what the GPU has to fetch and in whose place. What was chosen longest ago goes first.
//
// A set belongs to a slot (a row of the GPU's buffers), a layer and a KV head. Different sets may be changed at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

namespace offload {

// A row that the GPU has to fetch, and its place among the head's hot rows.
struct Fetch {
  int32_t token;
  int32_t place;
};

class HotRows {
 public:
  HotRows(int64_t num_slots, int64_t num_layers, int num_kv_heads, int64_t hot_tokens)
      : num_layers_(num_layers),
        num_kv_heads_(num_kv_heads),
        hot_tokens_(hot_tokens),
        sets_(static_cast<size_t>(num_slots * num_layers * num_kv_heads)),
        estimates_(static_cast<size_t>(num_slots)) {}

  int64_t hot_tokens() const { return hot_tokens_; }
  // Between steps: the slot's rows tell of another sequence, or of none; nor are its clusters' means on the GPU.
  void forget(int64_t slot);
  // Between steps: the GPU has the means of the slot's clusters (attention/estimate.h), as they are now.
  void estimate(int64_t slot);
  bool estimates(int64_t slot) const { return estimates_[static_cast<size_t>(slot)] != 0; }
  // Has `tokens` (ascending, at most hot_tokens) among the hot ones; writes what has to be fetched, and returns how
  // many these are. Places are filled in order: hot are [0, num_hot). `cluster_of`: that of each token, or null.
  int64_t choose(int64_t slot, int64_t layer_idx, int kv_head, const int32_t* tokens, int64_t n, Fetch* fetches,
                 const uint8_t* cluster_of = nullptr);
  // How many hot tokens each cluster has, after a choice that knew clusters: [256].
  const int32_t* hot_in_clusters(int64_t slot, int64_t layer_idx, int kv_head) const {
    return sets_[index_of(slot, layer_idx, kv_head)].in_clusters.data();
  }
  int64_t num_hot(int64_t slot, int64_t layer_idx, int kv_head) const;
  // All hot rows of a head, tokens ascending.
  std::vector<Fetch> hot(int64_t slot, int64_t layer_idx, int kv_head) const;

  // Chosen tokens that were hot before, and those that were not, since the last call.
  std::pair<int64_t, int64_t> take_counts() { return {hits_.exchange(0), misses_.exchange(0)}; }

 private:
  struct Set {
    std::vector<int32_t> tokens;       // of each place
    std::vector<uint8_t> ages;         // of each place: steps since it was chosen, the most that are told apart at most
    std::vector<uint64_t> is_hot;      // a bit per token
    std::vector<int32_t> in_clusters;  // hot tokens of each cluster; none: they are not counted
  };
  size_t index_of(int64_t slot, int64_t layer_idx, int kv_head) const {
    return static_cast<size_t>((slot * num_layers_ + layer_idx) * num_kv_heads_ + kv_head);
  }
  static void evict(Set& set, size_t count, std::vector<int32_t>& free_places, const uint8_t* cluster_of);
  static void count_clusters(Set& set, const uint8_t* cluster_of);

  const int64_t num_layers_;
  const int num_kv_heads_;
  const int64_t hot_tokens_;
  std::vector<Set> sets_;
  std::vector<uint8_t> estimates_;  // of each slot
  std::atomic<int64_t> hits_{0}, misses_{0};
};

}  // namespace offload
