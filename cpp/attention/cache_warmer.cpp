#include "attention/cache_warmer.h"

#include <algorithm>
#include <atomic>

#include "attention/lane_plan.h"

namespace offload {
namespace {

constexpr int64_t kBytesPerWorker = int64_t{1} << 20;  // half of a core's L2 where it is 2 MiB
constexpr int64_t kRowsPerLook = 8;                    // at `stop`: about a microsecond

constexpr int64_t kRowsAhead = 16;

// Prefetched, and then loaded: loads alone take twice as long, and of prefetches that come so fast some are dropped. On
// a Zen 5, attention to 128 scattered tokens takes 56 to 114 ns a token cold, 18 to 84 after prefetches, 16 after loads
// and 16 to 20 after both, 15 to 17 again; reading ahead takes 24 to 27, 45 to 107 and 28 to 40 ns a token.
[[gnu::always_inline]] inline void prefetch_row(const void* row, int64_t row_bytes) {
  for (int64_t i = 0; i < row_bytes; i += 64) prefetch_l2(static_cast<const char*>(row) + i);
}
[[gnu::always_inline]] inline void load_row(const void* row, int64_t row_bytes) {
  for (int64_t i = 0; i < row_bytes; i += 64) static_cast<void>(static_cast<const volatile char*>(row)[i]);
}

// One worker's reading, until it has read enough or somebody else needs it.
class Reader {
 public:
  Reader(int32_t* stop, int64_t kv_len) : stop_(stop), kv_len_(kv_len) {}

  // Tokens are hints: of another sequence, cut off since, or being written by a GPU.
  void read(const RowSource& source, const int32_t* tokens, int64_t n) {
    for (int64_t i = 0; i < n + kRowsAhead; ++i) {
      if (i % kRowsPerLook == 0 && is_over()) return;
      if (i < n) prefetch_row(row_of(source, tokens[i]), source.row_bytes);
      if (i < kRowsAhead) continue;
      load_row(row_of(source, tokens[i - kRowsAhead]), source.row_bytes);
      bytes_ += source.row_bytes;
    }
  }
  bool is_over() const {
    return bytes_ >= kBytesPerWorker || std::atomic_ref<int32_t>(*stop_).load(std::memory_order_relaxed) != 0;
  }
  void turn_to(int64_t kv_len) { kv_len_ = kv_len; }

 private:
  const void* row_of(const RowSource& source, const int32_t& token) const {
    // Once: the next look might find another.
    const int32_t t = std::atomic_ref<int32_t>(const_cast<int32_t&>(token)).load(std::memory_order_relaxed);
    return source.row(t >= 0 && t < kv_len_ ? t : 0);
  }

