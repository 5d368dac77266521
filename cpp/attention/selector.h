// Chooses what a unit attends to: asks the policy, scores what it proposes, and cuts the choice to a share of the
// weight. Called from several workers at a time, each for other units or other ranges of one.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention/layer_pass.h"

namespace offload {

class Selector {
 public:
  explicit Selector(LayerPass& pass) : pass_(pass), setup_(pass.setup) {}

  // The policy's prepare() of a row of any layer; `together`: units that the worker prepares before it asks.
  void prepare(int64_t layer_idx, const std::vector<QueryRow>& rows, int r, int u, int64_t together, int worker);
  // For policies that do not scan all keys: select() alone, or propose(), whose candidates are scored next. What
  // propose() answered is written.
  void ask(int r, int u, int worker);

  // Codes that propose() left to the workers: those of a range of tokens, and what follows the last range.
  void scan(int r, int u, int64_t range, int worker);
  void finish_scan(int r, int u, int worker);
  // Whether all that propose named is chosen as it is, ahead; and to choose it.
  bool takes_all(int r, int u) const;
  void take_all(int r, int u);
  // Scores of a range of what a unit considers, and what follows the last range: attention weights over all of it, and
  // the policy's choice among its candidates.
  void score_range(int r, int u, int64_t range, int worker);
  void finish_proposal(int r, int u, int worker);

  // Sinks, the policy's choice, recent tokens: sorted and unique by construction. `importance` of all tokens, or null.
  void select(int r, int u, const float* importance, int worker);

  // The weights of attended tokens [first, last) of a unit whose candidates were scored.
  void gather_weights(Unit& unit, int64_t first, int64_t last) const;

  // Units whose selections ended at a share of the weight, and the tokens of these, since the last call.
  std::pair<int64_t, int64_t> take_chosen() { return {chosen_units_.exchange(0), chosen_tokens_.exchange(0)}; }

 private:
  void propose(int r, int u, int worker);
  void call_propose(int r, int u, int64_t may_defer, int worker);
  void scan_codes(int r, int u, int64_t range);
  void rank_range(int r, int u, int64_t range);
  void write_answer(int r, int u, float* output, const float* lse);
  bool takes_list(int r, int u);
  // Whether nobody asks for weights: what propose names is the choice, if there is room.
  bool is_unscored(int r, int u) const;
  void list_considered(int64_t kv_len, const int32_t* chosen, int64_t n, std::vector<int32_t>* tokens) const;
  void make_room(Candidates& candidates) const;
  int64_t cut_to_mass(int32_t* chosen, int64_t count, const float* importance, int64_t sinks_before, int64_t last,
                      int64_t recent) const;
  void count_chosen(const Unit& unit);
  PolicyContext context(int r, int u, int worker) const;

  LayerPass& pass_;
  AttentionSetup& setup_;
  std::atomic<int64_t> chosen_units_{0}, chosen_tokens_{0};  // since take_chosen()
};

}  // namespace offload
