// A torch.Tensor, looked at without torch's headers: through the C shim of the libtorch that is loaded already.
//
// The shim (torch/csrc/inductor/aoti_torch/c/shim.h) takes a pointer to an at::Tensor. A Python tensor holds one, at an
// offset that find_torch() looks up in live tensors. All functions want the GIL and a live tensor; none allocates.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>

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
  int32_t (*empty)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);
  size_t (*element_size)(int32_t);
  int32_t (*drop)(void*);
  // What the shim does not tell, found by mangled names: modes of the thread, and flags of a tensor.
  bool (*inference_mode)();
  bool (*autocast)(int8_t);          // for a type of device, by its number
  int8_t (*autocast_dtype)(int8_t);  // which that has
  bool (*profiler)();                // whether one of torch is on in the thread; then Python serves, range by range
  bool (*dispatch_mode)();
  bool (*function_mode)();
  const void* const* (*tracing)();     // the state of a trace of TorchScript
  const void* const* (*transforms)();  // the vector of those of torch.func: where it begins, and where it ends
  bool (*requires_grad)(const void*);  // of a TensorImpl
  int64_t (*version)(const void*);     // of a tensor that was not made in inference mode
  PyObject* (*wrap)(const void*);      // THPVariable_Wrap
};

// Where torch keeps things, in bytes: found and tested on live tensors.
struct Layout {
  Py_ssize_t tensor;   // inside a PyObject: the at::Tensor
  Py_ssize_t extents;  // inside a TensorImpl: the number of dimensions, and behind it shape, strides, offset and dtype
  Py_ssize_t storage;  // inside a TensorImpl: the pointer to its storage
  Py_ssize_t data;     // inside a storage: its address, and behind it how it is freed
};

extern Layout layout;
extern Shim shim;
extern PyTypeObject* tensor_type;     // torch.Tensor
extern PyTypeObject* parameter_type;  // torch.nn.Parameter

// Whether an object's class is exactly torch.Tensor or torch.nn.Parameter.
inline bool is_plain_tensor(PyObject* object) {
  return Py_TYPE(object) == tensor_type || Py_TYPE(object) == parameter_type;
}

// What the shim takes for a tensor; valid as long as the object.
inline void* handle_of(PyObject* tensor) { return reinterpret_cast<char*>(tensor) + layout.tensor; }

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

// Words of a TensorImpl from the number of dimensions on, dtype and device among them; its dispatch keys come last.
constexpr int kExtents = 15;

// Words of memory that tell a tensor's dtype, shape, strides and dispatch keys; alike in many tensors of a model.
struct alignas(16) Form {
  uint64_t words[kExtents];
};

// The memory that tells a tensor's class, address, dtype, shape, strides and keys: while it is as it was, they are.
struct Imprint {
  void* handle;
  PyTypeObject* kind;      // its class
  const char* impl;        // null: this tensor keeps them elsewhere
  const char* storage;     // null: its address does not count
  uint64_t data[2];        // the address, and how it is freed: that tells of memory that moves when it is written
  const Form* form;  // kept by whoever took the imprint
};

// The imprint of a tensor whose address counts, or does not; it refers to ``form``, which it fills.
Imprint imprint_of(PyObject* tensor, bool counts, Form& form);

// Whether the words at an address are those of a form.
inline bool has_words(const char* memory, const Form& form) {
  using Two = uint64_t __attribute__((vector_size(16), may_alias));
  using Loose = uint64_t __attribute__((vector_size(16), aligned(8), may_alias));
  const Two* then = reinterpret_cast<const Two*>(form.words);
  const Loose* now = reinterpret_cast<const Loose*>(memory);
  constexpr int kLast = kExtents - 2;  // what follows from the others, the number of elements, comes before
  Two difference = then[0] ^ now[0];
#pragma GCC unroll 8
  for (int i = 1; i < kLast / 2; ++i) difference |= then[i] ^ now[i];
  const auto* last = reinterpret_cast<const Loose*>(form.words + kLast);
  difference |= *last ^ *reinterpret_cast<const Loose*>(memory + kLast * sizeof(uint64_t));
  return !(difference[0] | difference[1]);
}

// Whether a tensor is as its imprint says. False tells nothing. ``at`` is the layout.
inline bool is_as(const Imprint& imprint, const Layout& at) {
  const char* impl = *static_cast<const char**>(imprint.handle);
  if (Py_TYPE(static_cast<char*>(imprint.handle) - at.tensor) != imprint.kind) return false;
  if (impl != imprint.impl || !has_words(impl + at.extents, *imprint.form)) return false;
  if (!imprint.storage) return true;
  const char* storage = *reinterpret_cast<const char* const*>(impl + at.storage);
  const uint64_t* data = reinterpret_cast<const uint64_t*>(storage + at.data);
  return storage == imprint.storage && !((data[0] ^ imprint.data[0]) | (data[1] ^ imprint.data[1]));
}

// Fill the tables above from the paths of two libraries and torch's classes. False where something is missing, with an
// ImportError, or a self-test on live tensors fails.
bool find_torch(const char* library, const char* bindings, PyObject* tensor_class, PyObject* parameter_class,
                PyObject* samples);

}  // namespace gd
