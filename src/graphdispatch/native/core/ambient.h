// What a call depends on beside its arguments' shapes: modes of the thread, and flags of a tensor.
//
// The shim knows none of it. libtorch exports functions for most, found by their mangled names; a TensorImpl's set of
// dispatch keys is found by comparing tensors. The package tests each of them when it loads the core, and forgets one
// that differs from Python: then it calls Python.
#pragma once

#include "tensor.h"

namespace gd {

struct Ambient {
  bool (*inference_mode)() = nullptr;            // c10::InferenceMode::is_enabled
  bool (*autocast)(int8_t) = nullptr;            // at::autocast::is_autocast_enabled
  bool (*requires_grad)(const void*) = nullptr;  // c10::TensorImpl::requires_grad
  bool (*dispatch_mode)() = nullptr;             // c10::impl::dispatch_mode_enabled
  bool (*function_mode)() = nullptr;             // at::impl::torch_function_mode_enabled
  const void* const* (*tracing)() = nullptr;     // torch::jit::tracer::getTracingState
  bool (*profiler)() = nullptr;                  // torch::profiler::impl::profilerEnabled
  PyObject* (*wrap)(const void*) = nullptr;      // THPVariable_Wrap
  int32_t (*empty)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**) = nullptr;
  size_t (*element_size)(int32_t) = nullptr;  // aoti_torch_dtype_element_size
  int32_t (*drop)(void*) = nullptr;           // aoti_torch_delete_tensor_object
  Py_ssize_t keys = 0;                        // where a TensorImpl has its set of dispatch keys; 0: unknown
  uint64_t plain = 0, plain_inference = 0;    // that of a CPU tensor, and of one made in inference mode
  int64_t (*version)(const void*) = nullptr;  // at::TensorBase::_version; not for a tensor made in inference mode
  bool tells_holding = false;                 // whether a tensor's memory tells who holds it: see output_copies.h
};

extern Ambient ambient;

// Whether the thread may be in a mode or trace of somebody's; Python knows.
inline bool may_be_in_mode() {
  return !ambient.dispatch_mode || !ambient.function_mode || !ambient.tracing || ambient.dispatch_mode() ||
         ambient.function_mode() || *ambient.tracing();
}

// Whether the thread is in inference mode, or in autocast for a kind of device (its number, -1 if unknown, and its
// name); -1 with an error of Python.
int in_inference_mode();
int in_autocast(int device, PyObject* name);

// Whether a profiler of torch is on in the thread: then Python serves, and makes each part of a call a range of the
// profile. -1 with an error of Python.
int is_profiled();

// The dtype of autocast for a device's name: a new reference.
PyObject* autocast_dtype(PyObject* name);

// Whether a plain tensor requires a gradient; -1 with an error of Python.
int needs_gradient(PyObject* tensor);

// What tensor.clone() gives, for a small contiguous plain tensor on the host, with gradients off: a new reference. Null
// where torch has to do it, as wherever somebody watches operators; then no error is set.
PyObject* clone(PyObject* tensor);

// The dispatch keys of a tensor; 0 if they are unknown.
inline uint64_t keys_of(PyObject* tensor) {
  if (!ambient.keys) return 0;
  return *reinterpret_cast<const uint64_t*>(static_cast<const char*>(impl_of(tensor)) + ambient.keys);
}

// Whether a tensor is known to be dense memory of the host: no lazy negative or conjugate, and nothing that wraps
// another tensor.
inline bool is_plain_host(PyObject* tensor) {
  const uint64_t keys = keys_of(tensor);
  return keys && (keys == ambient.plain || keys == ambient.plain_inference);
}

// Whether two sets of keys differ at most in those that a tensor made in inference mode lacks.
inline bool are_alike(uint64_t a, uint64_t b) {
  const uint64_t lacking = ambient.plain ^ ambient.plain_inference;
  return ((a ^ b) & ~lacking) == 0 && ((a & lacking) == 0 || (a & lacking) == lacking);
}

// What a dense tensor of the host looks like but for its address. While nothing here differs, nor do dtype, shape,
// strides or what kind of tensor it is.
class Look {
 public:
  // Whether a plain tensor looks so; false before one was taken.
  bool is_of(PyObject* tensor) const {
    if (!keys_ || keys_of(tensor) != keys_) return false;
    return has_words(static_cast<const char*>(impl_of(tensor)) + layout.extents, form_);
  }

  // Take the look of a plain tensor, if it can be read.
  void take(PyObject* tensor) {
    const Imprint imprint = imprint_of(handle_of(tensor), false, form_);
    keys_ = imprint.impl && is_plain_host(tensor) ? keys_of(tensor) : 0;
  }

 private:
  uint64_t keys_ = 0;
  Form form_;
};

// Functions of the module: ``find_ambient``, ``read_ambient`` and ``forget_ambient``.
extern PyMethodDef ambient_methods[];

}  // namespace gd
