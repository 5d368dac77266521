// The AMX kernels on a CPU without AMX: their tile instructions are replaced by a model in C++, their packing, padding
// and tile shapes are the real ones. Needs AVX512-BF16, which the kernel falls back to. Prints "no AVX512-BF16"
// without.
#include <immintrin.h>

#include <cstring>

#include "check.h"
#include "kernels/kernels.h"
#include "kernels/number_formats.h"

namespace offload::test {

// Palette 1: eight tiles of up to 16 rows of 64 bytes, as configured.
struct Tiles {
  unsigned char config[64];
  bool configured = false;
  unsigned char data[8][16][64];

  int rows(int t) const { return config[48 + t]; }
  int row_bytes(int t) const { return config[16 + 2 * t] | config[17 + 2 * t] << 8; }
  void load_config(const void* from) {
    std::memcpy(config, from, sizeof config);
    configured = config[0] == 1;
    CHECK(config[0] <= 1 && config[1] == 0, "palette %d, start row %d", config[0], config[1]);
    for (int t = 0; t < 8; ++t) CHECK(rows(t) <= 16 && row_bytes(t) <= 64, "tile %d", t);
    std::memset(data, 0, sizeof data);
  }
  void zero(int t) {
    CHECK(configured && rows(t) > 0, "tile %d is not configured", t);
    std::memset(data[t], 0, sizeof data[t]);
  }
  void load(int t, const void* from, int64_t stride) {
    zero(t);
    for (int r = 0; r < rows(t); ++r) {
      std::memcpy(data[t][r], static_cast<const char*>(from) + r * stride, static_cast<size_t>(row_bytes(t)));
    }
  }
  void store(int t, void* to, int64_t stride) const {
    CHECK(configured, "tile %d is not configured", t);
    for (int r = 0; r < rows(t); ++r) {
      std::memcpy(static_cast<char*>(to) + r * stride, data[t][r], static_cast<size_t>(row_bytes(t)));
    }
  }
  void add(int t, int row, int column, float x) {
    float sum;
    std::memcpy(&sum, data[t][row] + 4 * column, sizeof sum);
    sum += x;
    std::memcpy(data[t][row] + 4 * column, &sum, sizeof sum);
  }
  float bf16(int t, int row, int column) const {
    Bf16 x;
    std::memcpy(&x, data[t][row] + 2 * column, sizeof x);
    return to_float(x);
  }
  void dpbf16ps(int c, int a, int b) {
    CHECK(configured && rows(a) == rows(c) && row_bytes(b) == row_bytes(c) && row_bytes(a) / 4 == rows(b),
          "shapes of tiles %d, %d, %d disagree", c, a, b);
    for (int m = 0; m < rows(a); ++m) {
      for (int k = 0; k < rows(b); ++k) {
        for (int n = 0; n < row_bytes(b) / 4; ++n) {
          add(c, m, n, bf16(a, m, 2 * k) * bf16(b, k, 2 * n));
          add(c, m, n, bf16(a, m, 2 * k + 1) * bf16(b, k, 2 * n + 1));
        }
      }
    }
  }
};

alignas(64) Tiles tiles;

}  // namespace offload::test

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) ::offload::test::tiles.load_config(from)
#define _tile_release() (::offload::test::tiles.configured = false)
#define _tile_zero(t) ::offload::test::tiles.zero(t)
#define _tile_loadd(t, from, stride) ::offload::test::tiles.load(t, from, stride)
#define _tile_stored(t, to, stride) ::offload::test::tiles.store(t, to, stride)
#define _tile_dpbf16ps(c, a, b) ::offload::test::tiles.dpbf16ps(c, a, b)
#include "kernels/isa/amx.cpp"

