#include "operators/delta_rule.h"

#include <cmath>
#include <vector>

namespace offload {

namespace {

constexpr float kUnitEps = 1e-6f;  // of the length of queries and keys

// One row of one key head, and its value heads.
class HeadStep {
 public:
  HeadStep(const KernelTable& kernels, const DeltaRule& rule)
      : kernels_(kernels),
        rule_(rule),
        type_(static_cast<int>(rule.shape.dtype)),
        item_(dtype_bytes(rule.shape.dtype)) {}

  void run(int64_t head, const char* row, char* conv_state, float* state, char* out) {
    const DeltaShape& shape = rule_.shape;
    const DeltaPlaces& places = rule_.places;
    const int64_t each = shape.heads_per_key(), key_channels = shape.num_k_heads * shape.k_dim;
    float* const query = convolved(row, places.query, head, head * shape.k_dim, shape.k_dim, conv_state, &query_);
    float* const key =
        convolved(row, places.key, head, key_channels + head * shape.k_dim, shape.k_dim, conv_state, &key_);
    const int64_t first = head * each;
    float* const value = convolved(row, places.value, head, 2 * key_channels + first * shape.v_dim, each * shape.v_dim,
                                   conv_state, &value_);
    make_unit(query, 1.0f / std::sqrt(static_cast<float>(shape.k_dim)));
    make_unit(key, 1.0f);
    for (int64_t i = 0; i < each; ++i) {
      const float beta = rounded(1.0f / (1.0f + std::exp(-element(row, places.beta, head, i))));
      const float alpha = element(row, places.alpha, head, i) + rule_.weights.dt_bias[first + i];
      const float softplus = alpha > 20.0f ? alpha : std::log1p(std::exp(alpha));
      const float decay = std::exp(-rule_.weights.rate[first + i] * softplus);
      step(query, key, value + i * shape.v_dim, decay, beta, state + (first + i) * shape.k_dim * shape.v_dim);
      const HeadPlace gate{places.gate.first + i * shape.v_dim, places.gate.stride};
      finish(row + at(gate, head), out + (first + i) * shape.v_dim * item_);
    }
  }

 private:
  int64_t at(const HeadPlace& place, int64_t head) const { return (place.first + head * place.stride) * item_; }

  float element(const char* row, const HeadPlace& place, int64_t head, int64_t i) const {
    float x;
    kernels_.to_float[type_](row + at(place, head) + i * item_, 1, &x);
    return x;
  }

  float rounded(float x) {
    round(&x, 1);
    return x;
  }

  void round(float* x, int64_t n) {
    narrow_.resize(static_cast<size_t>(n * item_));
    kernels_.from_float[type_](x, n, narrow_.data());
    kernels_.to_float[type_](narrow_.data(), n, x);
  }

  // silu(convolution) of channels whose newest inputs are in a row, which the state takes.
  float* convolved(const char* row, const HeadPlace& place, int64_t head, int64_t channel, int64_t n, char* conv_state,
                   std::vector<float>* made) {
    const int64_t width = rule_.shape.conv_width, all = n * width;
    char* const kept = conv_state + channel * width * item_;
    newest_.resize(static_cast<size_t>(n));
    past_.resize(static_cast<size_t>(all));
    conv_.resize(static_cast<size_t>(all));
    ones_.resize(static_cast<size_t>(n), 1.0f);
    made->resize(static_cast<size_t>(n));
    kernels_.to_float[type_](row + at(place, head), n, newest_.data());
    kernels_.to_float[type_](kept, all, past_.data());
    kernels_.to_float[type_](static_cast<const char*>(rule_.weights.conv) + channel * width * item_, all, conv_.data());
    for (int64_t c = 0; c < n; ++c) {
      float* const past = past_.data() + c * width;
      const float* const weight = conv_.data() + c * width;
      float sum = 0.0f;
      for (int64_t t = 0; t < width; ++t) {
        past[t] = t + 1 < width ? past[t + 1] : newest_[static_cast<size_t>(c)];
        sum += past[t] * weight[t];
      }
      newest_[static_cast<size_t>(c)] = sum;
    }
    kernels_.from_float[type_](past_.data(), all, kept);
    round(newest_.data(), n);
    kernels_.silu_mul[static_cast<int>(DType::f32)](newest_.data(), ones_.data(), n, made->data());
    round(made->data(), n);
    return made->data();
  }

