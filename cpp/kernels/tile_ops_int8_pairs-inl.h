// Values of int8 rows as whole numbers: two rows interleave lane by lane, and so do their weights, times the rows'
// scales, rounded to 15 bits of the largest of a tile and head. Included inside a per-ISA namespace after
// tile_ops_int8-inl.h.

struct Int8PairOps : Int8Ops {
  template <int G, class Rows>
  static void accumulate(const float* weights, int64_t weight_stride, const Rows& rows, int num_rows,
                         const Prefetch<Int8>& ahead, int64_t head_dim, float* acc, int64_t acc_stride) {
    if (head_dim % kRowGroup != 0) {
      return Int8Ops::accumulate<G>(weights, weight_stride, rows, num_rows, ahead, head_dim, acc, acc_stride);
    }
    for (int64_t first = 0; first < head_dim; first += kRowGroup) {
      accumulate_group<G>(weights, weight_stride, rows, num_rows, ahead, first, head_dim, acc + first, acc_stride);
    }
  }

  // accumulate() leaves each 2 * W columns of whole groups as (low halves, high halves) of the 128-bit lanes.
  static void finish(float* acc, int group_size, int64_t head_dim) {
    if (head_dim % kRowGroup != 0) return;
    for (int64_t i = 0; i < group_size * head_dim; i += 2 * W) {
      F low = f_load(acc + i), high = f_load(acc + i + W);
      f_unpair(&low, &high);
      f_store(acc + i, low);
      f_store(acc + i + W, high);
    }
  }

 protected:
  template <int G, class Rows>
  static void accumulate_group(const float* weights, int64_t weight_stride, const Rows& rows, int num_rows,
                               const Prefetch<Int8>& ahead, int64_t first, int64_t head_dim, float* acc,
                               int64_t acc_stride) {
    alignas(64) Half scales[kSubTile] = {};
    const int64_t bytes = row_bytes(head_dim, DType::i8);
    for (int r = 0; r < num_rows; ++r) {
      scales[r] = scales_of(rows[r], head_dim)[first / kRowGroup];
      if (first == 0) ahead.row(r, bytes);
      ahead.next_in_stream(rows[0] + num_rows * bytes + first * num_rows + r * kRowGroup, kRowGroup);
    }
    alignas(64) int16_t whole[G][kSubTile];
    float units[G];
    for (int g = 0; g < G; ++g) {
      F scaled[kSubTile / W], top = f_zero(), zeros = f_zero();
      for (int i = 0; i < kSubTile / W; ++i) {
        scaled[i] = f_mul(f_load(weights + g * weight_stride + i * W), f_load_as(scales + i * W));
        top = f_max(f_max(scaled[i], f_sub(f_zero(), scaled[i])), top);
        zeros = f_fma(scaled[i], f_zero(), zeros);
      }
      const float largest = f_max_lane(top) + f_sum(zeros);  // NaN where a weight or a scale is no number
      units[g] = largest / 32767.0f;
      const F inverse = f_set1(largest > kSmallestInput ? 32767.0f / largest : 0.0f);
      for (int i = 0; i < kSubTile / W; ++i) i_store_short(whole[g] + i * W, f_mul(scaled[i], inverse));
    }
    constexpr int kLoads = static_cast<int>(kRowGroup) / (2 * W);  // of a group
    constexpr int kMost = (W == 8 ? 12 : 24) / (2 * G);            // whose sums the registers hold
    constexpr int V = kMost >= kLoads ? kLoads : kMost >= 2 ? 2 : 1;
    for (int begin = 0; begin < kLoads; begin += V) {
      I sums[G * V * 2];
      for (int i = 0; i < G * V * 2; ++i) sums[i] = i_zero();
      for (int r = 0; r < num_rows; r += 2) {
        const int8_t* even = &rows[r][first].code;
        const int8_t* odd = &rows[r + 1 < num_rows ? r + 1 : r][first].code;  // at weight zero
        for (int v = 0; v < V; ++v) {
          const I a = i_load_pairs(even + (begin + v) * 2 * W), b = i_load_pairs(odd + (begin + v) * 2 * W);
          const I low = i_pair_low(a, b), high = i_pair_high(a, b);
          for (int g = 0; g < G; ++g) {
            int32_t pair;
            std::memcpy(&pair, whole[g] + r, sizeof pair);
            sums[(g * V + v) * 2] = i_add_products(sums[(g * V + v) * 2], low, pair);
            sums[(g * V + v) * 2 + 1] = i_add_products(sums[(g * V + v) * 2 + 1], high, pair);
          }
        }
      }
      for (int g = 0; g < G; ++g) {
        for (int i = 0; i < V * 2; ++i) {
          float* to = acc + g * acc_stride + (begin * 2 + i) * W;
          f_store(to, f_fma(f_from_ints(sums[g * V * 2 + i]), f_set1(units[g]), f_load(to)));
        }
      }
    }
  }
};
