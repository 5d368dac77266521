// Elementwise operators of a decode step, reductions of scores, reads at the speed of memory, and the table that names
// all kernels of one ISA. Values are rounded to the model's dtype exactly where transformers rounds, so that greedy
// tokens agree. Included inside a per-ISA namespace, last.

template <class T>
static void to_float_all(const void* x, int64_t n, float* out) {
  const T* in = static_cast<const T*>(x);
  const int64_t whole = n / W * W;
  for (int64_t i = 0; i < whole; i += W) f_store(out + i, f_load_as(in + i));
  for (int64_t i = whole; i < n; ++i) out[i] = to_float(in[i]);
}

template <class T>
static void from_float_all(const float* x, int64_t n, void* out) {
  T* o = static_cast<T*>(out);
  const int64_t whole = n / W * W;
  for (int64_t i = 0; i < whole; i += W) f_store_as(o + i, f_load(x + i));
  for (int64_t i = whole; i < n; ++i) o[i] = from_float<T>(x[i]);
}

template <class T>
static void rms_norm(const void* x, const void* weight, float eps, int64_t n, float* out) {
  const T* in = static_cast<const T*>(x);
  const T* w = static_cast<const T*>(weight);
  const int64_t whole = n / W * W;
  F sum = f_zero();
  for (int64_t i = 0; i < whole; i += W) {
    const F v = f_load_as(in + i);
    sum = f_fma(v, v, sum);
  }
  float squares = f_sum(sum);
  for (int64_t i = whole; i < n; ++i) squares += to_float(in[i]) * to_float(in[i]);
  const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < whole; i += W) {
    const F normed = f_round_to<T>(f_mul(f_load_as(in + i), f_set1(inverse)));
    f_store(out + i, f_round_to<T>(f_mul(f_load_as(w + i), normed)));
  }
  for (int64_t i = whole; i < n; ++i) {
    const float normed = to_float(from_float<T>(to_float(in[i]) * inverse));
    out[i] = to_float(from_float<T>(to_float(w[i]) * normed));
  }
}

// With kGelu, gelu_tanh(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)), else silu(x) = x * sigmoid(x).
template <class T, bool kGelu>
static void gated_mul(const void* gate, const void* up, int64_t n, float* out) {
  constexpr float kLinear = 1.5957691216f, kCubic = kLinear * 0.044715f;
  const T* a = static_cast<const T*>(gate);
  const T* b = static_cast<const T*>(up);
  const int64_t whole = n / W * W;
  const F one = f_set1(1.0f);
  for (int64_t i = 0; i < whole; i += W) {
    const F x = f_load_as(a + i);
    // exp of a negative argument only: sigmoid(z) = e^min(z,0) / (1 + e^-|z|)
    const F z = kGelu ? f_mul(x, f_fma(f_mul(x, x), f_set1(kCubic), f_set1(kLinear))) : x;
    const F low = f_sub(f_zero(), f_max(f_sub(f_zero(), z), f_zero()));
    const F minus_abs = f_sub(f_zero(), f_max(z, f_sub(f_zero(), z)));
    const F sigmoid = f_div(f_exp(low), f_add(one, f_exp(minus_abs)));
    f_store(out + i, f_round_to<T>(f_mul(f_round_to<T>(f_mul(x, sigmoid)), f_load_as(b + i))));
  }
  for (int64_t i = whole; i < n; ++i) {
    const float x = to_float(a[i]);
    const float z = kGelu ? x * (kLinear + kCubic * x * x) : x;
    out[i] = to_float(from_float<T>(to_float(from_float<T>(x / (1.0f + std::exp(-z)))) * to_float(b[i])));
  }
}

