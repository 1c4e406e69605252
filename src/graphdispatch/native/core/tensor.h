// A torch.Tensor, looked at without torch's headers: through the C shim of the libtorch that is loaded already.
//
// The shim (torch/csrc/inductor/aoti_torch/c/shim.h) takes a pointer to an at::Tensor. A Python tensor holds one, at an
// offset that find_torch() looks up in live tensors. All functions want the GIL and a live tensor; none allocates.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace gd {

struct Shim {
  int32_t (*data_ptr)(void*, void**);
  int32_t (*dim)(void*, int64_t*);
  int32_t (*numel)(void*, int64_t*);
  int32_t (*sizes)(void*, int64_t**);
  int32_t (*strides)(void*, int64_t**);
  int32_t (*dtype)(void*, int32_t*);
  int32_t (*device_type)(void*, int32_t*);
  int32_t (*device_index)(void*, int32_t*);
  int32_t (*layout)(void*, int32_t*);
  int32_t (*is_contiguous)(void*, bool*);
  bool (*grad_mode_is_enabled)();
  void (*grad_mode_set_enabled)(bool);
};

extern Shim shim;
extern Py_ssize_t tensor_offset;      // of the at::Tensor inside the PyObject
extern PyTypeObject* tensor_type;     // torch.Tensor
extern PyTypeObject* parameter_type;  // torch.nn.Parameter

// Whether an object's class is exactly torch.Tensor or torch.nn.Parameter.
inline bool is_plain_tensor(PyObject* object) {
  return Py_TYPE(object) == tensor_type || Py_TYPE(object) == parameter_type;
}

// What the shim takes for a tensor; valid as long as the object.
inline void* handle_of(PyObject* tensor) { return reinterpret_cast<char*>(tensor) + tensor_offset; }

// The TensorImpl behind a tensor: another one after ``tensor.data = other`` on some paths, the same after set_().
inline void* impl_of(PyObject* tensor) { return *reinterpret_cast<void**>(handle_of(tensor)); }

// The dtype, device type and device index in one word.
inline int64_t kind_of(void* handle) {
  int32_t dtype = 0, type = 0, index = 0;
  shim.dtype(handle, &dtype);
  shim.device_type(handle, &type);
  shim.device_index(handle, &index);
  return int64_t(dtype) | int64_t(type) << 16 | int64_t(uint8_t(index)) << 32;
}

// Fill the table above from a library's path and torch's classes. False with an ImportError where anything is missing,
// or a self-test on live tensors fails.
bool find_torch(const char* library, PyObject* tensor_class, PyObject* parameter_class, PyObject* samples);

}  // namespace gd
