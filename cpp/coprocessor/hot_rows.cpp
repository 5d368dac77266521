#include "coprocessor/hot_rows.h"

#include <algorithm>
#include <numeric>

namespace offload {

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

// Takes the `count` tokens out that were chosen longest ago, of those that are not chosen now.
void HotRows::evict(Set& set, int64_t count, std::vector<int32_t>& free_places) {
  static thread_local std::vector<int32_t> order;
  order.clear();
  for (size_t i = 0; i < set.tokens.size(); ++i) {
    if (set.chosen_at[static_cast<size_t>(set.places[i])] != set.now) order.push_back(static_cast<int32_t>(i));
  }
  const auto chosen_at = [&](int32_t i) {
    return set.chosen_at[static_cast<size_t>(set.places[static_cast<size_t>(i)])];
  };
  const auto end = order.begin() + std::min<std::ptrdiff_t>(count, static_cast<std::ptrdiff_t>(order.size()));
  // The older token first where both were chosen at a time: what is chosen does not depend on the library's sort.
  std::nth_element(order.begin(), end, order.end(), [&](int32_t a, int32_t b) {
    return chosen_at(a) != chosen_at(b) ? chosen_at(a) < chosen_at(b) : a < b;
  });
  std::sort(order.begin(), end);
  auto victim = order.begin();
  size_t kept = 0;
  for (size_t i = 0; i < set.tokens.size(); ++i) {
    if (victim != end && static_cast<size_t>(*victim) == i) {
      free_places.push_back(set.places[i]);
      ++victim;
      continue;
    }
    set.tokens[kept] = set.tokens[i];
    set.places[kept++] = set.places[i];
  }
  set.tokens.resize(kept);
  set.places.resize(kept);
}

int64_t HotRows::choose(int64_t slot, int64_t layer_idx, int kv_head, const int32_t* tokens, int64_t n,
                        Fetch* fetches) {
  static thread_local std::vector<int32_t> missing;
  static thread_local std::vector<int32_t> places;
  Set& set = sets_[index_of(slot, layer_idx, kv_head)];
  missing.clear();
  places.clear();
  ++set.now;
  n = std::min(n, hot_tokens_);
  size_t at = 0;
  for (int64_t i = 0; i < n; ++i) {
    while (at < set.tokens.size() && set.tokens[at] < tokens[i]) ++at;
    if (at < set.tokens.size() && set.tokens[at] == tokens[i]) {
      set.chosen_at[static_cast<size_t>(set.places[at])] = set.now;
    } else {
      missing.push_back(tokens[i]);
    }
  }
  const auto count = static_cast<int64_t>(missing.size());
  hits_.fetch_add(n - count, std::memory_order_relaxed);
  misses_.fetch_add(count, std::memory_order_relaxed);
  if (count == 0) return 0;

  const auto num_hot = static_cast<int64_t>(set.tokens.size());
  if (num_hot + count > hot_tokens_) evict(set, num_hot + count - hot_tokens_, places);
  const auto num_new = static_cast<size_t>(count) - places.size();
  const size_t filled = set.chosen_at.size();
  places.resize(static_cast<size_t>(count));
  std::iota(places.end() - static_cast<std::ptrdiff_t>(num_new), places.end(), static_cast<int32_t>(filled));
  set.chosen_at.resize(filled + num_new);

  // Both ascend: merged from their ends, in place.
  size_t old = set.tokens.size();
  size_t fresh = missing.size();
  set.tokens.resize(old + fresh);
  set.places.resize(old + fresh);
  for (size_t to = old + fresh; fresh > 0;) {
    --to;
    if (old > 0 && set.tokens[old - 1] > missing[fresh - 1]) {
      set.tokens[to] = set.tokens[--old];
      set.places[to] = set.places[old];
      continue;
    }
    --fresh;
    set.tokens[to] = missing[fresh];
    set.places[to] = places[fresh];
    set.chosen_at[static_cast<size_t>(places[fresh])] = set.now;
    fetches[fresh] = {missing[fresh], places[fresh]};
  }
  return count;
}

}  // namespace offload
