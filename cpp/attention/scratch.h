// Memory that only grows: a step in steady state allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace offload {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t divide_rounded(int64_t a, int64_t b) { return (a + b / 2) / b; }

template <class T>
void grow(std::vector<T>& x, size_t n) {
  if (x.size() < n) x.resize(n);
}

// Not cleared: what a call writes anyway.
template <class T>
class Scratch {
 public:
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  void clear() { size_ = 0; }
  void resize(size_t n) {  // what was there is lost
    if (n > capacity_) {
      data_ = std::make_unique_for_overwrite<T[]>(n);
      capacity_ = n;
    }
    size_ = n;
  }

 private:
  std::unique_ptr<T[]> data_;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

}  // namespace offload
