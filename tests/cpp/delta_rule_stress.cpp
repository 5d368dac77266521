// Steps of the gated delta rule on buffers of exactly their size, on 1 to 4 threads, for the sanitizers: the rows of a
// batch get the bytes that each gets alone.
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "kernels/kernels.h"
#include "operators/delta_rule.h"
#include "pool/worker_pool.h"

namespace offload::test {
namespace {

// What a step reads and writes, of `n` rows.
struct Rows {
  int64_t n;
  Exact<float> projected, conv_state, state, out;

  Rows(const DeltaShape& shape, int64_t row_size, int64_t rows)
      : n(rows),
        projected(rows * row_size),
        conv_state(rows * shape.channels() * shape.conv_width),
        state(rows * shape.num_v_heads * shape.k_dim * shape.v_dim),
        out(rows * shape.num_v_heads * shape.v_dim) {
    for (Exact<float>* x : {&projected, &conv_state, &state, &out}) x->fill(normal);
  }

  void run(const DeltaRule& rule, WorkerPool& pool) {
    rule.run(*scalar_table(), pool, projected.data(), n, projected.size() / n, conv_state.data(), state.data(),
             out.data());
  }

  template <class Visit>
  void with(Rows& single, int64_t row, Visit&& visit) {
    visit(projected, single.projected, row);
    visit(conv_state, single.conv_state, row);
    visit(state, single.state, row);
    visit(out, single.out, row);
  }
};

void stress(WorkerPool& pool, WorkerPool& alone) {
  const int64_t key_heads = uniform(1, 4);
  const DeltaShape shape{DType::f32,     key_heads,      key_heads * uniform(1, 3),
                         uniform(1, 40), uniform(1, 40), uniform(1, 5)};
  const int64_t keys = key_heads * shape.k_dim, values = shape.num_v_heads * shape.v_dim, channels = shape.channels();
  const int64_t each = shape.heads_per_key(), row_size = channels + values + 2 * shape.num_v_heads;
  const DeltaPlaces places{{0, shape.k_dim},
                           {keys, shape.k_dim},
                           {2 * keys, each * shape.v_dim},
                           {channels, each * shape.v_dim},
                           {channels + values, each},
                           {channels + values + shape.num_v_heads, each}};
  Exact<float> conv(channels * shape.conv_width), norm(shape.v_dim), rate(shape.num_v_heads), bias(shape.num_v_heads);
  for (Exact<float>* x : {&conv, &norm, &bias}) x->fill(normal);
  rate.fill([] { return std::exp(normal()); });
  const DeltaRule rule{shape, places, {conv.data(), norm.data(), rate.data(), bias.data(), 1e-5f}};
  Rows batch(shape, row_size, uniform(1, 5));
  std::vector<Rows> singles;
  for (int64_t row = 0; row < batch.n; ++row) {
    batch.with(singles.emplace_back(shape, row_size, 1), row, [](auto& all, auto& one, int64_t r) {
      std::memcpy(one.data(), all.data() + r * one.size(), static_cast<size_t>(one.size()) * sizeof(float));
    });
  }
  batch.run(rule, pool);
  for (int64_t row = 0; row < batch.n; ++row) {
    Rows& single = singles[static_cast<size_t>(row)];
    single.run(rule, alone);
    batch.with(single, row, [](auto& all, auto& one, int64_t r) {
      for (int64_t i = 0; i < one.size(); ++i) {
        CHECK(std::isfinite(one[i]) && one[i] == all[r * one.size() + i], "row %d", static_cast<int>(r));
      }
    });
  }
}

}  // namespace
}  // namespace offload::test

int main() {
  using namespace offload;
  WorkerPool alone(1);
  for (int num_threads = 1; num_threads <= 4; ++num_threads) {
    WorkerPool pool(num_threads, 30);
    for (int round = 0; round < 30; ++round) test::stress(pool, alone);
  }
  std::puts("ok");
}
