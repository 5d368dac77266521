// Included inside a per-ISA namespace that defines F (a vector of W floats) and its primitives.
// No include guard: each ISA compiles its own copy.

// What the compilers' vectors have by themselves.
static inline F f_zero() { return F{}; }
static inline F f_add(F a, F b) { return a + b; }
static inline F f_sub(F a, F b) { return a - b; }
static inline F f_mul(F a, F b) { return a * b; }
static inline F f_div(F a, F b) { return a / b; }
static inline F f_load_as(const float* p) { return f_load(p); }
static inline void f_store_as(float* p, F x) { f_store(p, x); }

// 2^t for t <= 0, NaN for NaN: integer part by exponent, fraction in [-1/2, 1/2] by a degree-6 polynomial (its error is
// below float32's own). As exp(x) = 2^(x log2 e) it is good to |x| * 1e-7 relative, ample for softmax weights.
static inline F f_exp2(F t) {
  const F n = f_round(t);
  const F r = f_sub(t, n);
  F p = f_set1(1.54614478e-4f);
  p = f_fma(p, r, f_set1(1.33908668e-3f));
  p = f_fma(p, r, f_set1(9.61805694e-3f));
  p = f_fma(p, r, f_set1(5.55035695e-2f));
  p = f_fma(p, r, f_set1(2.40226507e-1f));
  p = f_fma(p, r, f_set1(6.93147182e-1f));
  p = f_fma(p, r, f_set1(1.0f));
  return f_scale2(p, n);
}

inline constexpr float kLog2E = 1.44269504088896341f;

static inline F f_exp(F x) { return f_exp2(f_mul(x, f_set1(kLog2E))); }

// exp for weights that will multiply values of dtype T: bf16 keeps 8 bits, so a degree-4 polynomial (4e-6) is plenty.
template <class T>
static inline F f_exp_fast(F x) {
  return f_exp(x);
}

template <>
inline F f_exp_fast<Bf16>(F x) {
  const F t = f_mul(x, f_set1(kLog2E));
  const F n = f_round(t);
  const F r = f_sub(t, n);
  F p = f_set1(0.00966637369f);
  p = f_fma(p, r, f_set1(0.0558383427f));
  p = f_fma(p, r, f_set1(0.240223489f));
  p = f_fma(p, r, f_set1(0.693136726f));
  p = f_fma(p, r, f_set1(1.0f));
  return f_scale2(p, n);
}

template <class T>
static inline F f_round_to(F x) {
  alignas(64) T stored[W];
  f_store_as(stored, x);
  return f_load_as(stored);
}

template <>
inline F f_round_to<float>(F x) {
  return x;
}
