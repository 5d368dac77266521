// Included inside a per-ISA namespace that defines F (a vector of W floats) and its primitives.
// No include guard: each ISA compiles its own copy.

// exp to within 2 ulp for x <= 0 and NaN for NaN. Cody-Waite reduction, degree-6 polynomial (Cephes expf).
static inline F f_exp(F x) {
  x = f_max(f_set1(-87.33654f), x);  // f_max returns its second argument when unordered, so NaN survives
  const F n = f_round(f_mul(x, f_set1(1.44269504088896341f)));
  F r = f_fma(n, f_set1(-0.693359375f), x);
  r = f_fma(n, f_set1(2.12194440e-4f), r);
  F p = f_set1(1.9875691500e-4f);
  p = f_fma(p, r, f_set1(1.3981999507e-3f));
  p = f_fma(p, r, f_set1(8.3334519073e-3f));
  p = f_fma(p, r, f_set1(4.1665795894e-2f));
  p = f_fma(p, r, f_set1(1.6666665459e-1f));
  p = f_fma(p, r, f_set1(5.0000001201e-1f));
  p = f_add(f_fma(p, f_mul(r, r), r), f_set1(1.0f));
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
