// Products of many rows with a weight matrix, as a prompt has them, and causal attention: for CPUs whose dot products
// of 16-bit numbers, or torch's use of them, are no faster than float32's. Weights, keys and values become float32 once
// per block of rows, transposed where they have to be, and stay in the second-level cache while all rows pass. Included
// inside a per-ISA namespace that has f_transpose, after register_tile-inl.h and elementwise-inl.h.

// [depth, stride] columns of float32 <- num_rows rows of `depth` items; the rest of whole vectors of rows is zero.
inline constexpr int64_t kPackAhead =
    64;  // items of a row: so many rows at once are too many for the CPU's prefetchers

template <class T>
static void pack_columns(const T* rows, int64_t row, int64_t num_rows, int64_t depth, float* packed, int64_t stride) {
  for (int64_t first = 0; first < num_rows; first += W) {
    for (int64_t d = 0; d < depth; d += W) {
      F block[W];
      alignas(64) T padded[W];
      for (int i = 0; i < W; ++i) {
        block[i] = f_zero();
        if (first + i >= num_rows) continue;
        const T* from = rows + (first + i) * row + d;
        prefetch_l1(from + kPackAhead);
        if (d + W > depth) {
          for (int j = 0; j < W; ++j) padded[j] = d + j < depth ? from[j] : T{};
          from = padded;
        }
        block[i] = f_load_as(from);
      }
      f_transpose(block);
      for (int i = 0; i < W && d + i < depth; ++i) f_store(packed + (d + i) * stride + first, block[i]);
    }
  }
}

// Panels of kPanelColumns outputs: [kMultiplyDepth, kPanelColumns] each.
template <class T>
static void multiply(const ProductArgs& args, float* scratch) {
  const auto* x = static_cast<const T*>(args.x);
  const auto* weight = static_cast<const T*>(args.weight);
  const int64_t num_outputs = args.last - args.first, width = args.in_features;
  const int64_t num_panels = (num_outputs + kPanelColumns - 1) / kPanelColumns;
  float* packed = scratch;
  float* sums = packed + kMultiplyDepth * kMultiplyColumns;  // [num_rows, kMultiplyColumns]
  float* x_rows = sums + args.num_rows * kMultiplyColumns;
  alignas(64) float bias[kMultiplyColumns];
  if (args.bias != nullptr) to_float_all<T>(static_cast<const T*>(args.bias) + args.first, num_outputs, bias);
  for (int64_t begin = 0; begin < width; begin += kMultiplyDepth) {
    const int64_t depth = width - begin < kMultiplyDepth ? width - begin : kMultiplyDepth;
    const bool ends = begin + depth == width;
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      const int64_t at = panel * kPanelColumns;
      const int64_t count = num_outputs - at < kPanelColumns ? num_outputs - at : kPanelColumns;
      pack_columns(weight + (args.first + at) * width + begin, width, count, depth, packed + at * kMultiplyDepth,
                   kPanelColumns);
    }
    for (int64_t first = 0; first < args.num_rows; first += kConvertedRows) {
      const int64_t last = first + kConvertedRows < args.num_rows ? first + kConvertedRows : args.num_rows;
      for (int64_t r = last; r < last + kConvertedRows && r < args.num_rows; ++r) {
        for (int64_t d = 0; d < depth; d += 64 / static_cast<int64_t>(sizeof(T)))
          prefetch_l2(x + r * width + begin + d);
      }
      for (int64_t r = first; r < last; ++r) {
        to_float_all<T>(x + r * width + begin, depth, x_rows + (r - first) * kMultiplyDepth);
      }
      for (int64_t panel = 0; panel < num_panels; ++panel) {
        for (int64_t at = first; at < last; at += kProductRows) {
          const int live = static_cast<int>(last - at < kProductRows ? last - at : kProductRows);
          const float* rows[kProductRows];
          for (int r = 0; r < kProductRows; ++r) {  // a short last tile repeats its first row
            rows[r] = x_rows + (at - first + (r < live ? r : 0)) * kMultiplyDepth;
          }
          float* of_tile = sums + at * kMultiplyColumns + panel * kPanelColumns;
          F tile[kProductRows][kProductVectors] = {};
          add_products(rows, packed + panel * kPanelColumns * kMultiplyDepth, kPanelColumns, depth, tile);
          for (int r = 0; r < live; ++r) {
            for (int v = 0; v < kProductVectors; ++v) {
              float* to = of_tile + r * kMultiplyColumns + v * W;
              f_store(to, begin != 0 ? f_add(tile[r][v], f_load(to)) : tile[r][v]);
            }
          }
        }
      }
      for (int64_t r = first; ends && r < last; ++r) {
        float* row = sums + r * kMultiplyColumns;
        for (int64_t i = 0; args.bias != nullptr && i < num_outputs; ++i) row[i] += bias[i];
        const int64_t to = r * args.out_row + args.first;
        if (args.residual != nullptr) {
          add_residual<T>(row, static_cast<const T*>(args.residual) + to, num_outputs, static_cast<T*>(args.out) + to);
        } else {
          from_float_all<T>(row, num_outputs, static_cast<T*>(args.out) + to);
        }
      }
    }
  }
}

