// What the binding files share. cpu_ops checks shapes and dtypes and passes addresses; nothing here touches torch.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "attention/step_rows.h"

namespace offload {

namespace py = pybind11;

using Int64s = py::array_t<int64_t, py::array::c_style>;
using Int32s = py::array_t<int32_t, py::array::c_style>;

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

// The rows of a step, in the arrays' memory; empty arrays are null.
inline StepRows step_rows(const Int64s& page_tables, const Int64s& table_strides, const Int64s& kv_lens,
                          const Int64s& policy_arrays, const Int64s& text_marks) {
  const auto data = [](const Int64s& array) { return array.size() == 0 ? nullptr : array.data(); };
  return {kv_lens.size(), data(page_tables), data(table_strides), data(kv_lens), data(policy_arrays), data(text_marks)};
}

// The DecodeAttention that a Python object of that name owns.
DecodeAttention& attention_of(const py::object& attention);

void bind_attention(py::module_& m);
void bind_coprocessor(py::module_& m);
void bind_layers(py::module_& m);

}  // namespace offload
