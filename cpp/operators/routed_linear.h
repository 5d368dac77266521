// Matrices of experts: each row of a step or a prompt meets those that it is routed to. All products of a projection
// are one job of the pool. Where they are packed, few rows of an expert are rounded to int8, and many meet weights that
// are unpacked tile by tile, as those of a Linear.
#pragma once

#include <cstdint>
#include <vector>

#include "operators/linear.h"

namespace offload {

// What is done with the outputs of an expert: nothing; silu(first half) * second half; or clamped_glu of even ones
// (gates) and odd ones.
enum class ExpertGate : int32_t { none = 0, silu = 1, clamped = 2 };

struct ExpertActivation {
  ExpertGate gate = ExpertGate::none;
  float alpha = 0.0f;  // of `clamped`
  float limit = 0.0f;
};

// Pairs of a row and an expert, in the order of experts; those of one expert keep their order.
class Routing {
 public:
  struct Run {
    int64_t expert;
    int64_t begin;  // in order()
    int64_t end;

    int64_t size() const { return end - begin; }
    bool is_few() const { return size() <= kMaxLinearRows; }
  };

  // experts: [num_pairs]; num_experts or more stands for none. Throws for a negative one.
  void set(const int64_t* experts, int64_t num_pairs, int64_t num_experts);
  const std::vector<Run>& runs() const { return runs_; }
  const std::vector<int64_t>& order() const { return order_; }  // pairs

 private:
  std::vector<Run> runs_;
  std::vector<int64_t> order_;
  std::vector<int64_t> begins_;
};

class RoutedLinear {
 public:
  // block: of all experts, one after the other; its bias [num_experts, out_features of one] or null.
  RoutedLinear(DType dtype, int64_t in_features, const WeightBlock& block, int64_t num_experts,
               ExpertActivation activation);

  int64_t num_experts() const { return num_experts_; }
  int64_t columns() const { return columns_; }  // of the result
  DType dtype() const { return dtype_; }

  // out: [num_pairs, columns]; pair p <- the activation of x[p / pairs_per_row] through its expert. Pairs of no expert
  // are left alone.
  void run(const KernelTable& kernels, WorkerPool& pool, const void* x, int64_t num_rows, int64_t pairs_per_row,
           const Routing& routing, void* out) const;

 private:
  struct Tile;
  struct Block;
  struct Inputs;
  void run_tile(const KernelTable& kernels, const Tile& tile, const Inputs& inputs, void* out) const;
  void finish_rows(const KernelTable& kernels, const int64_t* pairs, int64_t num_rows, const char* y, int64_t first,
                   int64_t columns, void* out) const;

  const DType dtype_;
  const int64_t in_features_;
  const WeightBlock block_;
  const int64_t num_experts_;
  const ExpertActivation activation_;
  const int64_t out_features_;  // of an expert
  const int64_t columns_;
};

struct RoutedInput {
  const void* x;  // [num_tokens, up's in_features]
  int64_t num_tokens;
  const int64_t* experts;  // [num_tokens, per_token]
  const float* weights;    // [num_tokens, per_token]
  int64_t per_token;
};

// The `per_token` experts of the highest probabilities of each row of `logits` [num_rows, num_experts] of a dtype,
// which are a softmax in float32, in descending order; of equals the first. Of a row without finite probabilities the
// first experts, with weights that are NaN.
struct ExpertChoice {
  int64_t per_token;
  bool normalises;  // weights are divided by their sum
  bool rounds;      // weights are rounded to the dtype
};
void choose_experts(const KernelTable& kernels, DType dtype, const void* logits, int64_t num_rows, int64_t num_experts,
                    const ExpertChoice& choice, int64_t* experts, float* weights);

// out[t] = Σ_j weights[t][j] * down(up(x[t])) of expert experts[t][j], summed in the order of j in float32.
void run_experts(const KernelTable& kernels, WorkerPool& pool, const RoutedLinear& up, const RoutedLinear& down,
                 const RoutedInput& input, void* out);

// An MLP of experts: the router's outputs choose them.
struct RoutedMlp {
  const Linear* router;
  const RoutedLinear* up;
  const RoutedLinear* down;
  ExpertChoice choice;

  // out <- the experts' sum of x, both [num_rows, down's columns]. Not by two threads at a time.
  void run(const KernelTable& kernels, WorkerPool& pool, const void* x, int64_t num_rows, void* out) const;
};

}  // namespace offload
