#include "coprocessor/hot_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace offload {
namespace {

constexpr int kAges = 255;  // steps that are told apart
constexpr uint32_t kBits = 64;
constexpr size_t kClusters = 256;  // that a byte tells apart

// Of a token; `bits` by their address, which no byte that is written may be taken for.
uint64_t test(const uint64_t* bits, int32_t token) {
  const auto t = static_cast<uint32_t>(token);
  return bits[t / kBits] >> (t % kBits) & 1;
}
void flip(uint64_t* bits, int32_t token) {
  const auto t = static_cast<uint32_t>(token);
  bits[t / kBits] ^= uint64_t{1} << (t % kBits);
}

}  // namespace

void HotRows::forget(int64_t slot) {
  const size_t first = index_of(slot, 0, 0);
  const size_t last = index_of(slot + 1, 0, 0);
  for (size_t i = first; i < last; ++i) sets_[i] = {};
  estimates_[static_cast<size_t>(slot)] = 0;
}

void HotRows::estimate(int64_t slot) {
  const size_t last = index_of(slot + 1, 0, 0);
  for (size_t i = index_of(slot, 0, 0); i < last; ++i) sets_[i].in_clusters.clear();
  estimates_[static_cast<size_t>(slot)] = 1;
}

void HotRows::count_clusters(Set& set, const uint8_t* cluster_of) {
  set.in_clusters.assign(kClusters, 0);
  for (const int32_t token : set.tokens) ++set.in_clusters[cluster_of[token]];
}

int64_t HotRows::num_hot(int64_t slot, int64_t layer_idx, int kv_head) const {
  return static_cast<int64_t>(sets_[index_of(slot, layer_idx, kv_head)].tokens.size());
}

std::vector<Fetch> HotRows::hot(int64_t slot, int64_t layer_idx, int kv_head) const {
  const Set& set = sets_[index_of(slot, layer_idx, kv_head)];
  std::vector<Fetch> rows;
  for (size_t i = 0; i < set.tokens.size(); ++i) rows.push_back({set.tokens[i], static_cast<int32_t>(i)});
  std::sort(rows.begin(), rows.end(), [](const Fetch& a, const Fetch& b) { return a.token < b.token; });
  return rows;
}

// Frees `count` places of the tokens that were chosen longest ago, of those that are not chosen now; of those chosen at
// one time, or more than kAges steps ago, the first places.
void HotRows::evict(Set& set, size_t count, std::vector<int32_t>& free_places, const uint8_t* cluster_of) {
  const size_t num_hot = set.tokens.size();
  const uint8_t* const ages = set.ages.data();
  uint32_t counts[4][kAges + 1] = {};  // equal ages follow each other, and one counter would wait for itself
  for (size_t i = 0; i < num_hot; ++i) ++counts[i % 4][ages[i]];
  const auto count_of = [&](int age) { return counts[0][age] + counts[1][age] + counts[2][age] + counts[3][age]; };
  int oldest = kAges;  // of the ages that stay, at least in part
  auto left = static_cast<uint32_t>(count);
  for (; oldest > 0 && count_of(oldest) <= left; --oldest) left -= count_of(oldest);
  if (oldest == 0) left = 0;                        // chosen now
  static thread_local std::vector<uint8_t> may_go;  // whole words, few of whose bytes are set
  may_go.assign((num_hot + 7) / 8 * 8, 0);
  uint8_t* const of_place = may_go.data();
  for (size_t i = 0; i < num_hot; ++i) of_place[i] = ages[i] >= oldest;
  free_places.clear();
  for (size_t first = 0; first < num_hot && free_places.size() < count; first += 8) {
    uint64_t word;
    std::memcpy(&word, of_place + first, sizeof word);
    for (; word != 0; word &= word - 1) {
      const size_t place = first + static_cast<size_t>(std::countr_zero(word)) / 8;
      if (ages[place] == oldest && left-- == 0) {
        left = 0;
        continue;
      }
      free_places.push_back(static_cast<int32_t>(place));
      flip(set.is_hot.data(), set.tokens[place]);
      if (cluster_of != nullptr) --set.in_clusters[cluster_of[set.tokens[place]]];
    }
  }
}

int64_t HotRows::choose(int64_t slot, int64_t layer_idx, int kv_head, const int32_t* tokens, int64_t n, Fetch* fetches,
                        const uint8_t* cluster_of) {
  static thread_local std::vector<int32_t> missing;
  static thread_local std::vector<int32_t> places;
  static thread_local std::vector<uint64_t> chosen;  // a bit per token; none is up between two calls
  Set& set = sets_[index_of(slot, layer_idx, kv_head)];
  if (cluster_of == nullptr) set.in_clusters.clear();
  if (cluster_of != nullptr && set.in_clusters.empty()) count_clusters(set, cluster_of);
  n = std::min(n, hot_tokens_);
  const size_t num_hot = set.tokens.size();
  const size_t num_words = n > 0 ? static_cast<size_t>(tokens[n - 1]) / kBits + 1 : 0;
  if (set.is_hot.size() < num_words) set.is_hot.resize(num_words + num_words / 8);
  if (chosen.size() < set.is_hot.size()) chosen.resize(set.is_hot.size());

  missing.resize(static_cast<size_t>(n) + 1);  // one more is written, and not meant
  size_t count = 0;
  uint64_t* const is_hot = set.is_hot.data();
  uint64_t* const is_chosen = chosen.data();
  for (int64_t i = 0; i < n; ++i) {
    missing[count] = tokens[i];
    count += 1 - test(is_hot, tokens[i]);
    flip(is_chosen, tokens[i]);
  }
  const int32_t* const hot_tokens = set.tokens.data();
  uint8_t* const ages = set.ages.data();
  for (size_t i = 0; i < num_hot; ++i) {
    const auto stays = static_cast<uint8_t>(test(is_chosen, hot_tokens[i]) - 1);  // all bits, or none
    ages[i] = static_cast<uint8_t>(std::min(ages[i] + 1, kAges)) & stays;
  }
  for (int64_t i = 0; i < n; ++i) is_chosen[static_cast<uint32_t>(tokens[i]) / kBits] = 0;
  hits_.fetch_add(n - static_cast<int64_t>(count), std::memory_order_relaxed);
  misses_.fetch_add(static_cast<int64_t>(count), std::memory_order_relaxed);
  if (count == 0) return 0;

  places.clear();
  const auto most = static_cast<size_t>(hot_tokens_);
  if (num_hot + count > most) evict(set, num_hot + count - most, places, cluster_of);
  for (size_t place = num_hot; places.size() < count; ++place) places.push_back(static_cast<int32_t>(place));
  set.tokens.resize(std::max(num_hot, static_cast<size_t>(places.back()) + 1));
  set.ages.resize(set.tokens.size());
  for (size_t i = 0; i < count; ++i) {
    const auto place = static_cast<size_t>(places[i]);
    set.tokens[place] = missing[i];
    set.ages[place] = 0;
    flip(is_hot, missing[i]);
    if (cluster_of != nullptr) ++set.in_clusters[cluster_of[missing[i]]];
    fetches[i] = {missing[i], places[i]};
  }
  return static_cast<int64_t>(count);
}

}  // namespace offload
