// What the standalone C++ tests share: a check that ends the program, random numbers, and heap buffers of exactly the
// size a kernel may touch, so that AddressSanitizer sees the first byte too many.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fputc('\n', stderr);                                            \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

namespace offload::test {

// The same draws in each run; other ones under OFFLOAD_TEST_SEED, as in tests/cases/seeded.py.
inline uint64_t seed() {
  const char* text = std::getenv("OFFLOAD_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 0;
}

inline std::mt19937_64& generator() {
  static std::mt19937_64 engine(seed());
  return engine;
}

inline float normal() {
  static std::normal_distribution<float> distribution;  // draws two at once
  return distribution(generator());
}

// An int in [low, high].
inline int64_t uniform(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator());
}

// n elements that end where the allocation ends; with `skip` they begin at an address aligned to the element only.
template <class T>
class Exact {
 public:
  explicit Exact(int64_t n, int64_t skip = 0)
      : size_(n),
        memory_(static_cast<T*>(std::malloc(static_cast<size_t>(n + skip) * sizeof(T) + (n + skip == 0)))),
        data_(memory_.get() + skip) {}

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

  template <class Make>
  Exact& fill(Make&& make) {
    for (int64_t i = 0; i < size_; ++i) data_[i] = make();
    return *this;
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  int64_t size_;
  std::unique_ptr<T, Free> memory_;
  T* data_;
};

// Relative L2; infinite where something is NaN.
template <class A, class B>
double relative_error(const A& actual, const B& expected) {
  double difference = 0.0;
  double size = 1e-30;
  for (int64_t i = 0; i < static_cast<int64_t>(expected.size()); ++i) {
    const double a = actual[i], e = expected[i];
    if (std::isnan(a) || std::isnan(e)) return INFINITY;
    difference += (a - e) * (a - e);
    size += e * e;
  }
  return std::sqrt(difference / size);
}

// Root mean square of the differences, relative to what a sum of `terms` products of normal numbers is about: single
// sums may cancel.
template <class A, class B>
double error_of_sums(const A& actual, const B& expected, int64_t terms) {
  double difference = 0.0;
  const auto n = static_cast<int64_t>(expected.size());
  for (int64_t i = 0; i < n; ++i) {
    const double d = static_cast<double>(actual[i]) - static_cast<double>(expected[i]);
    if (std::isnan(d)) return INFINITY;
    difference += d * d;
  }
  return n == 0 ? 0.0 : std::sqrt(difference / static_cast<double>(n * terms));
}

}  // namespace offload::test
