#include "attention/layer_pass.h"

#include <algorithm>
#include <cstring>

#include "kernels/number_formats.h"

namespace offload {

void LayerPass::begin(int64_t layer, const std::vector<QueryRow>& query_rows, bool sparse, int first_row_of_step,
                      const AttendOptions& attend_options) {
  layer_idx = layer;
  rows = query_rows;
  num_units = rows.size() * static_cast<size_t>(setup.units());
  first_row = first_row_of_step;
  options = attend_options;
  queries_loaded_ = false;
  if (num_units > units_capacity_) {
    units_capacity_ = num_units;
    units_ = std::make_unique<Unit[]>(units_capacity_);
  }
  grow(selection, num_units);
  grow(published, (static_cast<size_t>(first_row) + rows.size()) * static_cast<size_t>(setup.units()));
  sparse_rows.clear();
  for (int r = 0; r < static_cast<int>(rows.size()); ++r) {
    const bool is_sparse = sparse && row(r).indptr == nullptr && !setup.is_dense(row(r), row(r).kv_len);
    if (is_sparse) sparse_rows.push_back(r);
    for (int u = 0; u < setup.units(); ++u) begin_unit(r, u, is_sparse);
  }
}

void LayerPass::begin_unit(int r, int u, bool row_is_sparse) {
  const QueryRow& of_row = row(r);
  Unit& x = unit(r, u);
  const bool elsewhere = options.elsewhere != nullptr && options.elsewhere[setup.kv_head_of(u)] != 0;
  const bool is_explicit = of_row.indptr != nullptr;
  // Heads of a row may have fewer tokens than it.
  const bool by_role = row_is_sparse && !setup.is_dense(of_row, tokens_of(r, u));
  x.role = elsewhere     ? Role::elsewhere
           : by_role     ? setup.role_of(layer_idx, u)
           : is_explicit ? Role::select
                         : Role::dense;
  x.sparse = by_role && x.role != Role::dense && !elsewhere;
  x.scanned = x.sparse && x.asks_policy() && member_of(u).scans_keys;
  // What the Selector overwrites keeps its size, so that nothing is zeroed.
  if (!x.sparse || x.role != Role::select) selection_of(r, u).clear();
  x.asks = x.answered = false;
  x.candidates.num_ranges = 0;
  x.weights.clear();
  x.scores.clear();
  x.indices = is_explicit ? of_row.indices + of_row.indptr[u] : nullptr;
  x.n = is_explicit ? of_row.indptr[u + 1] - of_row.indptr[u] : tokens_of(r, u);
  if (is_explicit && of_row.weights != nullptr) x.scores.resize(static_cast<size_t>(setup.unit_group() * x.n));
  if (x.role == Role::reuse) {
    x.indices = published_of(r, u).tokens;
    x.n = published_of(r, u).n;
  }
  if (elsewhere) x.n = 0;
}

// A cache must not keep what is not finite, and not all shows in the output: a key of -inf may have no weight.
std::string LayerPass::find_non_finite() const {
  const AttentionShape& shape = setup.shape;
  for (int r = 0; r < static_cast<int>(rows.size()); ++r) {
    if (options.window_on_device || row(r).indptr != nullptr) continue;
    for (int h = 0; h < shape.num_kv_heads; ++h) {
      const int64_t newest = row(r).num_tokens(h) - 1;
      for (const RowSource& source : {row(r).keys(shape, h), row(r).values(shape, h)}) {
        if (!row_is_finite(source.row(newest), shape.head_dim, source.format)) {
          return setup.non_finite(layer_idx, r, h * setup.units_per_head());
        }
      }
    }
  }
  return {};
}

std::vector<std::vector<int32_t>> LayerPass::last_selection() const {
  std::vector<std::vector<int32_t>> lists(selection.begin(),
                                          selection.begin() + static_cast<std::ptrdiff_t>(num_units));
  for (size_t i = 0; i < lists.size(); ++i) {
    if (units_[i].role == Role::reuse) lists[i].assign(units_[i].indices, units_[i].indices + units_[i].n);
  }
  return lists;
}

void LayerPass::forget_published() {
  const size_t first = index_of(first_row, 0);
  for (size_t i = 0; i < published.size(); ++i) {
    if (published[i].tokens == published[i].own.data()) continue;
    // A unit of the last attend() that reuses it: what last_selection() would tell.
    if (i >= first && i - first < num_units && units_[i - first].role == Role::reuse) units_[i - first].n = 0;
    published[i].own.clear();
    published[i].set_own();
  }
}

void LayerPass::load_queries() {
  if (queries_loaded_) return;
  queries_loaded_ = true;
  const int64_t n = int64_t{setup.shape.num_qo_heads} * setup.shape.head_dim;
  grow(queries_, rows.size() * static_cast<size_t>(n));
  for (size_t r = 0; r < rows.size(); ++r) {
    setup.kernels.to_float[setup.dtype()](rows[r].query, n, queries_.data() + r * static_cast<size_t>(n));
  }
}

const float* LayerPass::queries_of(int r, int qo_head) const {
  const auto first = static_cast<size_t>((int64_t{r} * setup.shape.num_qo_heads + qo_head) * setup.shape.head_dim);
  return first < queries_.size() ? queries_.data() + first : nullptr;
}

void LayerPass::write_output(int r, int first_head, int num_heads, const float* x) const {
  const int64_t n = int64_t{num_heads} * setup.shape.head_dim;
  const int64_t item = options.float_output ? int64_t{sizeof(float)} : dtype_bytes(setup.shape.dtype);
  char* out = static_cast<char*>(row(r).output) + int64_t{first_head} * setup.shape.head_dim * item;
  if (options.float_output) {
    std::memcpy(out, x, static_cast<size_t>(n * item));
  } else {
    setup.kernels.from_float[setup.dtype()](x, n, out);
  }
}

}  // namespace offload
