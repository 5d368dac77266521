// The two inner loops of attention over a tile of rows, for any dtype that f_load_as reads:
// score (query · key rows) and accumulate (weights · value rows). Included inside a per-ISA namespace.
// A Bf16 specialisation with dot-product instructions replaces them in tile_ops_bf16-inl.h.

#include "kernels/vector_math-inl.h"

inline constexpr int kSubTile = 32;             // rows of values accumulated at once
inline constexpr int kHeadBlock = 4;            // query heads computed together; each row is loaded once for the block
inline constexpr int64_t kProjectAhead = 4096;  // bytes a weight matrix is prefetched ahead
inline constexpr int kValueHeads = sizeof kValueTiles / sizeof kValueTiles[0];  // accumulated at a time

// The rows of a tile: named one by one, or one after the other in memory.
template <class T>
struct GatheredRows {
  const T* const* pointers;
  const T* operator[](int r) const { return pointers[r]; }
  GatheredRows from(int r) const { return {pointers + r}; }
};

template <class T>
struct ContiguousRows {
  const T* first;
  int64_t width;
  const T* operator[](int r) const { return first + r * width; }
  ContiguousRows from(int r) const { return {first + r * width, width}; }
};

// What to prefetch while row r is worked on: a gathered row, or what follows in memory where the CPU's own prefetchers
// need help with a stream (see stream_ahead_bytes).
template <class T>
struct Prefetch {
  const T* const* rows = nullptr;
  bool streams = false;

  static Prefetch stream() { return {nullptr, stream_ahead_bytes != 0}; }
  Prefetch from(int r) const { return {rows != nullptr ? rows + r : nullptr, streams}; }
  [[gnu::always_inline]] void row(int r, int64_t row_bytes) const {
    if (rows != nullptr) prefetch_gathered(rows[r], row_bytes);
  }
  // The same of columns of so many bytes, where they begin a cache line: a second prefetch of one costs as much again.
  [[gnu::always_inline]] void columns(int r, int64_t first, int64_t num_bytes) const {
    if (rows != nullptr && first * sizeof(T) % 64 == 0) prefetch_gathered(rows[r] + first, num_bytes);
  }
  [[gnu::always_inline]] void next_in_stream(const T* next, int64_t num_bytes) const {
    if (!streams || (num_bytes < 64 && reinterpret_cast<uintptr_t>(next) % 64 != 0)) return;
    for (int64_t i = 0; i < num_bytes; i += 64) prefetch_l2(reinterpret_cast<const char*>(next) + i);
  }
};

// How columns of a row become floats: kVectors vectors at a time, each of which holds every kVectors-th column. An ISA
// may have a faster way for a dtype.
template <class T>
struct Columns {
  static constexpr int kVectors = 1;
  static void load(const T* p, F* vectors) { vectors[0] = f_load_as(p); }
};

// What a call of score() or attend() holds while it runs.
struct NoSession {
  NoSession() {}
};

template <class T>
struct TileOps {
  using Session = NoSession;
  // What score() and project() multiply with: the inputs as they are.
  using Query = float;
  static constexpr int kVectors = Columns<T>::kVectors;
  static constexpr int kStep = kVectors * W;
  static constexpr int64_t block_stride(int64_t head_dim) { return kHeadBlock * head_dim; }  // of a packed head block
  static void pack_heads(const float* query, int group_size, int64_t head_dim, Query* packed) {
    for (int64_t i = 0; i < group_size * head_dim; i += kStep) {
      for (int j = 0; j < kStep; ++j) packed[i + lane_of(j)] = query[i + j];
    }
  }
  static void pack_input(const float* x, int64_t n, Query* packed) {
    for (int64_t i = 0; i < n; ++i) packed[i] = x[i];
  }

  // out[g * out_stride + r] = scale * <query[g], rows[r]>
  template <int G, class Rows>
  static void score(const Query* query, int64_t head_dim, const Rows& rows, int num_rows, const Prefetch<T>& ahead,
                    float scale, float* out, int64_t out_stride) {
    if (head_dim == 64) return score_all<G, 64>(query, head_dim, rows, num_rows, ahead, scale, out, out_stride);
    if (head_dim == 128) return score_all<G, 128>(query, head_dim, rows, num_rows, ahead, scale, out, out_stride);
    score_all<G, 0>(query, head_dim, rows, num_rows, ahead, scale, out, out_stride);
  }

  // The same for R adjacent rows of a weight matrix, long and read once: rows are walked one after the other, so that
  // memory sees one sequential stream (four interleaved ones halve its bandwidth when rows are short).
  template <int G, int R>
  static void project(const Query* x, int64_t width, const T* rows, float* out, int64_t out_stride) {
    constexpr int U = G == 1 ? 4 : G == 2 ? 2 : 1;  // independent sums, against the latency of the multiply-add
    constexpr int kLine = 64 / sizeof(T);           // a second prefetch of a cache line costs as much as the first
    F sums[G * R];
    const int64_t whole = width / (U * W) * (U * W);
    for (int r = 0; r < R; ++r) {
      const T* row = rows + r * width;
      F part[G * U];
      for (int i = 0; i < G * U; ++i) part[i] = f_zero();
      for (int64_t d = 0; d < whole; d += U * W) {
        for (int u = 0; u < U; ++u) {
          if (u * W % kLine == 0 && (U * W >= kLine || d % kLine == 0)) {
            prefetch_l2(row + d + u * W + kProjectAhead / static_cast<int64_t>(sizeof(T)));
          }
          const F w = f_load_as(row + d + u * W);
          for (int g = 0; g < G; ++g) part[g * U + u] = f_fma(f_load(x + g * width + d + u * W), w, part[g * U + u]);
        }
      }
      for (int g = 0; g < G; ++g) {
        for (int u = 1; u < U; ++u) part[g * U] = f_add(part[g * U], part[g * U + u]);
        sums[g * R + r] = part[g * U];
      }
    }
    f_store_sums<G, R>(sums, 1.0f, out, out_stride);
    for (int64_t d = whole; d < width; ++d) {
      for (int g = 0; g < G; ++g) {
        for (int r = 0; r < R; ++r) out[g * out_stride + r] += x[g * width + d] * to_float(rows[r * width + d]);
      }
    }
  }