// What attend_causal() multiplies with (causal_attention-inl.h): T as float32.
template <class T>
struct FloatProducts : RegisterProducts<FloatProducts<T>, float, float> {
  using Item = T;
  using Weight = float;
  using Packed = float;
  static constexpr int kVectors = kProductVectors;
  static constexpr bool kConverts = true;
  static int64_t packed_items(int64_t num_keys, int64_t head_dim) { return num_keys * head_dim; }

  static void pack_keys(const T* keys, int64_t row, int64_t n, int64_t head_dim, float* packed) {
    for (int64_t first = 0; first < n; first += kPanel) {
      const int64_t count = n - first < kPanel ? n - first : kPanel;
      float* panel = packed + first * head_dim;
      const int64_t whole = (count + W - 1) / W * W;
      pack_columns(keys + first * row, row, count, head_dim, panel, kPanel);
      for (int64_t d = 0; whole < kPanel && d < head_dim; ++d) {
        for (int64_t i = whole; i < kPanel; i += W) f_store(panel + d * kPanel + i, f_zero());
      }
    }
  }
  static void pack_values(const T* values, int64_t row, int64_t n, int64_t head_dim, float* packed) {
    for (int64_t t = 0; t < (n + kPanel - 1) / kPanel * kPanel; ++t) {
      for (int64_t d = 0; d < head_dim; d += W) {
        f_store(packed + t * head_dim + d, t < n ? f_load_as(values + t * row + d) : f_zero());
      }
    }
  }
  static const float* query_row(const T* query, int64_t head_dim, float* converted) {
    to_float_all<T>(query, head_dim, converted);
    return converted;
  }

  static void store_weights(float* to, F low, F high) {
    f_store(to, low);
    f_store(to + W, high);
  }
  template <int V>
  [[gnu::always_inline]] static inline void add(const float* const* rows, const float* columns, int64_t stride,
                                                int64_t depth, F (&sums)[kProductRows][V]) {
    add_products<V>(rows, columns, stride, depth, sums);
  }
};

static inline void add_products_of_floats(KernelTable* table) {
  const int f32 = static_cast<int>(DType::f32), f16 = static_cast<int>(DType::f16),
            bf16 = static_cast<int>(DType::bf16);
  table->multiply[f32] = multiply<float>;
  table->multiply[f16] = multiply<Half>;
  table->multiply[bf16] = multiply<Bf16>;
  for (int64_t& multiple : table->causal_multiple) multiple = kHeadDimMultiple;
  table->attend_causal[f32] = attend_causal<FloatProducts<float>>;
  table->attend_causal[f16] = attend_causal<FloatProducts<Half>>;
  table->attend_causal[bf16] = attend_causal<FloatProducts<Bf16>>;
}
