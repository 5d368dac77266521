// What the binding files share. cpu_ops checks shapes and dtypes and passes addresses; nothing here touches torch.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/step_rows.h"

namespace offload {

namespace py = pybind11;

using Int64s = py::array_t<int64_t, py::array::c_style>;
using Int32s = py::array_t<int32_t, py::array::c_style>;
// For as long as the pool works.
using WithoutGil = py::call_guard<py::gil_scoped_release>;

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

// Raises what was wrong with the numbers of a step; an empty string: nothing.
inline void check_numbers(const std::string& failure) {
  if (!failure.empty()) throw std::runtime_error(failure);
}

// The rows of a step with the arrays that they lie in.
struct KeptRows {
  StepRows rows;
  std::vector<Int64s> arrays;
};

void bind_attention(py::module_& m);
void bind_coprocessor(py::module_& m);
void bind_layers(py::module_& m);

}  // namespace offload
