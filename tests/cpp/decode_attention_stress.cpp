// Decode attention with ragged batches, scans and stateful C++ policies on 1 to 4 threads, for the sanitizers. Every
// result is compared with the same call on one thread, on fresh pages of exactly their size.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "selections.h"
#include "attention/decode_attention.h"
#include "attention/policy_context.h"
#include "kernels/kernels.h"
#include "kernels/number_formats.h"

namespace offload::test {
namespace {

// Rows of one page: all of them distinct, and together the whole page.
void check_page_layout(const AttentionShape& shape) {
  const int64_t page_tokens = int64_t{1} << shape.page_shift;
  const int64_t page_bytes = 2 * shape.num_kv_heads * page_tokens * shape.row_bytes();
  const int64_t addresses[2] = {1 << 20, int64_t{1} << 40};  // 64-bit: the second page lies far away
  std::vector<bool> taken(static_cast<size_t>(page_bytes / shape.row_bytes()), false);
  for (int head = 0; head < shape.num_kv_heads; ++head) {
    for (const RowSource& source : {shape.keys(addresses, head), shape.values(addresses, head)}) {
      for (int64_t t = 0; t < 2 * page_tokens; ++t) {
        const auto at = reinterpret_cast<int64_t>(source.row(t)) - addresses[t / page_tokens];
        CHECK(at >= 0 && at < page_bytes && at % shape.row_bytes() == 0, "token %lld lies at %lld",
              static_cast<long long>(t), static_cast<long long>(at));
        if (t >= page_tokens) continue;
        CHECK(!taken[static_cast<size_t>(at / shape.row_bytes())], "token %lld", static_cast<long long>(t));
        taken[static_cast<size_t>(at / shape.row_bytes())] = true;
      }
      const auto step = reinterpret_cast<int64_t>(source.row(1)) - reinterpret_cast<int64_t>(source.row(0));
      CHECK(page_tokens == 1 || step == shape.row_bytes(), "rows of a head follow each other");
    }
  }
  CHECK(std::find(taken.begin(), taken.end(), false) == taken.end(), "a page has no gaps");
}

constexpr int kMaxTokens = 4096;
constexpr int64_t kNumLayers = 3;
constexpr int64_t kNumArrays = 3;  // of one of two members
constexpr int64_t kAllArrays = 2 * kNumArrays + kNumEstimateArrays;
constexpr int64_t kClusters = 5;

// A sequence: its pages, and the arrays a policy keeps for it.
struct Sequence {
  std::vector<Exact<uint16_t>> pages;
  std::vector<int64_t> addresses;
  std::vector<float> attended;    // [members, units, kMaxTokens]
  std::vector<int64_t> appends;   // [members, units]
  std::vector<int32_t> proposed;  // [members, units, kMaxTokens]
  std::vector<EstimateHeader> headers;
  std::vector<float> means[2], inverse_norms, undo;
  std::vector<int32_t> counts;
  std::vector<uint8_t> cluster_of;
  void* arrays[(kNumLayers + 1) * kAllArrays];  // all layers have the same

