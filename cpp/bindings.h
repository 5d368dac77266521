// What the binding files share. cpu_ops checks shapes and dtypes and passes addresses; nothing here touches torch.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

namespace offload {

namespace py = pybind11;

using Int64s = py::array_t<int64_t, py::array::c_style>;
using Int32s = py::array_t<int32_t, py::array::c_style>;

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

// The DecodeAttention that a Python object of that name owns.
class DecodeAttention;
DecodeAttention& attention_of(const py::object& attention);

void bind_attention(py::module_& m);
void bind_coprocessor(py::module_& m);

}  // namespace offload