  // acc[g * acc_stride + d] += Σ_r weights[g * weight_stride + r] * rows[r][d]
  template <int G, class Rows>
  static void accumulate(const float* weights, int64_t weight_stride, const Rows& rows, int num_rows,
                         const Prefetch<T>& ahead, int64_t head_dim, float* acc, int64_t acc_stride) {
    constexpr int kHeads = G < kValueHeads ? G : kValueHeads;
    constexpr int V = kValueTiles[kHeads - 1];
    int64_t d = 0;
    for (; d + V * W <= head_dim; d += V * W) {
      accumulate_block<kHeads, V>(weights, weight_stride, rows, num_rows, ahead, d, head_dim, acc, acc_stride);
    }
    for (; d < head_dim; d += kStep) {
      accumulate_block<kHeads, kVectors>(weights, weight_stride, rows, num_rows, ahead, d, head_dim, acc, acc_stride);
    }
    if constexpr (G > kHeads) {
      accumulate<G - kHeads>(weights + kHeads * weight_stride, weight_stride, rows, num_rows, Prefetch<T>(), head_dim,
                             acc + kHeads * acc_stride, acc_stride);
    }
  }

  // accumulate() keeps acc in the order of Columns; this restores [group, head_dim].
  static void finish(float* acc, int group_size, int64_t head_dim) {
    if constexpr (kVectors > 1) {
      for (int64_t i = 0; i < group_size * head_dim; i += kStep) {
        float ordered[kStep];
        for (int j = 0; j < kStep; ++j) ordered[j] = acc[i + lane_of(j)];
        for (int j = 0; j < kStep; ++j) acc[i + j] = ordered[j];
      }
    }
  }

 private:
  // Where Columns put the j-th of kStep columns.
  static constexpr int lane_of(int j) { return j % kVectors * W + j / kVectors; }

  // D: head_dim, where the loop over it is to be unrolled, or 0.
  template <int G, int D, class Rows>
  static void score_all(const Query* query, int64_t head_dim, const Rows& rows, int num_rows, const Prefetch<T>& ahead,
                        float scale, float* out, int64_t out_stride) {
    if (D > 0) head_dim = D;
    int r = 0;
    for (; r + kRowTile <= num_rows; r += kRowTile) {
      score_rows<G, kRowTile, D>(query, head_dim, rows.from(r), ahead.from(r), scale, out + r, out_stride);
    }
    for (; r < num_rows; ++r)
      score_rows<G, 1, D>(query, head_dim, rows.from(r), ahead.from(r), scale, out + r, out_stride);
  }

  template <int G, int R, int D, class Rows>
  static void score_rows(const Query* query, int64_t head_dim, const Rows& rows, const Prefetch<T>& ahead, float scale,
                         float* out, int64_t out_stride) {
    if (D > 0) head_dim = D;
    F sums[R * G];
    for (int r = 0; r < R; ++r) {
      ahead.row(r, head_dim * static_cast<int64_t>(sizeof(T)));
      ahead.next_in_stream(rows[r] + stream_ahead_bytes / static_cast<int64_t>(sizeof(T)),
                           head_dim * static_cast<int64_t>(sizeof(T)));
      F row[G];
      for (int g = 0; g < G; ++g) row[g] = f_zero();
      for (int64_t d = 0; d < head_dim; d += kStep) {
        F key[kVectors];
        Columns<T>::load(rows[r] + d, key);
        for (int v = 0; v < kVectors; ++v) {
          for (int g = 0; g < G; ++g) row[g] = f_fma(f_load(query + g * head_dim + d + v * W), key[v], row[g]);
        }
      }
      for (int g = 0; g < G; ++g) sums[g * R + r] = row[g];
    }
    f_store_sums<G, R>(sums, scale, out, out_stride);
  }

  template <int G, int V, class Rows>
  static void accumulate_block(const float* weights, int64_t weight_stride, const Rows& rows, int num_rows,
                               const Prefetch<T>& ahead, int64_t d, int64_t head_dim, float* acc, int64_t acc_stride) {
    F sums[G * V];
    for (int g = 0; g < G; ++g) {
      for (int v = 0; v < V; ++v) sums[g * V + v] = f_load(acc + g * acc_stride + d + v * W);
    }
    constexpr int64_t kBytes = V * W * sizeof(T);
    for (int r = 0; r < num_rows; ++r) {
      ahead.columns(r, d, kBytes);
      // Blocks read their columns of all rows, but memory must see one sequential stream: of the rows after these.
      ahead.next_in_stream(rows[0] + num_rows * head_dim + d * num_rows + r * V * W, kBytes);
      F value[V];
      for (int v = 0; v < V; v += kVectors) Columns<T>::load(rows[r] + d + v * W, value + v);
      for (int g = 0; g < G; ++g) {
        const F w = f_set1(weights[g * weight_stride + r]);
        for (int v = 0; v < V; ++v) sums[g * V + v] = f_fma(w, value[v], sums[g * V + v]);
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int v = 0; v < V; ++v) f_store(acc + g * acc_stride + d + v * W, sums[g * V + v]);
    }
  }
};