// Padded to whole vectors; a NaN stays one, which f_max would drop.
template <class T>
static void clamped_glu(const void* gate, const void* up, float alpha, float limit, int64_t n, float* out) {
  const T* a = static_cast<const T*>(gate);
  const T* b = static_cast<const T*>(up);
  const F zero = f_zero(), one = f_set1(1.0f), least = f_set1(-limit);
  alignas(64) float x[2][W], y[W];
  for (int64_t i = 0; i < n; i += W) {
    const int64_t count = n - i < W ? n - i : W;
    for (int64_t j = 0; j < W; ++j) {
      x[0][j] = j < count ? to_float(a[i + j]) : 0.0f;
      x[1][j] = j < count ? to_float(b[i + j]) : 0.0f;
    }
    const F gates = f_load(x[0]), ups = f_load(x[1]);
    const F g = f_sub(zero, f_max(least, f_sub(zero, gates)));
    const F u = f_max(least, f_sub(zero, f_max(least, f_sub(zero, ups))));
    const F z = f_round_to<T>(f_mul(g, f_set1(alpha)));
    const F low = f_sub(zero, f_max(f_sub(zero, z), zero));
    const F minus_abs = f_sub(zero, f_max(z, f_sub(zero, z)));
    const F sigmoid = f_round_to<T>(f_div(f_exp(low), f_add(one, f_exp(minus_abs))));
    const F glu = f_round_to<T>(f_mul(g, sigmoid));
    f_store(y, f_round_to<T>(f_mul(f_round_to<T>(f_add(u, one)), glu)));
    for (int64_t j = 0; j < count; ++j) {
      const bool is_number = x[0][j] == x[0][j] && x[1][j] == x[1][j];
      out[i + j] = is_number ? y[j] : x[0][j] + x[1][j];
    }
  }
}

template <class T>
static void add_residual(const float* x, const void* residual, int64_t n, void* out) {
  const T* r = static_cast<const T*>(residual);
  T* o = static_cast<T*>(out);
  const int64_t whole = n / W * W;
  for (int64_t i = 0; i < whole; i += W) f_store_as(o + i, f_add(f_load_as(r + i), f_round_to<T>(f_load(x + i))));
  for (int64_t i = whole; i < n; ++i) {
    o[i] = from_float<T>(to_float(r[i]) + to_float(from_float<T>(x[i])));
  }
}

template <class T>
static void rope_head(void* x, const void* cos, const void* sin, const void* norm_weight, float eps, int64_t head_dim) {
  T* head = static_cast<T*>(x);
  const T* c = static_cast<const T*>(cos);
  const T* s = static_cast<const T*>(sin);
  alignas(64) float value[kMaxHeadDim];
  if (norm_weight != nullptr) {
    rms_norm<T>(x, norm_weight, eps, head_dim, value);
  } else {
    to_float_all<T>(x, head_dim, value);
  }
  const int64_t half = head_dim / 2;
  int64_t d = 0;
  for (; d + W <= half; d += W) {
    const F low = f_load(value + d);
    const F high = f_load(value + half + d);
    const F low_cos = f_round_to<T>(f_mul(low, f_load_as(c + d)));
    const F low_sin = f_round_to<T>(f_mul(f_sub(f_zero(), high), f_load_as(s + d)));
    const F high_cos = f_round_to<T>(f_mul(high, f_load_as(c + half + d)));
    const F high_sin = f_round_to<T>(f_mul(low, f_load_as(s + half + d)));
    f_store_as(head + d, f_add(low_cos, low_sin));
    f_store_as(head + half + d, f_add(high_cos, high_sin));
  }
  for (; d < half; ++d) {
    const auto product = [](float a, float b) { return to_float(from_float<T>(a * b)); };
    const float low = value[d];
    const float high = value[half + d];
    head[d] = from_float<T>(product(low, to_float(c[d])) + product(-high, to_float(s[d])));
    head[half + d] = from_float<T>(product(high, to_float(c[half + d])) + product(low, to_float(s[half + d])));
  }
}

