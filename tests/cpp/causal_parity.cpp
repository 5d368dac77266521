// Causal attention of every ISA that has a kernel for it against float64, on heap buffers of exactly the size it may
// touch; the numbers of rows and keys are on both sides of its tiles'.
#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/number_formats.h"

namespace offload::test {
namespace {

Bf16 random_value() { return from_float<Bf16>(normal()); }

std::vector<double> expected_output(const CausalArgs& args, int64_t first, int64_t last) {
  const auto at = [](const void* rows, int64_t i) { return double{to_float(static_cast<const Bf16*>(rows)[i])}; };
  std::vector<double> out;
  for (int64_t t = first; t < last; ++t) {
    for (int64_t head = 0; head < args.group_size; ++head) {
      const int64_t query = head * args.query_head + t * args.query_row;
      const int64_t seen = args.kv_len - args.num_queries + t + 1;
      std::vector<double> weighted(static_cast<size_t>(args.head_dim));
      double sum = 0.0;
      for (int64_t key = 0; key < seen; ++key) {
        double score = 0.0;
        for (int64_t d = 0; d < args.head_dim; ++d) {
          score += at(args.queries, query + d) * at(args.keys, key * args.kv_row + d);
        }
        const double weight = std::exp(score * double{args.scale});  // the scores are small
        sum += weight;
        for (int64_t d = 0; d < args.head_dim; ++d) {
          weighted[static_cast<size_t>(d)] += weight * at(args.values, key * args.kv_row + d);
        }
      }
      for (const double x : weighted) out.push_back(x / sum);
    }
  }
  return out;
}

void check_causal(const KernelTable& kernels, int64_t group_size, int64_t head_dim, int64_t n, int64_t kv_len) {
  Exact<Bf16> queries(group_size * n * head_dim, 1), keys(kv_len * head_dim, 1), values(kv_len * head_dim, 1);
  queries.fill(random_value), keys.fill(random_value), values.fill(random_value);
  Exact<Bf16> out(n * group_size * head_dim, 1);
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  const CausalArgs args{
      queries.data(), n * head_dim, head_dim, n,     group_size, keys.data(),          values.data(), 0,
      head_dim,       kv_len,       head_dim, scale, out.data(), group_size * head_dim};
  Exact<float> scratch(args.scratch_items(n * group_size));
  scratch.fill([] { return NAN; });
  kernels.attend_causal[static_cast<int>(DType::bf16)](args, 0, 0, n, scratch.data());
  std::vector<float> found;
  for (int64_t i = 0; i < out.size(); ++i) found.push_back(to_float(out[i]));
  const double error = relative_error(found, expected_output(args, 0, n));
  CHECK(error < 6e-3, "%s: group %ld, head_dim %ld, %ld queries of %ld tokens: error %g", kernels.name,
        static_cast<long>(group_size), static_cast<long>(head_dim), static_cast<long>(n), static_cast<long>(kv_len),
        error);
}

}  // namespace
}  // namespace offload::test

int main() {
  using namespace offload;
  for (const std::string& isa : available_isas()) {
    const KernelTable& kernels = kernels_for(isa);
    if (kernels.attend_causal[static_cast<int>(DType::bf16)] == nullptr) continue;
    for (const int64_t head_dim : {32, 64, 96, 256}) {
      for (const int64_t group_size : {1, 4}) {
        test::check_causal(kernels, group_size, head_dim, 1, 1);
        test::check_causal(kernels, group_size, head_dim, 7, 63);
        test::check_causal(kernels, group_size, head_dim, 13, 257);
        test::check_causal(kernels, group_size, head_dim, 65, 66);
      }
    }
    std::printf("%s: ok\n", isa.c_str());
  }
  return 0;
}
