#include "coprocessor/hot_rows.h"

#include <algorithm>
#include <numeric>

namespace offload {
namespace {

constexpr uint32_t kAges = 255;  // steps that are told apart

}  // namespace

void HotRows::forget(int64_t slot) {
  const size_t first = index_of(slot, 0, 0);
  const size_t last = index_of(slot + 1, 0, 0);
  for (size_t i = first; i < last; ++i) sets_[i] = {};
}

int64_t HotRows::num_hot(int64_t slot, int64_t layer_idx, int kv_head) const {
  return static_cast<int64_t>(sets_[index_of(slot, layer_idx, kv_head)].tokens.size());
}

std::vector<Fetch> HotRows::hot(int64_t slot, int64_t layer_idx, int kv_head) const {
  const Set& set = sets_[index_of(slot, layer_idx, kv_head)];
  std::vector<Fetch> rows;
  for (size_t i = 0; i < set.tokens.size(); ++i) rows.push_back({set.tokens[i], set.places[i]});
  return rows;
}

// Takes the `count` tokens out that were chosen longest ago, of those that are not chosen now; of those chosen at one
// time, or more than kAges steps ago, the first. No branch depends on a token: which ones go nobody could predict.
void HotRows::evict(Set& set, int64_t count, std::vector<int32_t>& free_places) {
  uint32_t counts[kAges + 1] = {};
  const auto age_of = [&](size_t i) { return std::min<uint32_t>(set.now - set.chosen_at[i], kAges); };
  for (size_t i = 0; i < set.tokens.size(); ++i) ++counts[age_of(i)];
  uint32_t oldest = kAges;  // of the ages that stay, at least in part
  auto left = static_cast<uint32_t>(count);
  for (; oldest > 0 && counts[oldest] <= left; --oldest) left -= counts[oldest];
  if (oldest == 0) left = 0;  // chosen now
  size_t kept = 0;
  size_t gone = 0;
  free_places.resize(set.tokens.size());
  for (size_t i = 0; i < set.tokens.size(); ++i) {
    const uint32_t age = age_of(i);
    const bool is_last = age == oldest && left > 0;
    const bool goes = age > oldest || is_last;
    left -= is_last;
    free_places[gone] = set.places[i];
    set.tokens[kept] = set.tokens[i];
    set.places[kept] = set.places[i];
    set.chosen_at[kept] = set.chosen_at[i];
    gone += goes;
    kept += !goes;
  }
  free_places.resize(gone);
  set.resize(kept);
}

int64_t HotRows::choose(int64_t slot, int64_t layer_idx, int kv_head, const int32_t* tokens, int64_t n,
                        Fetch* fetches) {
  static thread_local std::vector<int32_t> missing;
  static thread_local std::vector<int32_t> places;
  Set& set = sets_[index_of(slot, layer_idx, kv_head)];
  places.clear();
  ++set.now;
  n = std::min(n, hot_tokens_);
  missing.resize(static_cast<size_t>(n));
  const size_t num_hot = set.tokens.size();
  const auto num_chosen = static_cast<size_t>(n);
  size_t count = 0;
  size_t at = 0;
  size_t next = 0;
  while (at < num_hot && next < num_chosen) {  // likewise without branches
    const int32_t hot = set.tokens[at];
    const int32_t token = tokens[next];
    set.chosen_at[at] = hot == token ? set.now : set.chosen_at[at];
    missing[count] = token;
    count += hot > token;
    at += hot <= token;
    next += token <= hot;
  }
  while (next < num_chosen) missing[count++] = tokens[next++];
  missing.resize(count);
  hits_.fetch_add(n - static_cast<int64_t>(count), std::memory_order_relaxed);
  misses_.fetch_add(static_cast<int64_t>(count), std::memory_order_relaxed);
  if (count == 0) return 0;

  const auto most = static_cast<size_t>(hot_tokens_);
  if (num_hot + count > most) evict(set, static_cast<int64_t>(num_hot + count - most), places);
  const size_t num_new = count - places.size();
  places.resize(count);
  std::iota(places.end() - static_cast<std::ptrdiff_t>(num_new), places.end(), static_cast<int32_t>(num_hot));

  // Both ascend: merged from their ends, in place.
  size_t old = set.tokens.size();
  size_t fresh = count;
  set.resize(old + fresh);
  for (size_t to = old + fresh; fresh > 0;) {
    --to;
    if (old > 0 && set.tokens[old - 1] > missing[fresh - 1]) {
      --old;
      set.tokens[to] = set.tokens[old];
      set.places[to] = set.places[old];
      set.chosen_at[to] = set.chosen_at[old];
      continue;
    }
    --fresh;
    set.tokens[to] = missing[fresh];
    set.places[to] = places[fresh];
    set.chosen_at[to] = set.now;
    fetches[fresh] = {missing[fresh], places[fresh]};
  }
  return static_cast<int64_t>(count);
}

}  // namespace offload