  void make_unit(float* x, float scale) const {
    float squares = kUnitEps;
    for (int64_t i = 0; i < rule_.shape.k_dim; ++i) squares += x[i] * x[i];
    const float inverse = scale / std::sqrt(squares);
    for (int64_t i = 0; i < rule_.shape.k_dim; ++i) x[i] *= inverse;
  }

  // attended_ <- query of the state [k_dim, v_dim] after it took key and value.
  void step(const float* query, const float* key, const float* value, float decay, float beta, float* state) {
    const int64_t n = rule_.shape.v_dim, num_rows = rule_.shape.k_dim;
    attended_.resize(static_cast<size_t>(n));
    newest_.resize(static_cast<size_t>(n));
    float* const delta = newest_.data();
    for (int64_t k = 0; k < num_rows; ++k) {
      float* const row = state + k * n;
      kernels_.scale_add(row, decay, n, false, row);
      kernels_.scale_add(row, key[k], n, k > 0, delta);
    }
    for (int64_t i = 0; i < n; ++i) delta[i] = (value[i] - delta[i]) * beta;
    for (int64_t k = 0; k < num_rows; ++k) {
      float* const row = state + k * n;
      kernels_.scale_add(delta, key[k], n, true, row);
      kernels_.scale_add(row, query[k], n, k > 0, attended_.data());
    }
  }

  // RMSNorm of what a value head has attended to, times silu(gate).
  void finish(const char* gate, char* out) {
    const int64_t n = rule_.shape.v_dim;
    narrow_.resize(static_cast<size_t>(n * item_));
    newest_.resize(static_cast<size_t>(n));
    conv_.resize(static_cast<size_t>(n));
    kernels_.from_float[type_](attended_.data(), n, narrow_.data());
    kernels_.rms_norm[type_](narrow_.data(), rule_.weights.norm, rule_.weights.eps, n, newest_.data());
    kernels_.to_float[type_](gate, n, conv_.data());
    kernels_.silu_mul[static_cast<int>(DType::f32)](conv_.data(), newest_.data(), n, attended_.data());
    kernels_.from_float[type_](attended_.data(), n, out);
  }

  const KernelTable& kernels_;
  const DeltaRule& rule_;
  const int type_;
  const int64_t item_;
  std::vector<float> query_, key_, value_, attended_;
  std::vector<float> newest_, past_, conv_, ones_;  // scratch
  std::vector<char> narrow_;                        // likewise
};

}  // namespace

void DeltaRule::run(const KernelTable& kernels, WorkerPool& pool, const void* projected, int64_t num_rows,
                    int64_t row_size, void* conv_state, float* state, void* out) const {
  const int64_t item = dtype_bytes(shape.dtype), heads = shape.num_k_heads;
  const int64_t conv_bytes = shape.channels() * shape.conv_width * item;
  const int64_t state_size = shape.num_v_heads * shape.k_dim * shape.v_dim;
  const int64_t out_bytes = shape.num_v_heads * shape.v_dim * item;
  std::vector<HeadStep> of_worker(static_cast<size_t>(pool.num_threads()), HeadStep(kernels, *this));
  pool.parallel_for_near(num_rows * heads, [&](int64_t task, int worker) {
    const int64_t row = task / heads;
    of_worker[static_cast<size_t>(worker)].run(task % heads,
                                               static_cast<const char*>(projected) + row * row_size * item,
                                               static_cast<char*>(conv_state) + row * conv_bytes,
                                               state + row * state_size, static_cast<char*>(out) + row * out_bytes);
  });
}

}  // namespace offload
