// Where the rows of a decode step on the CPU find their pages. A row is one new token of a sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/decode_attention.h"

namespace offload {

// Arrays over rows, in the caller's memory.
struct StepRows {
  int64_t num_rows;
  const int64_t* page_tables;    // addresses of the sequences' page tables [num_layers, table_stride]
  const int64_t* table_strides;  // pages per layer in those tables
  const int64_t* kv_lens;        // tokens each row attends to, its own, the last, included
  const int64_t* arrays;         // addresses of the sequences' QueryRow::arrays, or null; 0: none
  const int64_t* text_marks;     // addresses of the sequences' text marks, or null

  const int64_t* pages(int64_t row, int64_t layer_idx) const {
    return reinterpret_cast<const int64_t*>(page_tables[row]) + layer_idx * table_strides[row];
  }
  // Rows [first, first + n) of one layer, without queries and outputs.
  void of_layer(int64_t layer_idx, std::vector<QueryRow>& rows, int64_t first, int64_t n) const {
    rows.assign(static_cast<size_t>(n), QueryRow{});
    for (int64_t r = first; r < first + n; ++r) {
      QueryRow& row = rows[static_cast<size_t>(r - first)];
      row.pages = pages(r, layer_idx);
      row.kv_len = kv_lens[r];
      if (arrays != nullptr) row.arrays = reinterpret_cast<void* const*>(arrays[r]);
      if (text_marks != nullptr) row.text_marks = reinterpret_cast<const uint8_t*>(text_marks[r]);
    }
  }
  void of_layer(int64_t layer_idx, std::vector<QueryRow>& rows) const { of_layer(layer_idx, rows, 0, num_rows); }
};

}  // namespace offload