static float exp_shifted(float* x, int64_t n, float* sum) {
  const int64_t whole = n / W * W;
  F highest = f_set1(-3.0e38f);
  for (int64_t i = 0; i < whole; i += W) highest = f_max(highest, f_load(x + i));
  float maximum = f_max_lane(highest);
  for (int64_t i = whole; i < n; ++i) maximum = x[i] > maximum ? x[i] : maximum;
  F total = f_zero();
  for (int64_t i = 0; i < whole; i += W) {
    const F e = f_exp(f_sub(f_load(x + i), f_set1(maximum)));
    f_store(x + i, e);
    total = f_add(total, e);
  }
  float rest = 0.0f;
  if (whole < n) {
    alignas(64) float tail[W];
    for (int i = 0; i < W; ++i) tail[i] = whole + i < n ? x[whole + i] : maximum;
    f_store(tail, f_exp(f_sub(f_load(tail), f_set1(maximum))));
    for (int64_t i = whole; i < n; ++i) rest += x[i] = tail[i - whole];
  }
  *sum = f_sum(total) + rest;
  return maximum;
}

// The least and the largest of the numbers among x[0..n); inf and -inf where there is none.
static void extremes(const float* x, int64_t n, float* lowest, float* highest) {
  constexpr int U = 4;  // against the latency of a maximum
  const int64_t whole = n / W * W;
  F top[U], bottom[U];  // of x and of -x
  for (int u = 0; u < U; ++u) top[u] = bottom[u] = f_set1(-INFINITY);
  const auto look = [&](int64_t i, int u) {
    const F v = f_load(x + i);  // first of the two, so that a NaN is dropped
    top[u] = f_max(v, top[u]);
    bottom[u] = f_max(f_sub(f_zero(), v), bottom[u]);
  };
  int64_t i = 0;
  for (; i + U * W <= whole; i += U * W) {
    for (int u = 0; u < U; ++u) look(i + u * W, u);
  }
  for (; i < whole; i += W) look(i, 0);
  *highest = f_max_lane(f_max(f_max(top[0], top[1]), f_max(top[2], top[3])));
  *lowest = -f_max_lane(f_max(f_max(bottom[0], bottom[1]), f_max(bottom[2], bottom[3])));
  for (; i < n; ++i) {
    *highest = x[i] > *highest ? x[i] : *highest;
    *lowest = x[i] < *lowest ? x[i] : *lowest;
  }
}

static void scale_add(const float* x, float factor, int64_t n, bool accumulate, float* importance) {
  const int64_t whole = n / W * W;
  const F f = f_set1(factor);
  for (int64_t i = 0; i < whole; i += W) {
    const F base = accumulate ? f_load(importance + i) : f_zero();
    f_store(importance + i, f_fma(f_load(x + i), f, base));
  }
  for (int64_t i = whole; i < n; ++i) importance[i] = x[i] * factor + (accumulate ? importance[i] : 0.0f);
}

using Words[[gnu::vector_size(W == 1 ? 8 : 4 * W)]] = uint64_t;  // a register

// The sum of 64-bit words of whole cache lines, which need not be aligned; in two registers, against the latency.
struct WordSum {
  Words sums[2] = {};

  [[gnu::always_inline]] void add(const char* bytes, int64_t num_bytes) {
    constexpr int64_t kStep = sizeof(Words);
    for (int64_t i = 0; i + 64 <= num_bytes; i += 64) {
      for (int64_t j = 0; j < 64; j += kStep) {
        Words words;
        std::memcpy(&words, bytes + i + j, sizeof words);
        sums[j / kStep % 2] += words;
      }
    }
  }
  uint64_t total() const {
    uint64_t sum = 0;
    for (size_t i = 0; i < sizeof(Words) / 8; ++i) sum += sums[0][i] + sums[1][i];
    return sum;
  }
};

static uint64_t read_bytes(const void* data, int64_t num_bytes) {
  WordSum sum;
  sum.add(static_cast<const char*>(data), num_bytes);
  return sum.total();
}