  Sequence(const AttentionShape& shape, int64_t kv_len)
      : headers(static_cast<size_t>(shape.num_kv_heads), EstimateHeader{0, kv_len, 0, 0}),
        inverse_norms(headers.size() * kClusters, 1.0f),
        undo(headers.size() * static_cast<size_t>(2 * shape.head_dim + 2), 0.0f),
        counts(headers.size() * kClusters, 1),
        cluster_of(headers.size() * static_cast<size_t>(kv_len), kNoCluster),
        attended(2 * static_cast<size_t>(shape.num_qo_heads) * kMaxTokens, 0.0f),
        appends(2 * static_cast<size_t>(shape.num_qo_heads), 0),
        proposed(2 * static_cast<size_t>(shape.num_qo_heads) * kMaxTokens, 0) {
    const int64_t page_tokens = int64_t{1} << shape.page_shift;
    for (int64_t t = 0; t < kv_len; t += page_tokens) {
      pages.emplace_back(2 * shape.num_kv_heads * page_tokens * shape.head_dim);
      pages.back().fill([] { return from_float<Bf16>(normal()).bits; });
      addresses.push_back(reinterpret_cast<int64_t>(pages.back().data()));
    }
    for (std::vector<float>& of : means) {
      of.resize(counts.size() * static_cast<size_t>(shape.head_dim));
      for (float& x : of) x = normal();
    }
    first_means[0] = means[0];
    first_means[1] = means[1];
    point();
  }
  void point() {
    for (size_t i = 0; i < 2 * (kNumLayers + 1); ++i) {
      const size_t member = i % 2;
      void** own = arrays + i / 2 * kAllArrays + member * kNumArrays;
      own[0] = attended.data() + member * attended.size() / 2;
      own[1] = appends.data() + member * appends.size() / 2;
      own[2] = proposed.data() + member * proposed.size() / 2;
      void* const of_estimate[] = {headers.data(), means[0].data(), means[1].data(),  inverse_norms.data(),
                                   counts.data(),  undo.data(),     cluster_of.data()};
      std::copy_n(of_estimate, kNumEstimateArrays, arrays + (i / 2 + 1) * kAllArrays - kNumEstimateArrays);
    }
  }
  void reset() {
    std::fill(attended.begin(), attended.end(), 0.0f);
    std::fill(appends.begin(), appends.end(), 0);
    for (EstimateHeader& header : headers) header = {0, header.capacity, 0, 0};
    std::copy(first_means[0].begin(), first_means[0].end(), means[0].begin());
    std::copy(first_means[1].begin(), first_means[1].end(), means[1].begin());
    std::fill(inverse_norms.begin(), inverse_norms.end(), 1.0f);
    std::fill(counts.begin(), counts.end(), 1);
    std::fill(cluster_of.begin(), cluster_of.end(), kNoCluster);
  }

