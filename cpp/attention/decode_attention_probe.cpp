// Exact attention mass of a random share of what a policy selects for: all keys of a KV head are scored, and what the
// selected ones among them weigh is what the policy kept. Values are not read, outputs do not change.
#include <algorithm>

#include "attention/decode_attention.h"

namespace offload {
namespace {

constexpr int64_t kMinRangeTokens = 1024;  // of one task

}  // namespace

// Candidates are KV heads of rows for which the policy selected here; those that attend to all are exact.
void DecodeAttention::draw_probes(int64_t layer_idx, const std::vector<QueryRow>& rows) {
  const int per_head = units() / shape_.num_kv_heads;
  for (const int r : sparse_rows_) {
    for (int h = 0; h < shape_.num_kv_heads; ++h) {
      const Unit* of_head = &unit_of(r, h * per_head);
      const auto selects = [](const Unit& unit) { return unit.role == Role::select || unit.role == Role::reuse; };
      if (!std::any_of(of_head, of_head + per_head, selects) || !probe_.draw()) continue;
      load_queries(rows);
      const QueryRow& row = rows[static_cast<size_t>(r)];
      const float* query = queries_of(r, h * shape_.group_size());
      Probe probe{layer_idx, h, row.num_tokens(h), row.keys(shape_, h), {}, {}};
      probe.query.assign(query, query + shape_.group_size() * shape_.head_dim);
      for (const Unit* unit = of_head; unit < of_head + per_head; ++unit) {
        Probe::Attended& attended = probe.units.emplace_back();
        if (unit->answered) {  // from the sinks
          for (int64_t t = 0; t < policy_.sink_tokens; ++t) attended.tokens.push_back(static_cast<int32_t>(t));
        } else if (unit->indices == nullptr || !selects(*unit)) {
          attended.all = true;
        } else {
          attended.tokens.assign(unit->indices, unit->indices + unit->n);
        }
      }
      probes_.push_back(std::move(probe));
    }
  }
}

void DecodeAttention::scan_probe(const Probe& probe, int64_t first, int64_t last, int worker, PartialMass* masses) {
  const int group = shape_.group_size();
  const int per_unit = unit_group();
  std::vector<float>& scores = dense_scores_[static_cast<size_t>(worker)];
  grow(scores, static_cast<size_t>(group * kScoreTile));
  for (int64_t begin = first; begin < last; begin += kScoreTile) {
    const int64_t n = std::min<int64_t>(kScoreTile, last - begin);
    kernels_.score[static_cast<int>(shape_.dtype)]({probe.query.data(), group, shape_.head_dim, probe.keys,
                                                    TokenSpan{nullptr, begin, n}, shape_.sm_scale, scores.data(),
                                                    kScoreTile});
    for (int g = 0; g < group; ++g) {
      float* weights = scores.data() + g * kScoreTile;
      float sum;
      PartialMass mass{kernels_.exp_shifted(weights, n, &sum)};
      mass.all = mass.kept = sum;
      const Probe::Attended& attended = probe.units[static_cast<size_t>(g / per_unit)];
      if (!attended.all) {
        mass.kept = 0.0;
        const std::vector<int32_t>& tokens = attended.tokens;
        for (auto t = std::lower_bound(tokens.begin(), tokens.end(), begin); t != tokens.end() && *t < begin + n; ++t) {
          mass.kept += weights[*t - begin];
        }
      }
      masses[g].merge(mass);
    }
  }
}

// Ranges of tokens of all probes, on all threads.
void DecodeAttention::run_probes() {
  if (probes_.empty()) return;
  struct Range {
    const Probe* probe;
    int64_t first;
    int64_t last;
  };
  const auto group = static_cast<size_t>(shape_.group_size());
  int64_t all_tokens = 0;
  for (const Probe& probe : probes_) all_tokens += probe.kv_len;
  const int64_t wanted = std::max(kMinRangeTokens, all_tokens / (pool_.num_threads() * kPiecesPerThread));
  const int64_t tokens = ceil_div(wanted, kScoreTile) * kScoreTile;
  std::vector<Range> ranges;
  for (const Probe& probe : probes_) {
    for (int64_t first = 0; first < probe.kv_len; first += tokens) {
      ranges.push_back({&probe, first, std::min(first + tokens, probe.kv_len)});
    }
  }
  std::vector<PartialMass> masses(ranges.size() * group);
  pool_.parallel_for(static_cast<int64_t>(ranges.size()), [&](int64_t task, int worker) {
    const Range& range = ranges[static_cast<size_t>(task)];
    scan_probe(*range.probe, range.first, range.last, worker, masses.data() + static_cast<size_t>(task) * group);
  });
  for (size_t i = 0; i < ranges.size();) {
    const Probe& probe = *ranges[i].probe;
    std::vector<PartialMass> whole(group);
    for (; i < ranges.size() && ranges[i].probe == &probe; ++i) {
      for (size_t g = 0; g < group; ++g) whole[g].merge(masses[i * group + g]);
    }
    double mean = 0.0;
    for (const PartialMass& mass : whole) mean += mass.kept / mass.all / static_cast<double>(group);
    probe_.add(probe.layer_idx * shape_.num_kv_heads + probe.kv_head, std::min(mean, 1.0));
  }
  probes_.clear();
}

}  // namespace offload
