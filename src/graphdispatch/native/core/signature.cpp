#include "signature.h"

#include <cmath>
#include <cstring>

#include "object.h"

namespace gd {

PyTypeObject* signature_type = nullptr;

namespace {

bool is_identity(const std::vector<int8_t>& order) {
  for (size_t d = 0; d < order.size(); ++d) {
    if (order[d] != static_cast<int8_t>(d)) return false;
  }
  return true;
}

// Whether the dimensions lie in memory from slowest to fastest as a form says, with gaps or without.
bool has_order(const TensorForm& form, const int64_t* sizes, const int64_t* strides) {
  const int dims = static_cast<int>(form.shape.size());
  for (int d = 0; d < dims; ++d) {
    if (!strides[d] && sizes[d] > 1) return !form.is_dense && is_identity(form.order);
  }
  int8_t order[kMostDims];
  for (int d = 0; d < dims; ++d) {  // the slowest first; equal strides in the order of the dimensions
    int at = d;
    while (at > 0 && strides[order[at - 1]] < strides[d]) {
      order[at] = order[at - 1];
      --at;
    }
    order[at] = static_cast<int8_t>(d);
  }
  if (dims && std::memcmp(order, form.order.data(), dims) != 0) return false;
  int64_t expected = 1;
  bool dense = true;
  for (int at = dims - 1; at >= 0; --at) {
    const int d = order[at];
    dense = dense && (strides[d] == expected || sizes[d] == 1);
    expected *= sizes[d] > 1 ? sizes[d] : 1;
  }
  return dense == form.is_dense;
}

// What the tensors of a call have said of its number: the extents, and in which bits they stand.
struct Extents {
  int64_t number, known;

  bool add(const Span& span, int64_t extent) {
    const int64_t most = span.mask < 0 ? extent : span.mask;
    const int64_t bits = (extent < most ? extent : most) << span.shift;
    const int64_t mask = span.mask < 0 ? -1 : span.mask << span.shift;
    if (known & mask) return (number & mask) == bits;
    known |= mask;
    number |= bits;
    return true;
  }
};

bool is_span(const TensorForm& form, int64_t dim) {
  for (const Span& span : form.spans) {
    if (span.dim == dim) return true;
  }
  return false;
}

// Whether a tensor of the right class has a form, whatever its extents along the batch.
bool has_form(const TensorForm& form, PyObject* value) {
  if (!are_alike(keys_of(value), form.keys)) return false;
  void* handle = handle_of(value);
  int32_t layout = -1;
  if (shim.layout(handle, &layout) || layout != 0 || kind_of(handle) != form.kind) return false;
  int64_t dims = -1, *sizes = nullptr;
  if (shim.dim(handle, &dims) || dims != static_cast<int64_t>(form.shape.size())) return false;
  if (shim.sizes(handle, &sizes)) return false;
  for (int64_t d = 0; d < dims; ++d) {
    if (sizes[d] != form.shape[d] && !is_span(form, d)) return false;
  }
  bool is_contiguous = false;
  if (shim.is_contiguous(handle, &is_contiguous)) return false;
  if (!(is_contiguous && form.is_contiguous)) {
    int64_t* strides = nullptr;
    if (is_contiguous) {
      if (!form.is_dense || !is_identity(form.order)) return false;
    } else if (shim.strides(handle, &strides) || !has_order(form, sizes, strides)) {
      return false;
    }
  }
  return true;
}

// Whether a tensor fits a form, and what others have said of the number of rows, which it adds to.
bool fits(TensorForm& form, PyObject* value, Extents& extents) {
  if (Py_TYPE(value) != form.type) return false;
  if (!form.seen.is_of(value)) {
    if (!has_form(form, value)) return false;
    form.seen.take(value);
  }
  int64_t* sizes = nullptr;
  if (form.spans.empty()) return true;
  if (shim.sizes(handle_of(value), &sizes)) return false;
  for (const Span& span : form.spans) {
    if (!extents.add(span, sizes[span.dim])) return false;
  }
  return true;
}

bool is_same_float(double a, double b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

// Whether a value is the same constant: 0.0 is another one than -0.0, and NaN is NaN. Without a kind it must be the same
// object.
bool is_same_constant(PyObject* value, PyObject* kind, PyObject* expected) {
  if (value == expected) return true;
  if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != kind) return false;
  if (PyFloat_CheckExact(value)) return is_same_float(PyFloat_AS_DOUBLE(value), PyFloat_AS_DOUBLE(expected));
  if (PyComplex_CheckExact(value)) {
    const Py_complex a = PyComplex_AsCComplex(value), b = PyComplex_AsCComplex(expected);
    return is_same_float(a.real, b.real) && is_same_float(a.imag, b.imag);
  }
  const int same = PyObject_RichCompareBool(value, expected, Py_EQ);
  if (same < 0) PyErr_Clear();
  return same == 1;
}

bool has_constants(SignatureObject* self, PyObject* const* values) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->constants); ++i) {
    PyObject* one = PyTuple_GET_ITEM(self->constants, i);
    PyObject* value = values[PyLong_AsSsize_t(PyTuple_GET_ITEM(one, 0))];
    if (!is_same_constant(value, PyTuple_GET_ITEM(one, 1), PyTuple_GET_ITEM(one, 2))) return false;
  }
  return true;
}

