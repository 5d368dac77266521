// How much of the exact attention mass a policy's selections keep, estimated from a random share of them: which are
// compared, and what was found.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <mutex>
#include <vector>

#include "kernels/kernels.h"

namespace offload {

// Of the comparisons of one KV head of one layer.
struct MassKept {
  int64_t count = 0;
  double sum = 0.0;
};

// One KV head of one row that is to be compared, with copies of what is overwritten after its layer.
struct Probe {
  int64_t layer_idx;
  int kv_head;
  int64_t kv_len;
  RowSource keys;
  std::vector<float> query;  // [group_size, head_dim]
  // What each of the head's units attended to: sorted tokens, or all.
  struct Attended {
    bool all = false;
    std::vector<int32_t> tokens;
  };
  std::vector<Attended> units;
};

// A partial softmax: of all tokens, and of those among them that were attended.
struct PartialMass {
  float maximum = -INFINITY;
  double all = 0.0;
  double kept = 0.0;

  void merge(const PartialMass& other) {
    const float highest = std::max(maximum, other.maximum);
    const double own_factor = std::exp(static_cast<double>(maximum - highest));
    const double factor = std::exp(static_cast<double>(other.maximum - highest));
    all = (maximum == -INFINITY ? 0.0 : all * own_factor) + other.all * factor;
    kept = (maximum == -INFINITY ? 0.0 : kept * own_factor) + other.kept * factor;
    maximum = highest;
  }
};

class QualityProbe {
 public:
  // Each candidate is drawn with probability `share`, by a generator of its own. What was found before stays.
  void start(double share, uint64_t seed) {
    share_ = share;
    state_ = seed;
    if (is_on()) candidates_to_skip_ = gap();
  }
  bool is_on() const { return share_ > 0.0; }

  // Whether the next candidate is drawn. Between draws it counts down a geometric gap.
  bool draw() {
    if (candidates_to_skip_-- > 0) return false;
    candidates_to_skip_ = gap();
    return true;
  }

  // Number `index` of [num_layers, num_kv_heads]. Numbers that are not finite are left out.
  void add(int64_t index, double mass_kept) {
    if (!std::isfinite(mass_kept)) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (found_.size() <= static_cast<size_t>(index)) found_.resize(static_cast<size_t>(index) + 1);
    MassKept& of_head = found_[static_cast<size_t>(index)];
    ++of_head.count;
    of_head.sum += mass_kept;
    ++num_found_;
  }
  // So far, for any thread.
  int64_t num_found() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_found_;
  }
  // Likewise; heads after the last that was compared are missing.
  std::vector<MassKept> found() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return found_;
  }

 private:
  // Candidates before the next that is drawn: P(n) = share (1 - share)^n.
  int64_t gap() {
    if (share_ >= 1.0) return 0;
    const double u = static_cast<double>((next() >> 11) + 1) * 0x1p-53;  // in (0, 1]
    return static_cast<int64_t>(std::min(std::floor(std::log(u) / std::log1p(-share_)), 0x1p62));
  }
  uint64_t next() {  // SplitMix64
    uint64_t x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  double share_ = 0.0;
  uint64_t state_ = 0;
  int64_t candidates_to_skip_ = 0;
  mutable std::mutex mutex_;
  std::vector<MassKept> found_;
  int64_t num_found_ = 0;
};

}  // namespace offload