 private:
  std::vector<float> first_means[2];
};

void observe(PolicyContext* context) {
  float* attended = static_cast<float*>(context->arrays[0]) + context->unit * kMaxTokens;
  for (int64_t g = 0; g < context->group_size; ++g) {
    for (int64_t i = 0; i < context->num_indices; ++i) {
      attended[context->indices[i]] += context->weights[g * context->num_indices + i];
    }
  }
}

void append(PolicyContext* context) { static_cast<int64_t*>(context->arrays[1])[context->unit] += context->kv_len; }

// Every other token; the last unit of an odd length is answered instead.
int64_t propose(PolicyContext* context) {
  if (context->kv_len % 2 == 1 && context->kv_head > 0) {
    std::fill_n(context->output, context->group_size * context->head_dim, 0.5f);
    std::fill_n(context->lse, context->group_size, 1.0f);
    return kAnswered;
  }
  int32_t* tokens = static_cast<int32_t*>(context->arrays[2]) + context->unit * kMaxTokens;
  int64_t count = 0;
  for (int64_t t = context->first; t < context->last; t += 2) tokens[count++] = static_cast<int32_t>(t);
  context->candidates = tokens;
  return count;
}

// Candidates by codes: enough of them that workers score them together.
constexpr int64_t kCodedTokens = 2 * kMinScanCodes + 100;
constexpr int64_t kListed = 200;

int64_t propose_coded(PolicyContext* context) {
  static const int64_t num_tokens = ceil_div(kCodedTokens, kCodeBlock) * kCodeBlock;
  static const auto codes = [] {
    std::vector<uint8_t> bytes(static_cast<size_t>(num_tokens * kMaxHeadDim / 8));
    for (uint8_t& x : bytes) x = static_cast<uint8_t>(uniform(0, 255));
    return bytes;
  }();
  static const std::vector<float> scales(static_cast<size_t>(num_tokens), 1.0f), offsets(kMaxGroupSize, 0.0f);
  static const float levels[] = {-1.0f, 1.0f};
  auto* tokens = static_cast<int32_t*>(context->arrays[2]) + context->unit * kMaxTokens;
  context->candidates = tokens;
  return context->top_codes(context, context->query, offsets.data(), codes.data(), scales.data(), levels, 1, kListed,
                            tokens);
}

// Leaves codes to the workers, and then considers something else.
int64_t propose_other(PolicyContext* context) {
  propose_coded(context);
  static const int32_t tokens[] = {100, 200, 300};
  context->candidates = tokens;
  return 3;
}

int64_t select_too_many(PolicyContext* context) { return context->budget_tokens + 1; }

struct Results {
  std::vector<float> out;
  std::vector<float> lse;
  std::vector<std::vector<int32_t>> selection;
  std::vector<float> attended;
  std::vector<int64_t> appends;
};

struct Step {
  AttentionShape shape;
  PolicyFunctions policy;
  bool sparse;
  AttendOptions options;
  std::vector<Sequence*> sequences;
  std::vector<int64_t> kv_lens;
  std::vector<uint16_t> queries;
  std::vector<int64_t> budgets{};  // of rows; empty: the policy's
};

Results run(const Step& step, DecodeAttention& attention) {
  const auto row_elements = static_cast<size_t>(step.shape.num_qo_heads * step.shape.head_dim);
  const size_t n = step.kv_lens.size();
  const size_t item = step.options.float_output ? 2 : 1;       // in uint16_t
  std::vector<uint16_t> out(n * row_elements * item, 0x7fc0);  // NaN
  Results results;
  results.lse.assign(n * static_cast<size_t>(step.shape.num_qo_heads), NAN);
  std::vector<QueryRow> rows(n);
  for (size_t r = 0; r < n; ++r) {
    step.sequences[r]->reset();
    rows[r].pages = step.sequences[r]->addresses.data();
    rows[r].kv_len = step.kv_lens[r];
    rows[r].query = step.queries.data() + r * row_elements;
    rows[r].output = out.data() + r * row_elements * item;
    rows[r].lse = results.lse.data() + r * static_cast<size_t>(step.shape.num_qo_heads);
    rows[r].arrays = step.sequences[r]->arrays;
    if (!step.budgets.empty()) rows[r].budget_tokens = step.budgets[r];
  }
  attention.set_policy(step.policy);
  const int64_t num_layers = step.policy.roles.empty() ? 1 : kNumLayers;
  for (int64_t layer_idx = 0; layer_idx < num_layers; ++layer_idx) {  // all over the same pages
    attention.prepare(layer_idx, rows);
    const std::string failure = attention.attend(layer_idx, rows, step.sparse, 0, false, step.options);
    CHECK(failure.empty(), "%s", failure.c_str());
    if (step.sparse && step.options.defers_updates) attention.update();
  }
  attention.run_probes();  // those that were deferred, too
  for (size_t i = 0; i < n * row_elements; ++i) {
    float x = to_float(Bf16{out[i]});
    if (step.options.float_output) std::memcpy(&x, out.data() + i * item, sizeof x);
    results.out.push_back(x);
  }
  for (float& x : results.lse) x = std::clamp(x, -100.0f, 100.0f);  // infinite where a window holds all, or none counts
  results.selection = attention.last_selection();
  for (Sequence* sequence : step.sequences) {
    results.attended.insert(results.attended.end(), sequence->attended.begin(), sequence->attended.end());
    results.appends.insert(results.appends.end(), sequence->appends.begin(), sequence->appends.end());
  }
  return results;
}

void compare(const Results& actual, const Results& expected) {
  // Pieces merge in another order: outputs move by a rounding, and near-ties of a selection may swap.
  CHECK(relative_error(actual.out, expected.out) < 1e-2, "o");
  CHECK(relative_error(actual.lse, expected.lse) < 1e-4, "lse");
  CHECK(relative_error(actual.attended, expected.attended) < 1e-2, "observed weights");
  CHECK(actual.appends == expected.appends, "appends");
  CHECK(actual.selection.size() == expected.selection.size(), "units");
  for (size_t u = 0; u < actual.selection.size(); ++u) {
    CHECK(actual.selection[u].size() == expected.selection[u].size(), "unit %zu", u);
    CHECK(std::is_sorted(actual.selection[u].begin(), actual.selection[u].end()), "unit %zu", u);
  }
}

// The same were drawn, and kept as much, whatever the threads.
void compare_probes(const DecodeAttention& actual, const DecodeAttention& expected) {
  const std::vector<MassKept> found = actual.probe().found(), wanted = expected.probe().found();
  CHECK(found.size() == wanted.size(), "heads");
  int64_t num_found = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    num_found += found[i].count;
    CHECK(found[i].count == wanted[i].count, "head %zu: %lld", i, static_cast<long long>(found[i].count));
    CHECK(std::abs(found[i].sum - wanted[i].sum) <= 1e-3 * static_cast<double>(found[i].count), "head %zu", i);
  }
  CHECK(num_found > 0 && num_found == actual.probe().num_found(), "%lld", static_cast<long long>(num_found));
}

// Units take turns at retrieving or selecting for the layers below.
std::vector<uint8_t> make_roles(int64_t units, bool scans_keys) {
  std::vector<uint8_t> roles;
  for (int64_t layer_idx = 0; layer_idx < kNumLayers; ++layer_idx) {
    for (int64_t u = 0; u < units; ++u) {
      const Role asking = scans_keys && u % 2 == 0 ? Role::retrieve : Role::select;
      roles.push_back(static_cast<uint8_t>(layer_idx == 0 || (layer_idx + u) % 3 == 0 ? asking : Role::reuse));
    }
  }
  return roles;
}

PolicyFunctions make_policy(bool scans_keys, bool per_query_head) {
  PolicyFunctions policy;
  policy.budget_tokens = policy.dense_tokens = 64;
  policy.sink_tokens = 4;
  policy.recent_tokens = 8;
  policy.num_arrays = kAllArrays;
  policy.scans_keys = scans_keys;
  policy.per_query_head = per_query_head;
  policy.select = scans_keys ? select_scanned : select_scored;
  policy.prepare = append;  // counts as well
  policy.observe = observe;
  policy.append = append;
  return policy;
}

// Units by turns of a second member, dense, and of the first.
void add_member(PolicyFunctions& policy, int64_t units, PolicyMember second) {
  second.first_array = kNumArrays;
  policy.others.push_back(second);
  for (int64_t layer_idx = 0; layer_idx < kNumLayers; ++layer_idx) {
    int32_t numbers[2] = {0, 0};
    for (int64_t u = 0; u < units; ++u) {
      const bool is_dense = (layer_idx + u) % 4 == 1;
      const auto member = static_cast<uint8_t>((layer_idx + u) % 2 == 0);
      policy.roles.push_back(static_cast<uint8_t>(is_dense ? Role::dense : Role::select));
      policy.member_of.push_back(is_dense ? 0 : member);
      policy.number_of.push_back(is_dense ? 0 : numbers[member]++);
    }
  }
}

void stress(const AttentionShape& shape, int rounds) {
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (const int64_t kv_len : {1, 63, 64, 65, 300, 1025, 3000}) {
    sequences.push_back(std::make_unique<Sequence>(shape, kv_len));
  }
  const int64_t capacities[] = {1, 63, 64, 65, 300, 1025, 3000};
  for (int num_threads = 2; num_threads <= 4; ++num_threads) {
    WorkerPool alone(1), pool(num_threads, 30);
    DecodeAttention serial({shape}, *scalar_table(), alone), parallel({shape}, *scalar_table(), pool);
    serial.probe().start(0.5, 7);
    parallel.probe().start(0.5, 7);
    std::atomic<bool> over{false};
    std::thread reader([&] {  // somebody asks while others decode
      while (!over.load()) {
        CHECK(parallel.probe().num_found() >= 0 && parallel.probe().found().size() < 64, "found");
        std::this_thread::yield();
      }
    });
    for (int round = 0; round < rounds; ++round) {
      Step step{shape, make_policy(round % 2 == 0, round % 3 == 0), round % 5 != 0, {}, {}, {}, {}};
      if (round % 4 == 3) step.policy.propose = propose;  // chooses the heaviest itself
      if (round % 4 == 3) step.policy.select = nullptr;
      if (round % 3 == 1) {
        const int64_t units = step.policy.per_query_head ? shape.num_qo_heads : shape.num_kv_heads;
        step.policy.roles = make_roles(units, step.policy.scans_keys);
        step.policy.shares_selection = round % 4 != 1;
      }
      if (round % 3 == 2) {  // one that scans keys and one that does not, which may propose
        add_member(step.policy, shape.num_kv_heads, make_policy(round % 2 == 1, false));
        if (uniform(0, 1) != 0) std::swap<PolicyMember>(step.policy, step.policy.others[0]);
        step.policy.first_array = 0;
        step.policy.others[0].first_array = kNumArrays;
      }
      if (!step.policy.shares_selection && uniform(0, 1) != 0) step.policy.top_p = 0.7;
      if (uniform(0, 1) != 0) step.policy.estimate_clusters = kClusters;
      if (round % 2 == 1) parallel.start_profile();
      step.options.window_on_device = uniform(0, 1) != 0;
      step.options.sink_tokens = step.policy.sink_tokens;
      step.options.recent_tokens = step.policy.recent_tokens;
      step.options.float_output = uniform(0, 1) != 0;
      step.options.defers_updates = uniform(0, 1) != 0;
      std::vector<size_t> order{0, 1, 2, 3, 4, 5, 6};
      std::shuffle(order.begin(), order.end(), generator());
      const auto n = static_cast<size_t>(round % 4 == 1 ? 1 : uniform(1, 5));
      for (size_t i = 0; i < n; ++i) {
        step.sequences.push_back(sequences[order[i]].get());
        step.kv_lens.push_back(round % 2 == 0 ? capacities[order[i]] : uniform(1, capacities[order[i]]));
        const int64_t budgets[] = {0, kAttendsToAll, uniform(12, 64)};
        step.budgets.push_back(budgets[uniform(0, 2)]);
      }
      step.queries.resize(n * static_cast<size_t>(shape.num_qo_heads * shape.head_dim));
      for (uint16_t& q : step.queries) q = from_float<Bf16>(normal()).bits;
      compare(run(step, parallel), run(step, serial));
    }
    over.store(true);
    reader.join();
    compare_probes(parallel, serial);
  }
}

// Two rows, one of which is long enough for its codes to be shared out.
void check_shared_codes(const AttentionShape& shape) {
  Sequence of_many(shape, kCodedTokens), of_few(shape, 900);
  Step step{shape, make_policy(false, false), true, {}, {&of_many, &of_few}, {kCodedTokens, 900}, {}};
  step.policy.propose = propose_coded;
  step.policy.select = nullptr;
  step.policy.observe = nullptr;
  step.queries.resize(2 * static_cast<size_t>(shape.num_qo_heads * shape.head_dim));
  for (uint16_t& q : step.queries) q = from_float<Bf16>(normal()).bits;
  WorkerPool alone(1), pool(4, 30);
  DecodeAttention serial({shape}, *scalar_table(), alone), parallel({shape}, *scalar_table(), pool);
  serial.probe().start(0.5, 7);
  parallel.probe().start(0.5, 7);
  const Results expected = run(step, serial), actual = run(step, parallel);
  compare(actual, expected);
  CHECK(actual.selection == expected.selection, "the same candidates");
  step.policy.propose = propose_other;
  CHECK(run(step, parallel).selection == run(step, serial).selection, "other candidates");
}

// A select that returns nonsense and a NaN in the cache end in a message, with and without a scan.
void check_failures(const AttentionShape& shape) {
  Sequence sequence(shape, 600);
  std::vector<uint16_t> query(static_cast<size_t>(shape.num_qo_heads * shape.head_dim), 0x3f80), out(query.size());
  QueryRow row{};
  row.pages = sequence.addresses.data();
  row.kv_len = 600;
  row.query = query.data();
  row.output = out.data();
  row.arrays = sequence.arrays;
  WorkerPool pool(3, 30);
  DecodeAttention attention({shape}, *scalar_table(), pool);
  for (const bool poisoned : {false, true}) {
    if (poisoned) sequence.pages[1][5] = 0x7fc0;
    for (const bool scans_keys : {false, true}) {
      PolicyFunctions policy = make_policy(scans_keys, false);
      if (!poisoned) policy.select = select_too_many;
      attention.set_policy(policy);
      const std::string failure = attention.attend(3, {row}, true);
      // Without a scan a policy may have left the NaN out.
      CHECK(failure.find("layer 3") != std::string::npos || (poisoned && !scans_keys), "'%s'", failure.c_str());
    }
  }
  CHECK(!attention.attend(3, {row}, false).empty(), "dense attention over a NaN");
}

// Rows with nothing to attend are answered while the pool is somebody else's: nobody waits for it.
void check_null_work(const AttentionShape& shape) {
  Sequence sequence(shape, 300);
  std::vector<uint16_t> query(static_cast<size_t>(shape.num_qo_heads * shape.head_dim), 0x3f80);
  std::vector<float> out(query.size()), lse(static_cast<size_t>(shape.num_qo_heads));
  QueryRow row{};
  row.pages = sequence.addresses.data();
  row.query = query.data();
  row.output = out.data();
  row.lse = lse.data();
  WorkerPool pool(2, 30);
  DecodeAttention attention({shape}, *scalar_table(), pool);
  PolicyFunctions policy;  // sinks and recent tokens, all in the window
  policy.budget_tokens = policy.dense_tokens = 64;
  policy.sink_tokens = 4;
  policy.recent_tokens = 60;
  attention.set_policy(policy);
  AttendOptions options;
  options.window_on_device = true;
  options.sink_tokens = 4;
  options.recent_tokens = 60;
  options.float_output = true;
  options.defers_updates = true;
  std::atomic<int> arrived{0};
  std::atomic<bool> leave{false};
  std::thread holder([&] {
    pool.parallel_for(2, [&](int64_t, int) {
      arrived.fetch_add(1);
      while (!leave.load()) std::this_thread::yield();
    });
  });
  while (arrived.load() < 1) std::this_thread::yield();
  for (const int64_t kv_len : {1, 64, 65, 300}) {  // dense, and under the policy
    std::fill(out.begin(), out.end(), NAN);
    std::fill(lse.begin(), lse.end(), NAN);
    row.kv_len = kv_len;
    CHECK(attention.attend(0, {row}, true, 0, false, options).empty(), "nothing to attend");
    attention.update();
    for (const float x : out) CHECK(x == 0.0f, "kv_len %lld", static_cast<long long>(kv_len));
    for (const float x : lse) CHECK(x == -INFINITY, "kv_len %lld", static_cast<long long>(kv_len));
    const std::vector<std::vector<int32_t>> selection = attention.last_selection();
    for (const std::vector<int32_t>& tokens : selection) {
      CHECK(tokens.size() == (kv_len > 64 ? 64 : 0), "kv_len %lld", static_cast<long long>(kv_len));
      CHECK(tokens.empty() || tokens.back() == kv_len - 1, "kv_len %lld", static_cast<long long>(kv_len));
    }
  }
  leave.store(true);
  holder.join();
}

}  // namespace
}  // namespace offload::test

int main(int argc, char**) {
  using namespace offload;
  using namespace offload::test;
  const int rounds = argc > 1 ? 200 : 12;  // any argument: a long run
  for (const int page_shift : {0, 4, 8}) {
    for (const int heads : {1, 3, 8})
      check_page_layout({heads * 2, heads, 48, page_shift, DType::bf16, 1.0f, DType::bf16});
  }
  const AttentionShape shapes[] = {{6, 2, 32, 4, DType::bf16, 0.2f, DType::bf16},
                                   {4, 4, 16, 8, DType::bf16, 0.25f, DType::bf16},
                                   {5, 1, 48, 8, DType::bf16, 0.15f, DType::bf16}};
  for (const AttentionShape& shape : shapes) {
    stress(shape, rounds);
    check_failures(shape);
    check_null_work(shape);
  }
  check_shared_codes(shapes[0]);
  std::puts("ok");
}