  int32_t* stop_;
  int64_t kv_len_;
  int64_t bytes_ = 0;
};

}  // namespace

void CacheWarmer::remember() {
  if (pass_.sparse_rows.empty() || !setup_.policy.any_asks_queries()) return;
  // What reuses is known before: by what was published.
  if (!pass_.any_unit([](const Unit& unit) { return unit.sparse && unit.role != Role::reuse; })) return;
  grow(remembered_, static_cast<size_t>(pass_.layer_idx) + 1);
  std::vector<Remembered>& of_layer = remembered_[static_cast<size_t>(pass_.layer_idx)];
  const size_t first = pass_.index_of(pass_.first_row, 0);
  grow(of_layer, first + pass_.num_units);
  setup_.for_each_unit(pass_.rows.size(), [&](int r, int u, int worker) {
    const TraceSpan span = pass_.task_span(TraceKind::remember, r, u, worker);
    const Unit& unit = pass_.unit(r, u);
    Remembered& remembered = of_layer[first + pass_.index_of(r, u)];
    remembered.scored.clear();
    remembered.attended.clear();
    if (!unit.sparse || unit.answered || unit.indices == nullptr || unit.role == Role::reuse) return;
    remembered.attended.assign(unit.indices + unit.begin, unit.indices + unit.end);
    // Where the weights were known before, keys are not read again.
    remembered.reads_keys = unit.weights.empty();
    if (pass_.member_of(u).propose != nullptr && !remembered.reads_keys) {
      remembered.scored.assign(unit.candidates.considered.begin(), unit.candidates.considered.end());
    }
  });
}

// Of a unit that reuses what it will read is certain, of others it is what it read in the step before.
CacheWarmer::Forecast CacheWarmer::forecast(int64_t layer_idx, const QueryRow& row, int row_of_step, int unit) const {
  Forecast result;
  if (setup_.is_dense(row, setup_.tokens_of(row, unit))) return result;
  const size_t i = pass_.index_of(row_of_step, unit);
  if (setup_.role_of(layer_idx, unit) == Role::reuse) {
    if (i >= pass_.published.size()) return result;
    const Published& published = pass_.published[i];
    const int64_t begin = std::min(setup_.policy.sink_tokens, published.n);
    const int64_t end = std::max(begin, published.n - setup_.policy.recent_tokens);
    result.attended = {published.tokens + begin, static_cast<size_t>(end - begin)};
    result.reads_keys = result.is_certain = true;
    return result;
  }
  if (remembered_.size() <= static_cast<size_t>(layer_idx)) return result;
  const std::vector<Remembered>& of_layer = remembered_[static_cast<size_t>(layer_idx)];
  if (i >= of_layer.size()) return result;
  result.scored = of_layer[i].scored;
  result.attended = of_layer[i].attended;
  result.reads_keys = of_layer[i].reads_keys;
  return result;
}

void CacheWarmer::warm_up(int64_t layer_idx, const std::vector<QueryRow>& rows, int first_row, int32_t* stop,
                          const uint8_t* elsewhere) {
  forecasts_.clear();  // by lane, as LaneJob will have them: workers meet the same units again
  bool any = false;
  for (int r = 0; r < static_cast<int>(rows.size()); ++r) {
    for (int u = 0; u < setup_.units(); ++u) {
      if (elsewhere != nullptr && elsewhere[setup_.kv_head_of(u)] != 0) continue;
      forecasts_.push_back(forecast(layer_idx, rows[static_cast<size_t>(r)], first_row + r, u));
      forecasts_.back().row = r;
      forecasts_.back().kv_head = setup_.kv_head_of(u);
      any = any || !forecasts_.back().attended.empty() || !forecasts_.back().scored.empty();
    }
  }
  if (!any) return;
  const auto num_lanes = static_cast<int64_t>(forecasts_.size());
  const int64_t threads = setup_.pool.num_threads();
  // As LaneJob cuts them, or as workers share lanes.
  const bool known = std::all_of(forecasts_.begin(), forecasts_.end(), [](const Forecast& f) { return f.is_certain; });
  int64_t num_tokens = 0;
  for (const Forecast& f : forecasts_) num_tokens += static_cast<int64_t>(f.attended.size());
  const int64_t splits = known ? even_splits(threads, num_lanes, num_tokens) : 0;
  setup_.begin_job();
  const auto read_share = [&](Reader& reader, int64_t lane, int64_t rank, int64_t sharers) {
    const Forecast& forecast = forecasts_[static_cast<size_t>(lane)];
    const QueryRow& row = rows[static_cast<size_t>(forecast.row)];
    reader.turn_to(row.num_tokens(forecast.kv_head));
    const auto share_of = [&](const RowSource& source, std::span<const int32_t> tokens) {
      const auto n = static_cast<int64_t>(tokens.size());
      const int64_t begin = n * rank / sharers;
      reader.read(source, tokens.data() + begin, n * (rank + 1) / sharers - begin);
    };
    share_of(row.keys(setup_.shape, forecast.kv_head), forecast.scored);
    if (forecast.reads_keys) share_of(row.keys(setup_.shape, forecast.kv_head), forecast.attended);
    share_of(row.values(setup_.shape, forecast.kv_head), forecast.attended);
  };
  setup_.pool.parallel_for_near(threads, [&](int64_t task, int worker) {
    if (task != worker) return;  // another core's cache is of no use
    const TraceSpan span = setup_.task_span(TraceKind::warm, layer_idx, -1, -1, worker);
    Reader reader(stop, 0);
    if (known) {
      const int64_t end = setup_.pool.block_begin(worker + 1, num_lanes * splits);
      for (int64_t i = setup_.pool.block_begin(worker, num_lanes * splits); i < end && !reader.is_over(); ++i) {
        read_share(reader, i / splits, i % splits, splits);
      }
      return;
    }
    const int64_t begin = setup_.pool.block_begin(worker, num_lanes);
    const int64_t end = setup_.pool.block_begin(worker + 1, num_lanes);
    for (int64_t i = begin; i < end && !reader.is_over(); ++i) {
      read_share(reader, i, 0, std::max<int64_t>(1, (i + 1) * threads / num_lanes - i * threads / num_lanes));
    }
    if (begin == end) {  // fewer units than workers: a share of the unit before
      const int64_t i = begin - 1;
      const int64_t first = i * threads / num_lanes;
      read_share(reader, i, worker - first, (i + 1) * threads / num_lanes - first);
    }
  });
}

}  // namespace offload
