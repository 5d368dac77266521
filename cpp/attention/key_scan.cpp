#include "attention/key_scan.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <thread>

namespace offload {
namespace {

constexpr int64_t kChunkTokens = 256;  // a scan's softmax is relative to the maximum of such a chunk
// Of a wave: with two more waves it stays in the last level cache.
constexpr int64_t kScanScratchBytes = int64_t{4} << 20;

}  // namespace

void KeyScan::run() {
  struct Task {
    int64_t wave;
    int head_of_wave;  // -1: a range
    int64_t first_chunk;
    int64_t num_chunks;
  };
  const int group = setup_.shape.group_size();
  const int per_head = setup_.units_per_head();
  std::deque<Wave> waves;
  int64_t longest = 0;
  int64_t all_chunks = 0;
  const auto scans = [&](int r, int kv_head) {
    for (int u = kv_head * per_head; u < (kv_head + 1) * per_head; ++u) {
      if (pass_.unit(r, u).scanned) return true;
    }
    return false;
  };
  for (int r : pass_.sparse_rows) {
    const QueryRow& row = pass_.row(r);
    int retrieving = 0;
    for (int u = 0; u < setup_.units(); ++u) retrieving += pass_.unit(r, u).role == Role::retrieve;
    pass_.unit(r, 0).scores_left.store(retrieving, std::memory_order_relaxed);
    const int64_t fitting = kScanScratchBytes / (row.kv_len * group * static_cast<int64_t>(sizeof(float)));
    const int most = static_cast<int>(std::clamp<int64_t>(fitting, 1, kMaxWaveHeads));
    bool of_this_row = false;
    for (int h = 0; h < setup_.shape.num_kv_heads; ++h) {
      if (!scans(r, h)) continue;
      if (!of_this_row || waves.back().num_heads == most) {
        waves.emplace_back().row = r;
        of_this_row = true;
      }
      Wave& wave = waves.back();
      wave.heads[wave.num_heads++] = h;
      wave.tokens = std::max(wave.tokens, row.num_tokens(h));
      longest = std::max(longest, wave.tokens);
      all_chunks += ceil_div(row.num_tokens(h), kChunkTokens);
    }
  }
  if (waves.empty()) return;
  const int64_t per_thread = all_chunks / (setup_.pool.num_threads() * kPiecesPerThread);
  std::vector<Task> tasks;
  const auto add_selections = [&](int64_t w) {
    for (int h = 0; h < waves[static_cast<size_t>(w)].num_heads; ++h) tasks.push_back({w, h, 0, 0});
  };
  for (int64_t w = 0; w < static_cast<int64_t>(waves.size()); ++w) {
    Wave& wave = waves[static_cast<size_t>(w)];
    const int64_t chunks = ceil_div(wave.tokens, kChunkTokens);
    const int64_t step = std::clamp<int64_t>(per_thread / wave.num_heads, 1, 32);
    for (int64_t c = 0; c < chunks; c += step) tasks.push_back({w, -1, c, std::min(step, chunks - c)});
    wave.ranges_left = static_cast<int>(ceil_div(chunks, step));
    wave.heads_left = wave.num_heads;
    if (w > 0) add_selections(w - 1);
  }
  add_selections(static_cast<int64_t>(waves.size()) - 1);
  const int64_t num_slots = std::min<int64_t>(static_cast<int64_t>(waves.size()), 3);
  int most_heads = 0;
  for (const Wave& wave : waves) most_heads = std::max(most_heads, wave.num_heads);
  for (int64_t i = 0; i < num_slots; ++i) {
    const auto heads = static_cast<size_t>(most_heads);
    const size_t scores = heads * static_cast<size_t>(group * longest);
    const size_t maxima = heads * static_cast<size_t>(group * ceil_div(longest, kChunkTokens));
    Slot& slot = slots_[i];
    grow(slot.weights, scores);
    grow(slot.importance, heads * static_cast<size_t>(longest));
    grow(slot.chunk_max, maxima);
    grow(slot.chunk_sum, maxima);
  }
  const auto wait_for = [](const std::atomic<int>& left) {
    while (left.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  };
  setup_.pool.parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t t, int worker) {
    const Task& task = tasks[static_cast<size_t>(t)];
    Wave& wave = waves[static_cast<size_t>(task.wave)];
    Slot& slot = slots_[task.wave % 3];
    if (task.head_of_wave < 0) {
      if (task.wave >= 3) wait_for(waves[static_cast<size_t>(task.wave - 3)].heads_left);
      const TraceSpan span = pass_.task_span(TraceKind::score, wave.row, wave.heads[0] * per_head, worker);
      scan_chunks(wave, task.first_chunk, task.num_chunks, slot, worker);
      wave.ranges_left.fetch_sub(1, std::memory_order_acq_rel);
    } else {
      wait_for(wave.ranges_left);
      const int first_unit = wave.heads[task.head_of_wave] * per_head;
      const TraceSpan span = pass_.task_span(TraceKind::choose, wave.row, first_unit, worker);
      finish(wave, task.head_of_wave, slot, worker);
      wave.heads_left.fetch_sub(1, std::memory_order_acq_rel);
    }
  });
}

// All units of a row that retrieve know their importance: they publish what is best for their sum, taken in the order
// of units so that it does not depend on threads.
void KeyScan::select_for_all(int r, int worker) {
  int first = -1;
  for (int u = 0; u < setup_.units(); ++u) {
    if (pass_.unit(r, u).role != Role::retrieve) continue;
    if (first < 0) {
      first = u;
    } else {
      setup_.kernels.scale_add(pass_.unit(r, u).importance.data(), 1.0f, pass_.row(r).kv_len, true,
                               pass_.unit(r, first).importance.data());
    }
  }
  selector_.select(r, first, pass_.unit(r, first).importance.data(), worker);
  for (int u = first + 1; u < setup_.units(); ++u) {
    if (pass_.unit(r, u).role == Role::retrieve) pass_.published_of(r, u).set(pass_.published_of(r, first).own);
  }
}

