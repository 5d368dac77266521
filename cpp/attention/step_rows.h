// Where the rows of a decode step on the CPU find their pages. A row is one new token of a sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/query_row.h"

namespace offload {

// Arrays over rows, in the caller's memory.
struct StepRows {
  int64_t num_rows;
  const int64_t* page_tables;    // addresses of the sequences' page tables [num_layers, table_stride]
  const int64_t* table_strides;  // pages per layer in those tables, of all KV heads where they have pages of their own
  const int64_t* kv_lens;        // tokens each row attends to, its own, the last, included
  const int64_t* arrays;         // addresses of the sequences' QueryRow::arrays, or null; 0: none
  const int64_t* text_marks;     // addresses of the sequences' text marks, or null
  const int64_t* starts;         // where KV heads have pages of their own, addresses of the sequences' first slots
                                 // [num_layers, num_kv_heads]; else null
  const int64_t* budgets;        // QueryRow::budget_tokens, or null

  // One row of one layer, without its query and output.
  QueryRow row(int64_t r, int64_t layer_idx, int num_kv_heads) const {
    QueryRow row{};
    row.pages = reinterpret_cast<const int64_t*>(page_tables[r]) + layer_idx * table_strides[r];
    row.kv_len = kv_lens[r];
    if (starts != nullptr) {
      row.starts = reinterpret_cast<const int64_t*>(starts[r]) + layer_idx * num_kv_heads;
      row.head_stride = table_strides[r] / num_kv_heads;
    }
    if (arrays != nullptr) row.arrays = reinterpret_cast<void* const*>(arrays[r]);
    if (budgets != nullptr) row.budget_tokens = budgets[r];
    if (text_marks != nullptr) row.text_marks = reinterpret_cast<const uint8_t*>(text_marks[r]);
    return row;
  }
  // Rows [first, first + n) likewise.
  void of_layer(int64_t layer_idx, int num_kv_heads, std::vector<QueryRow>& rows, int64_t first, int64_t n) const {
    rows.clear();
    rows.reserve(static_cast<size_t>(n));
    for (int64_t r = first; r < first + n; ++r) rows.push_back(row(r, layer_idx, num_kv_heads));
  }
  void of_layer(int64_t layer_idx, int num_kv_heads, std::vector<QueryRow>& rows) const {
    of_layer(layer_idx, num_kv_heads, rows, 0, num_rows);
  }
};

}  // namespace offload