bool has_addresses(SignatureObject* self, PyObject* const* values) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->addresses); ++i) {
    PyObject* one = PyTuple_GET_ITEM(self->addresses, i);
    void* data = nullptr;
    PyObject* tensor = values[PyLong_AsSsize_t(PyTuple_GET_ITEM(one, 0))];
    if (shim.data_ptr(handle_of(tensor), &data)) return false;
    if (data != PyLong_AsVoidPtr(PyTuple_GET_ITEM(one, 1))) return false;
  }
  return true;
}

// Whether the thread's modes are those of the signature.
bool has_modes(SignatureObject* self) {
  if (shim.inference_mode() != self->is_inference) return false;
  return (shim.autocast(self->device) ? shim.autocast_dtype(self->device) : -1) == self->autocast;
}

// The dimensions that follow the batch, from tuples (dim, shift, mask); false with an error.
bool read_spans(PyObject* items, TensorForm& form) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); ++i) {
    Span span;
    long long mask;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(items, i), "iiL", &span.dim, &span.shift, &mask)) return false;
    if (span.dim < 0 || span.dim >= static_cast<int>(form.shape.size()) || span.shift < 0 || span.shift > 62) {
      PyErr_SetString(PyExc_ValueError, "a dimension that the tensor lacks, or bits that no number has");
      return false;
    }
    span.mask = mask;
    form.spans.push_back(span);
  }
  return true;
}

// A form from (position, tensor, shape, order, spans, is_contiguous, is_dense); false with an error.
bool read_form(PyObject* item, TensorForm& form) {
  PyObject *tensor, *shape, *order, *spans;
  int is_contiguous, is_dense;
  if (!PyArg_ParseTuple(item, "nOO!O!O!pp", &form.position, &tensor, &PyTuple_Type, &shape, &PyTuple_Type, &order,
                        &PyTuple_Type, &spans, &is_contiguous, &is_dense)) {
    return false;
  }
  if (!is_plain_tensor(tensor) || PyTuple_GET_SIZE(shape) > kMostDims ||
      PyTuple_GET_SIZE(shape) != PyTuple_GET_SIZE(order)) {
    PyErr_SetString(PyExc_TypeError, "a plain tensor, and as many dimensions in its order as in its shape");
    return false;
  }
  form.type = Py_TYPE(tensor);
  form.kind = kind_of(handle_of(tensor));
  form.keys = keys_of(tensor);
  form.is_contiguous = is_contiguous;
  form.is_dense = is_dense;
  for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(shape); ++d) {
    form.shape.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d)));
    form.order.push_back(static_cast<int8_t>(PyLong_AsLong(PyTuple_GET_ITEM(order, d))));
  }
  return !PyErr_Occurred() && read_spans(spans, form);
}

