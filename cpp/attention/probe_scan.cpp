#include "attention/probe_scan.h"

#include <algorithm>

namespace offload {
namespace {

constexpr int64_t kMinRangeTokens = 1024;  // of one task

}  // namespace

void ProbeScan::draw() {
  const AttentionShape& shape = setup_.shape;
  const int per_head = setup_.units_per_head();
  for (const int r : pass_.sparse_rows) {
    for (int h = 0; h < shape.num_kv_heads; ++h) {
      const Unit* of_head = &pass_.unit(r, h * per_head);
      const auto selects = [](const Unit& unit) { return unit.role == Role::select || unit.role == Role::reuse; };
      if (!std::any_of(of_head, of_head + per_head, selects) || !quality_.draw()) continue;
      pass_.load_queries();
      const QueryRow& row = pass_.row(r);
      const float* query = pass_.queries_of(r, h * shape.group_size());
      Probe probe{pass_.layer_idx, h, row.num_tokens(h), row.keys(shape, h), {}, {}};
      probe.query.assign(query, query + shape.group_size() * shape.head_dim);
      for (const Unit* unit = of_head; unit < of_head + per_head; ++unit) {
        Probe::Attended& attended = probe.units.emplace_back();
        if (unit->answered) {  // from the sinks
          for (int64_t t = 0; t < setup_.policy.sink_tokens; ++t) attended.tokens.push_back(static_cast<int32_t>(t));
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

void ProbeScan::scan(const Probe& probe, int64_t first, int64_t last, PartialMass* masses) const {
  const int group = setup_.shape.group_size();
  const int per_unit = setup_.unit_group();
  float scores[kMaxGroupSize * kScoreTile];
  for (int64_t begin = first; begin < last; begin += kScoreTile) {
    const int64_t n = std::min<int64_t>(kScoreTile, last - begin);
    setup_.score(probe.layer_idx, probe.query.data(), group, probe.keys, {nullptr, begin, n}, scores, kScoreTile);
    for (int g = 0; g < group; ++g) {
      float* weights = scores + g * kScoreTile;
      float sum;
      PartialMass mass{setup_.kernels.exp_shifted(weights, n, &sum)};
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
void ProbeScan::run() {
  if (probes_.empty()) return;
  struct Range {
    const Probe* probe;
    int64_t first;
    int64_t last;
  };
  const auto group = static_cast<size_t>(setup_.shape.group_size());
  int64_t all_tokens = 0;
  for (const Probe& probe : probes_) all_tokens += probe.kv_len;
  const int64_t wanted = std::max(kMinRangeTokens, all_tokens / (setup_.pool.num_threads() * kPiecesPerThread));
  const int64_t tokens = ceil_div(wanted, kScoreTile) * kScoreTile;
  std::vector<Range> ranges;
  for (const Probe& probe : probes_) {
    for (int64_t first = 0; first < probe.kv_len; first += tokens) {
      ranges.push_back({&probe, first, std::min(first + tokens, probe.kv_len)});
    }
  }
  std::vector<PartialMass> masses(ranges.size() * group);
  setup_.pool.parallel_for(static_cast<int64_t>(ranges.size()), [&](int64_t task, int) {
    const Range& range = ranges[static_cast<size_t>(task)];
    scan(*range.probe, range.first, range.last, masses.data() + static_cast<size_t>(task) * group);
  });
  for (size_t i = 0; i < ranges.size();) {
    const Probe& probe = *ranges[i].probe;
    std::vector<PartialMass> whole(group);
    for (; i < ranges.size() && ranges[i].probe == &probe; ++i) {
      for (size_t g = 0; g < group; ++g) whole[g].merge(masses[i * group + g]);
    }
    double mean = 0.0;
    for (const PartialMass& mass : whole) mean += mass.kept / mass.all / static_cast<double>(group);
    quality_.add(probe.layer_idx * setup_.shape.num_kv_heads + probe.kv_head, std::min(mean, 1.0));
  }
  probes_.clear();
}

}  // namespace offload
