// What a call depends on beside its arguments' shapes: modes of the thread, and flags of a tensor.
//
// The package compares what is read here with what Python tells, in every mode, before it uses the core.
#pragma once

#include "tensor.h"

namespace gd {

extern uint64_t plain_keys, inference_keys;  // the dispatch keys of a CPU tensor, and of one made in inference mode

// Whether the thread may be in a mode, trace or transform of somebody's; Python knows.
inline bool may_be_in_mode() {
  const void* const* transforms = shim.transforms();
  return shim.dispatch_mode() || shim.function_mode() || *shim.tracing() || transforms[0] != transforms[1];
}

// Whether a plain tensor requires a gradient.
inline bool needs_gradient(PyObject* tensor) { return shim.requires_grad(impl_of(tensor)); }

// What tensor.clone() gives, for a small contiguous plain tensor on the host, with gradients off: a new reference. Null
// where torch has to do it, as wherever somebody watches operators; then no error is set.
PyObject* clone(PyObject* tensor);

// A new tensor like a contiguous one, with any values, and its address: a new reference; null without an error if that
// cannot be.
PyObject* empty_like(PyObject* tensor, void** data);

// The dispatch keys of a tensor.
inline uint64_t keys_of(PyObject* tensor) {
  const char* words = static_cast<const char*>(impl_of(tensor)) + layout.extents;
  return reinterpret_cast<const uint64_t*>(words)[kExtents - 1];
}

// Whether a tensor is dense memory of the host: no lazy negative or conjugate, and nothing that wraps another tensor.
inline bool is_plain_host(PyObject* tensor) {
  const uint64_t keys = keys_of(tensor);
  return keys == plain_keys || keys == inference_keys;
}

// Whether two sets of keys differ at most in those that a tensor made in inference mode lacks.
inline bool are_alike(uint64_t a, uint64_t b) {
  const uint64_t lacking = plain_keys ^ inference_keys;
  return ((a ^ b) & ~lacking) == 0 && ((a & lacking) == 0 || (a & lacking) == lacking);
}

// What a dense tensor of the host looks like but for its address. While nothing here differs, nor do dtype, shape,
// strides or what kind of tensor it is.
class Look {
 public:
  // Whether a plain tensor looks so; false before one was taken.
  bool is_of(PyObject* tensor) const {
    if (!is_taken_ || keys_of(tensor) != form_.words[kExtents - 1]) return false;
    return has_words(static_cast<const char*>(impl_of(tensor)) + layout.extents, form_);
  }

  // Take the look of a plain tensor, if it can be read.
  void take(PyObject* tensor) {
    is_taken_ = is_plain_host(tensor) && imprint_of(tensor, false, form_).impl;
  }

 private:
  bool is_taken_ = false;
  Form form_;
};

// Find out the keys above, from plain tensors and others. False where the keys do not lie where they are read.
bool find_keys(PyObject* plain, PyObject* negative, PyObject* conjugate, PyObject* inference);

// Functions of the module: ``read_ambient`` and ``try_clone``.
extern PyMethodDef ambient_methods[];

}  // namespace gd