// Whether all items are tuples that begin with a place below ``count``.
bool are_placed(PyObject* items, Py_ssize_t size, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); ++i) {
    PyObject* one = PyTuple_GET_ITEM(items, i);
    const Py_ssize_t place =
        PyTuple_Check(one) && PyTuple_GET_SIZE(one) == size ? PyLong_AsSsize_t(PyTuple_GET_ITEM(one, 0)) : -1;
    if (place < 0 || place >= count) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a place that no value has");
      return false;
    }
  }
  return true;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  Py_ssize_t count;
  int is_inference;
  signed char device;
  PyObject *autocast, *tensors, *constants, *addresses;
  long long extents;
  if (!PyArg_ParseTuple(args, "npbOO!O!O!L", &count, &is_inference, &device, &autocast, &PyTuple_Type, &tensors,
                        &PyTuple_Type, &constants, &PyTuple_Type, &addresses, &extents) ||
      !are_placed(constants, 3, count) || !are_placed(addresses, 2, count)) {
    return nullptr;
  }
  Ref made(type->tp_alloc(type, 0));
  auto* self = reinterpret_cast<SignatureObject*>(made.get());
  if (!self) return nullptr;
  self->forms = new std::vector<TensorForm>(PyTuple_GET_SIZE(tensors));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    TensorForm& form = (*self->forms)[i];
    if (!read_form(PyTuple_GET_ITEM(tensors, i), form)) return nullptr;
    if (form.position < 0 || form.position >= count) return PyErr_Format(PyExc_ValueError, "a place that no value has");
  }
  self->count = count;
  self->extents = extents;
  self->is_inference = is_inference;
  self->device = device;
  self->autocast = -1;
  if (is_plain_tensor(autocast)) shim.dtype(handle_of(autocast), &self->autocast);
  self->constants = Py_NewRef(constants);
  self->addresses = Py_NewRef(addresses);
  return made.release();
}

PyObject* match_list(PyObject* self, PyObject* values) {
  const Ref list(PySequence_Fast(values, "the values of a call"));
  if (!list) return nullptr;
  const int64_t rows = match(reinterpret_cast<SignatureObject*>(self), PySequence_Fast_ITEMS(list.get()),
                             PySequence_Fast_GET_SIZE(list.get()));
  return PyLong_FromLongLong(rows);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<SignatureObject*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->constants);
  return 0;
}

int clear(PyObject* object) {
  auto* self = reinterpret_cast<SignatureObject*>(object);
  self->count = -1;  // so that nothing matches any more
  Py_CLEAR(self->constants);
  Py_CLEAR(self->addresses);
  return 0;
}

void destroy(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  clear(object);
  delete reinterpret_cast<SignatureObject*>(object)->forms;
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"match", match_list, METH_O, "match(values)\n--\n\nThe rows of a call that fits, else -1."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("What a call must look like; see runtime/signature.py.")},
    {0, nullptr},
};

PyType_Spec spec = {"graphdispatch.native._core.Signature", sizeof(SignatureObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

int64_t match(SignatureObject* self, PyObject* const* values, Py_ssize_t count) {
  if (count != self->count || !has_constants(self, values) || !has_modes(self)) return kNoMatch;
  Extents extents{self->extents, 0};
  for (TensorForm& form : *self->forms) {
    if (!fits(form, values[form.position], extents)) return kNoMatch;
  }
  if (!has_addresses(self, values)) return kNoMatch;
  return extents.known ? extents.number : 1;
}

bool add_signature(PyObject* module) {
  signature_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return signature_type && PyModule_AddObjectRef(module, "Signature", reinterpret_cast<PyObject*>(signature_type)) == 0;
}

}  // namespace gd