void KeyScan::scan_chunks(const Wave& wave, int64_t first_chunk, int64_t num_chunks, Slot& slot, int worker) {
  WorkerProfile* profile = setup_.profile_of(worker);
  const PhaseTimer timer(profile, Phase::score);
  const int group = setup_.shape.group_size();
  const int64_t chunks = ceil_div(wave.tokens, kChunkTokens);
  for (int64_t c = first_chunk; c < first_chunk + num_chunks; ++c) {
    const int64_t first = c * kChunkTokens;
    for (int h = 0; h < wave.num_heads; ++h) {
      const int kv_head = wave.heads[h];
      const int64_t n = std::min(kChunkTokens, pass_.row(wave.row).num_tokens(kv_head) - first);
      if (n <= 0) continue;
      if (profile != nullptr) {
        profile->bytes += n * setup_.shape.row_bytes();
        profile->scored_tokens += n * setup_.units_per_head();
      }
      float* weights = slot.weights.data() + h * group * wave.tokens + first;
      pass_.score(wave.row, kv_head * group, group, {nullptr, first, n}, weights, wave.tokens);
      for (int g = 0; g < group; ++g) {
        const int64_t at = (h * group + g) * chunks + c;
        slot.chunk_max[static_cast<size_t>(at)] =
            setup_.kernels.exp_shifted(weights + g * wave.tokens, n, &slot.chunk_sum[static_cast<size_t>(at)]);
      }
    }
  }
}

void KeyScan::finish(const Wave& wave, int head_of_wave, Slot& slot, int worker) {
  const PhaseTimer timer(setup_.profile_of(worker), Phase::select);
  const int64_t num_tokens = pass_.row(wave.row).num_tokens(wave.heads[head_of_wave]);
  const int64_t chunks = ceil_div(num_tokens, kChunkTokens);
  const int64_t chunk_stride = ceil_div(wave.tokens, kChunkTokens);
  const int group = setup_.shape.group_size();
  const int per_unit = setup_.unit_group();
  const int first_qo_head = wave.heads[head_of_wave] * group;
  const float* all_weights = slot.weights.data() + head_of_wave * group * wave.tokens;
  const float* all_max = slot.chunk_max.data() + head_of_wave * group * chunk_stride;
  float* all_factors = slot.chunk_sum.data() + head_of_wave * group * chunk_stride;  // sums become exp(chunk_max - lse)
  float* importance = slot.importance.data() + head_of_wave * wave.tokens;
  float lse[kMaxGroupSize];
  for (int g = 0; g < group; ++g) {
    const float* chunk_max = all_max + g * chunk_stride;
    float* factor = all_factors + g * chunk_stride;
    const float maximum = *std::max_element(chunk_max, chunk_max + chunks);
    double sum = 0.0;
    for (int64_t c = 0; c < chunks; ++c) {
      sum += static_cast<double>(factor[c] * std::exp(chunk_max[c] - maximum));
    }
    lse[g] = maximum + static_cast<float>(std::log(sum));
    if (!std::isfinite(lse[g])) return pass_.report_non_finite(wave.row, first_qo_head / per_unit);
    for (int64_t c = 0; c < chunks; ++c) factor[c] = std::exp(chunk_max[c] - lse[g]);
  }
  for (int g0 = 0; g0 < group; g0 += per_unit) {
    const int unit = (first_qo_head + g0) / per_unit;
    Unit& state = pass_.unit(wave.row, unit);
    if (!state.scanned) continue;
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t first = c * kChunkTokens;
      const int64_t n = std::min(kChunkTokens, num_tokens - first);
      for (int g = g0; g < g0 + per_unit; ++g) {
        setup_.kernels.scale_add(all_weights + g * wave.tokens + first, all_factors[g * chunk_stride + c], n, g > g0,
                                 importance + first);
      }
    }
    if (setup_.policy.shares_selection && state.role == Role::retrieve) {
      state.importance.resize(static_cast<size_t>(num_tokens));
      std::copy_n(importance, num_tokens, state.importance.data());
      if (pass_.unit(wave.row, 0).scores_left.fetch_sub(1, std::memory_order_acq_rel) == 1)
        select_for_all(wave.row, worker);
    } else {
      selector_.select(wave.row, unit, importance, worker);
    }
    if (setup_.failure.is_set()) return;
    state.weights.resize(static_cast<size_t>(per_unit * state.n));
    for (int g = 0; g < per_unit; ++g) {
      state.lse_all[g] = lse[g0 + g];
      const float* weights = all_weights + (g0 + g) * wave.tokens;
      const float* factor = all_factors + (g0 + g) * chunk_stride;
      float* kept = state.weights.data() + g * state.n;
      if (state.indices == nullptr) {  // attends to all
        for (int64_t c = 0; c < chunks; ++c) {
          const int64_t first = c * kChunkTokens;
          setup_.kernels.scale_add(weights + first, factor[c], std::min(kChunkTokens, num_tokens - first), false,
                                   kept + first);
        }
        continue;
      }
      for (int64_t i = 0; i < state.n; ++i) {
        const int32_t t = state.indices[i];
        kept[i] = weights[t] * factor[t / kChunkTokens];
      }
    }
  }
}

}  // namespace offload