static uint64_t read_rows(const void* data, const int32_t* rows, int64_t num_rows, int64_t row_bytes) {
  constexpr int64_t kAhead = 32;
  const char* base = static_cast<const char*>(data);
  WordSum sum;
  for (int64_t i = 0; i < num_rows; ++i) {
    if (i + kAhead < num_rows) {
      prefetch_gathered(base + rows[i + kAhead] * row_bytes, row_bytes);
    }
    sum.add(base + rows[i] * row_bytes, row_bytes);
  }
  return sum.total();
}

// A row of int8.
static void int8_to_float(const void* row, int64_t head_dim, float* out) {
  const Int8* codes = static_cast<const Int8*>(row);
  const Half* scales = scales_of(codes, head_dim);
  for (int64_t d = 0; d < head_dim; d += W) {
    f_store(out + d, f_mul(f_load_as(codes + d), f_set1_as(scales + d / kRowGroup)));
  }
}

// A group that has a NaN or an infinity, or numbers beyond the scale's float16, gets a scale that is not finite.
static void int8_from_float(const float* x, int64_t head_dim, void* row) {
  Int8* codes = static_cast<Int8*>(row);
  for (int64_t first = 0; first < head_dim; first += kRowGroup) {
    const int64_t stop = first + kRowGroup < head_dim ? first + kRowGroup : head_dim;
    const Half scale = from_float<Half>(Int8Ops::top_of(x + first, stop - first) / 127.0f);
    std::memcpy(static_cast<char*>(row) + num_codes(head_dim) + first / kRowGroup * 2, &scale, sizeof scale);
    const float of_group = to_float(scale);
    const F inverse = f_set1(of_group > 0.0f && std::isfinite(of_group) ? 1.0f / of_group : 0.0f);
    for (int64_t d = first; d < stop; d += W) {
      float rounded[W];
      f_store(rounded, f_round(f_mul(f_load(x + d), inverse)));
      for (int i = 0; i < W; ++i) {
        const float code = rounded[i] > 127.0f ? 127.0f : rounded[i] < -127.0f ? -127.0f : rounded[i];
        codes[d + i].code = code == code ? static_cast<int8_t>(code) : int8_t{0};
      }
    }
  }
  for (int64_t d = head_dim; d < num_codes(head_dim); ++d) codes[d].code = 0;
}

// Fills the entries that depend on the dtype; an ISA that improves only one dtype calls this for that one.
template <class T>
static void fill_dtype(KernelTable* table, DType dtype) {
  const int i = static_cast<int>(dtype);
  table->score[i] = score<T>;
  table->attend[i] = attend<T>;
  table->pack_input[i] = pack_input<T>;
  table->linear[i] = linear<T>;
  table->to_float[i] = to_float_all<T>;
  table->from_float[i] = from_float_all<T>;
  table->rms_norm[i] = rms_norm<T>;
  table->silu_mul[i] = gated_mul<T, false>;
  table->gelu_mul[i] = gated_mul<T, true>;
  table->clamped_glu[i] = clamped_glu<T>;
  table->add_residual[i] = add_residual<T>;
  table->rope_head[i] = rope_head<T>;
}

static inline KernelTable make_table(const char* name) {
  KernelTable table{};
  table.name = name;
  fill_dtype<float>(&table, DType::f32);
  fill_dtype<Half>(&table, DType::f16);
  fill_dtype<Bf16>(&table, DType::bf16);
  const int i8 = static_cast<int>(DType::i8);
  table.score[i8] = score<Int8>;
  table.attend[i8] = attend<Int8>;
  table.to_float[i8] = int8_to_float;
  table.from_float[i8] = int8_from_float;
  table.exp_shifted = exp_shifted;
  table.scale_add = scale_add;
  table.extremes = extremes;
  table.filter_at_least = filter_at_least;
  table.count_at_least = count_at_least;
  table.rank_rows = rank_rows<WordBoxes>;
  table.score_codes = score_codes;
  table.centroid_block = kCentroidBlock;
  table.pack_centroids = pack_centroids;
  table.nearest_centroids = nearest_centroids;
  table.read_bytes = read_bytes;
  table.read_rows = read_rows;
  add_packed(&table);
  return table;
}
