// What goes through the stages of a layer by itself, and into how many pieces attention to it is cut: so that all
// threads are busy, whether there is one long sequence or many short ones.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "attention/layer_pass.h"

namespace offload {

inline constexpr int64_t kMinPieceTokens = 128;  // shorter ones cost more to start than to run

// A unit, or some units of a row that is dense.
struct Lane {
  int row;
  int first_unit;
  int num_units;
  int64_t max_splits;  // pieces that there is room for
};

// One task of attending: some tokens of some units of a row. A dense piece walks page by page, all heads' keys and then
// all heads' values, which is the order of memory: one long sequential stream.
struct Piece {
  int row;
  int first_unit;
  int num_units;
  int64_t begin;  // into the units' tokens
  int64_t n;
  int split;  // its partial results are number `split` of each unit
};

// Into how many pieces each list is cut where all are known beforehand: so that every thread has as many, all of one
// size. Where they would be too small, as many as there are otherwise.
int64_t even_splits(int64_t num_threads, int64_t num_lists, int64_t num_tokens);

class LanePlan {
 public:
  explicit LanePlan(LayerPass& pass) : pass_(pass), setup_(pass.setup) {}

  // Plans the pass. Dense rows are cut at pages, and by heads only when there are too few pages, or heads have pages of
  // their own. What a policy will choose is taken to be its budget.
  void make();
  // Cuts a lane, whose units know their tokens now; returns into how many pieces.
  int64_t split(const Lane& lane);
  Piece piece_of(const Lane& lane, int64_t split) const;

  const std::vector<Lane>& lanes() const { return lanes_; }
  // Units that are answered at once, (row, unit): there is nothing to attend, to report or to learn from them.
  const std::vector<std::pair<int, int>>& null_units() const { return null_units_; }
  // Every unit that is attended here reuses a selection: lanes are cut already, into at most known_splits().
  bool is_known() const { return is_known_; }
  int64_t known_splits() const { return known_splits_; }
  int64_t num_tokens() const { return num_tokens_; }  // attended, in all
  int64_t num_parts() const { return num_parts_; }    // partial results, of all units
  int64_t max_ranges() const { return max_ranges_; }  // that the scoring of a unit is cut into

 private:
  void set_range(Unit& unit) const;
  bool is_null(int r, const Unit& unit) const;
  int64_t alignment_of(const Unit& unit) const;
  int64_t blocks_of(const Unit& unit) const;
  void add(int r, int first_unit, int num_units, int64_t splits);
  void add_dense(int r);
  void make_known();

  LayerPass& pass_;
  AttentionSetup& setup_;
  std::vector<Lane> lanes_;
  std::vector<std::pair<int, int>> null_units_;
  bool is_known_ = false;
  int64_t known_splits_ = 0;
  int64_t num_tokens_ = 0;
  int64_t num_parts_ = 0;
  int64_t piece_tokens_ = 0;  // of a lane, about
  int64_t max_ranges_ = 0;
};

}  // namespace offload
