// Decode attention over KV heads with pages of their own and different numbers of tokens, on 1 to 4 threads, for the
// sanitizers. Each head is compared with a call of its own, as the only head of a sequence that has its tokens; pages
// and tables are of exactly their size.
#include <algorithm>
#include <thread>
#include <vector>

#include "check.h"
#include "selections.h"
#include "attention/decode_attention.h"
#include "kernels/kernels.h"
#include "kernels/number_formats.h"

namespace offload::test {
namespace {

constexpr int64_t kSinks = 4, kRecent = 8, kBudget = 64;

struct Sequence {
  int64_t kv_len;
  int64_t capacity;  // pages of a head's table
  std::vector<Exact<uint16_t>> pages;
  Exact<int64_t> table;   // [num_kv_heads, capacity]
  Exact<int64_t> starts;  // [num_kv_heads]

  Sequence(const AttentionShape& shape, int64_t len)
      : kv_len(len),
        capacity(ceil_div(len, int64_t{1} << shape.page_shift)),
        table(shape.num_kv_heads * capacity),
        starts(shape.num_kv_heads) {
    const int64_t page_tokens = int64_t{1} << shape.page_shift;
    for (int h = 0; h < shape.num_kv_heads; ++h) {
      const int64_t missing = uniform(0, 2) == 0 ? 0 : uniform(0, capacity - 1);  // of its pages
      starts[h] = missing * page_tokens;
      for (int64_t p = 0; p < capacity; ++p) {
        table[h * capacity + p] = 0;
        if (p < missing) continue;
        pages.emplace_back(2 * page_tokens * shape.head_dim);
        pages.back().fill([] { return from_float<Bf16>(normal()).bits; });
        table[h * capacity + p] = reinterpret_cast<int64_t>(pages.back().data());
      }
    }
  }
};

// Every other token.
int64_t propose(PolicyContext* context) {
  static thread_local std::vector<int32_t> tokens;
  tokens.clear();
  for (int64_t t = context->first; t < context->last; t += 2) tokens.push_back(static_cast<int32_t>(t));
  context->candidates = tokens.data();
  return static_cast<int64_t>(tokens.size());
}

PolicyFunctions make_policy(int64_t kind) {
  PolicyFunctions policy;
  policy.budget_tokens = policy.dense_tokens = kBudget;
  policy.sink_tokens = kSinks;
  policy.recent_tokens = kRecent;
  policy.scans_keys = kind == 0;
  if (kind == 0) policy.select = select_scanned;
  if (kind == 1) policy.select = select_scored;
  if (kind == 2) policy.propose = propose;
  policy.per_query_head = uniform(0, 2) == 0;
  if (uniform(0, 1) != 0) policy.top_p = 0.7;
  return policy;
}

struct Outputs {
  std::vector<float> out;  // [rows, num_qo_heads, head_dim]
  std::vector<float> lse;  // [rows, num_qo_heads]
  std::vector<std::vector<int32_t>> selection;
};

// Rows of the whole shape, or of one head of it.
Outputs run(DecodeAttention& attention, std::vector<QueryRow> rows, bool sparse, const AttendOptions& options) {
  const AttentionShape& shape = attention.shape();
  const auto heads = static_cast<size_t>(shape.num_qo_heads);
  const auto elements = heads * static_cast<size_t>(shape.head_dim);
  Outputs result{std::vector<float>(rows.size() * elements, NAN), std::vector<float>(rows.size() * heads, NAN), {}};
  for (size_t r = 0; r < rows.size(); ++r) {
    rows[r].output = result.out.data() + r * elements;
    rows[r].lse = result.lse.data() + r * heads;
  }
  const std::string failure = attention.attend(0, rows, sparse, 0, true, options);
  CHECK(failure.empty(), "%s", failure.c_str());
  if (options.defers_updates) attention.update();
  attention.remember();
  int32_t stop = 0;
  attention.warm_up(0, rows, 0, &stop, options.elsewhere);
  attention.run_probes();
  result.selection = attention.last_selection();
  for (float& x : result.lse) x = std::clamp(x, -100.0f, 100.0f);  // infinite where a window holds all
  return result;
}

void stress(const AttentionShape& shape, WorkerPool& pool, WorkerPool& alone, int rounds) {
  AttentionShape one = shape;
  one.num_qo_heads = shape.group_size();
  one.num_kv_heads = 1;
  DecodeAttention all({shape}, *scalar_table(), pool), single({one}, *scalar_table(), alone);
  all.probe().start(0.5, 7);
  const int64_t query_elements = int64_t{shape.num_qo_heads} * shape.head_dim;
  const auto of_head = static_cast<size_t>(one.num_qo_heads * shape.head_dim);
  for (int round = 0; round < rounds; ++round) {
    std::vector<Sequence> sequences;
    for (int i = 0; i < 2; ++i) sequences.emplace_back(shape, uniform(1, i == 0 ? 1500 : 150));
    const PolicyFunctions policy = make_policy(round % 3);
    all.set_policy(policy);
    single.set_policy(policy);
    const bool sparse = round % 5 != 0;
    std::vector<uint8_t> elsewhere(static_cast<size_t>(shape.num_kv_heads));
    for (uint8_t& x : elsewhere) x = uniform(0, 3) == 0;
    AttendOptions options;
    options.window_on_device = uniform(0, 1) != 0;
    options.sink_tokens = kSinks;
    options.recent_tokens = kRecent;
    options.float_output = true;
    options.defers_updates = uniform(0, 1) != 0;
    options.elsewhere = elsewhere.data();
    const auto n = static_cast<size_t>(uniform(1, 3));
    std::vector<uint16_t> queries(n * static_cast<size_t>(query_elements));
    for (uint16_t& q : queries) q = from_float<Bf16>(normal()).bits;
    std::vector<QueryRow> rows(n);
    for (size_t r = 0; r < n; ++r) {
      const Sequence& sequence = sequences[r % 2];
      const int64_t first = *std::max_element(sequence.starts.data(), sequence.starts.data() + shape.num_kv_heads);
      rows[r].pages = sequence.table.data();
      rows[r].starts = sequence.starts.data();
      rows[r].head_stride = sequence.capacity;
      rows[r].kv_len = r < 2 ? sequence.kv_len : uniform(first + 1, sequence.kv_len);
      rows[r].query = queries.data() + r * static_cast<size_t>(query_elements);
    }
    const Outputs actual = run(all, rows, sparse, options);
    const size_t per_head = static_cast<size_t>(all.num_units() / shape.num_kv_heads);
    for (int h = 0; h < shape.num_kv_heads; ++h) {
      for (size_t r = 0; r < n; ++r) {
        QueryRow row{};
        row.pages = rows[r].pages + h * rows[r].head_stride + (rows[r].starts[h] >> shape.page_shift);
        row.kv_len = rows[r].kv_len - rows[r].starts[h];
        row.query = static_cast<const uint16_t*>(rows[r].query) + static_cast<size_t>(h) * of_head;
        AttendOptions of_one = options;
        of_one.elsewhere = elsewhere.data() + h;
        const Outputs expected = run(single, {row}, sparse, of_one);
        const float* out =
            actual.out.data() + r * static_cast<size_t>(query_elements) + static_cast<size_t>(h) * of_head;
        const float* lse = actual.lse.data() + r * static_cast<size_t>(shape.num_qo_heads) + h * one.num_qo_heads;
        if (elsewhere[static_cast<size_t>(h)] == 0) {
          CHECK(relative_error(std::vector<float>(out, out + of_head), expected.out) < 1e-3, "o of head %d", h);
        } else {
          CHECK(std::all_of(out, out + of_head, [](float x) { return std::isnan(x); }), "head %d is not touched", h);
        }
        CHECK(relative_error(std::vector<float>(lse, lse + one.num_qo_heads), expected.lse) < 1e-4, "lse of %d", h);
        for (size_t u = 0; u < per_head; ++u) {
          const size_t unit = r * static_cast<size_t>(all.num_units()) + static_cast<size_t>(h) * per_head + u;
          CHECK(actual.selection[unit] == expected.selection[u], "selection of head %d", h);
        }
      }
    }
  }
  CHECK(all.probe().num_found() > 0, "probes");
}

}  // namespace
}  // namespace offload::test

int main(int argc, char**) {
  using namespace offload;
  using namespace offload::test;
  const int rounds = argc > 1 ? 300 : 30;  // any argument: a long run
  WorkerPool alone(1);
  for (int num_threads = 1; num_threads <= 4; ++num_threads) {
    WorkerPool pool(num_threads, 30);
    stress({6, 3, 32, 4, DType::bf16, 0.2f, DType::bf16}, pool, alone, rounds);
    stress({4, 4, 16, 8, DType::bf16, 0.25f, DType::bf16}, pool, alone, rounds);
  }
  std::puts("ok");
}