namespace offload::test {

// Gathered tokens of one KV head: scores, and attention with and without given weights, beside the vector kernels that
// round as these do.
void check_attention(int group_size, int head_dim, int64_t n) {
  constexpr int type = static_cast<int>(DType::bf16);
  const int64_t total = 2 * n;
  Exact<Bf16> rows(total * head_dim, 1);
  rows.fill([] { return from_float<Bf16>(normal()); });
  const auto page = reinterpret_cast<int64_t>(rows.data());
  const RowSource source{&page, 0, head_dim * int64_t{sizeof(Bf16)}, 62};
  Exact<float> query(int64_t{group_size} * head_dim);
  query.fill([] { return to_float(from_float<Bf16>(normal())); });
  Exact<int32_t> indices(n);
  int32_t next = 0;
  indices.fill([&] { return next += 2; });
  for (int64_t i = 0; i < n; ++i) indices.data()[i] -= 1;
  Exact<float> weights(group_size * n);
  weights.fill([] { return std::abs(normal()); });
  const TokenSpan tokens{indices.data(), 0, n};
  const auto score = [&](const KernelTable& kernels) {
    Exact<float> scores(group_size * n);
    kernels.score[type]({query.data(), group_size, head_dim, source, tokens, 0.1f, scores.data(), n});
    return scores;
  };
  const auto attend = [&](const KernelTable& kernels, bool given) {
    Exact<float> acc(int64_t{group_size} * head_dim), row_max(group_size), row_sum(group_size);
    AttendArgs args{};
    args.query = query.data();
    args.group_size = group_size;
    args.head_dim = head_dim;
    args.keys = args.values = source;
    args.tokens = tokens;
    args.scale = 0.1f;
    if (given) args.weights = weights.data();
    args.weight_stride = n;
    args.acc = acc.data();
    args.row_max = row_max.data();
    args.row_sum = row_sum.data();
    args.ends = true;
    kernels.attend[type](args);
    return acc;
  };
  const KernelTable &amx = *amx_table(), &vectors = *avx512_bf16_table();
  const double errors[] = {error_of_sums(score(amx), score(vectors), head_dim),
                           error_of_sums(attend(amx, true), attend(vectors, true), n),
                           error_of_sums(attend(amx, false), attend(vectors, false), n)};
  for (const double error : errors) {
    CHECK(error < 1e-4, "%lld tokens of %d, %d heads: error %g", static_cast<long long>(n), head_dim, group_size,
          error);
  }
  CHECK(!tiles.configured, "tiles are released");
}

// Queries of a slice behind other tokens, beside the dot products, which round as tiles do.
void check_causal(int64_t group_size, int64_t head_dim, int64_t n, int64_t kv_len) {
  constexpr int type = static_cast<int>(DType::bf16);
  Exact<Bf16> queries(group_size * n * head_dim, 1), keys(kv_len * head_dim, 1), values(kv_len * head_dim, 1);
  for (auto* rows : {&queries, &keys, &values}) rows->fill([] { return from_float<Bf16>(normal()); });
  const auto attend = [&](const KernelTable& kernels) {
    Exact<Bf16> out(n * group_size * head_dim, 1);
    const CausalArgs args{
        queries.data(), n * head_dim, head_dim, n,    group_size, keys.data(),          values.data(), 0,
        head_dim,       kv_len,       head_dim, 0.1f, out.data(), group_size * head_dim};
    Exact<float> scratch(args.scratch_items(n * group_size)), found(out.size());
    kernels.attend_causal[type](args, 0, 0, n, scratch.data());
    for (int64_t i = 0; i < out.size(); ++i) found.data()[i] = to_float(out[i]);
    return found;
  };
  const double error = error_of_sums(attend(*amx_table()), attend(*avx512_bf16_table()), 1);
  CHECK(error < 4e-3, "%lld queries of %lld tokens of %lld: error %g", static_cast<long long>(n),
        static_cast<long long>(kv_len), static_cast<long long>(head_dim), error);
  CHECK(!tiles.configured, "tiles are released");
}

}  // namespace offload::test

int main() {
  using namespace offload;
  using namespace offload::test;
  if (!__builtin_cpu_supports("avx512bf16")) {
    std::puts("no AVX512-BF16");
    return 0;
  }
  constexpr int type = static_cast<int>(DType::bf16);
  int multiplied = 0;
  for (const int num_rows : {1, 4, 5, 7, 15, 16}) {
    for (const int64_t width : {1, 16, 31, 32, 33, 64, 577, 1536}) {
      for (const int64_t out_features : {1, 15, 16, 17, 64, 65, 97, 128, 190}) {
        const int64_t first = out_features > 64 ? 3 : 0, count = out_features - first;
        Exact<Bf16> weight(out_features * width, 1);
        weight.fill([] { return from_float<Bf16>(normal()); });
        Exact<float> x(num_rows * width);
        x.fill([] { return to_float(from_float<Bf16>(normal())); });
        const auto run = [&](const KernelTable& kernels) {
          Exact<float> packed(x.size()), y((num_rows - 1) * (count + 3) + count);
          y.fill([] { return 0.0f; });
          kernels.pack_input[type](x.data(), x.size(), packed.data());
          kernels.linear[type](packed.data(), num_rows, width, weight.data(), first, out_features, y.data(), count + 3);
          return y;
        };
        multiplied += num_rows > 4 && count >= 16;
        const double error = error_of_sums(run(*amx_table()), run(*scalar_table()), width);
        CHECK(error < 1e-5, "%d rows of %lld, %lld outputs: error %g", num_rows, static_cast<long long>(width),
              static_cast<long long>(count), error);
        CHECK(!tiles.configured, "tiles are released");
      }
    }
  }
  CHECK(multiplied > 0, "the tiles were used");
  for (const int group_size : {4, 5, 8}) {
    for (const int head_dim : {32, 64, 96, 128, 256}) {
      for (const int64_t n : {1, 15, 16, 17, 31, 32, 33, 200}) check_attention(group_size, head_dim, n);
      for (const int64_t n : {1, 13, 65}) check_causal(group_size, head_dim, n, 4 * n);
    }
  }
  std::puts("ok");
}
