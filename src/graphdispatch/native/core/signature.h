// Signature.match of runtime/signature.py.
#pragma once

#include <vector>

#include "ambient.h"

namespace gd {

constexpr int64_t kNoMatch = -1;
constexpr int kMostDims = 64;  // torch allows no more

// A dimension that follows the batch, and which bits of a call's number hold its extent: those of ``mask``, shifted.
struct Span {
  int dim, shift;
  int64_t mask;
};

// One tensor argument: what InputSpec says of it, and its dtype, device and dispatch keys in words.
struct TensorForm {
  Py_ssize_t position;
  PyTypeObject* type;  // torch.Tensor or torch.nn.Parameter, which torch keeps
  int64_t kind;
  uint64_t keys;
  std::vector<Span> spans;
  bool is_contiguous, is_dense;
  std::vector<int64_t> shape;  // 0 where it follows the batch
  std::vector<int8_t> order;
  Look seen;  // of the latest tensor that fitted
};

struct SignatureObject {
  PyObject_HEAD Py_ssize_t count;  // of the values of a call
  bool is_inference;
  int8_t device;        // the number of its type
  int32_t autocast;     // the number of a dtype; -1: it is off
  PyObject* constants;  // tuples (position, type, value); None in place of the type: the value is compared by identity
  PyObject* addresses;  // tuples (position, address)
  int64_t extents;      // what stands in the number of each call
  std::vector<TensorForm>* forms;
};

extern PyTypeObject* signature_type;

// The rows of a call that fits (1 without a batch dimension; of several, one number), else kNoMatch. Where it is in
// doubt it says kNoMatch, so that the call takes the slow path. kNoMatch with an error of Python if the interpreter
// fails.
int64_t match(SignatureObject* signature, PyObject* const* values, Py_ssize_t count);

bool add_signature(PyObject* module);

}  // namespace gd
