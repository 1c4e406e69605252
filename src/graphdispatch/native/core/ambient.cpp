#include "ambient.h"

#include <dlfcn.h>

#include <cstring>
#include <iterator>

#include "object.h"
#include "output_copies.h"

namespace gd {

Ambient ambient;

namespace {

constexpr Py_ssize_t kMostBytes = 176;  // of a TensorImpl of unknown layout: the size of the smallest known

PyObject *python_inference_mode, *python_autocast, *python_autocast_dtype, *python_profiler, *requires_grad_name;

uint64_t word_of(PyObject* tensor, Py_ssize_t offset) {
  return *reinterpret_cast<const uint64_t*>(static_cast<const char*>(impl_of(tensor)) + offset);
}

bool is_one_bit(uint64_t word) { return word && !(word & (word - 1)); }

// Whether the word at an offset differs between these tensors: one value for all plain tensors, one more bit for a
// lazy negative and another one for a lazy conjugate, and fewer for a tensor made in inference mode.
bool tells_keys(Py_ssize_t offset, PyObject* plain, PyObject* negative, PyObject* conjugate, PyObject* inference) {
  const uint64_t word = word_of(PyTuple_GET_ITEM(plain, 0), offset);
  for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(plain); ++i) {
    if (word_of(PyTuple_GET_ITEM(plain, i), offset) != word) return false;
  }
  const uint64_t negated = word_of(negative, offset), conjugated = word_of(conjugate, offset);
  const uint64_t bare = word_of(inference, offset);
  return is_one_bit(negated ^ word) && (negated & word) == word && is_one_bit(conjugated ^ word) &&
         (conjugated & word) == word && conjugated != negated && bare && bare != word && (bare & word) == bare;
}

template <typename Function>
void find(void* handle, const char* name, Function*& target) {
  target = reinterpret_cast<Function*>(dlsym(handle, name));
}

// What clone() calls: all of it, or nothing.
void find_clone(const char* library, const char* bindings) {
  void *torch = dlopen(library, RTLD_LAZY | RTLD_NOLOAD), *python = dlopen(bindings, RTLD_LAZY | RTLD_NOLOAD);
  if (!torch || !python) return;
  find(torch, "_ZN3c104impl21dispatch_mode_enabledEv", ambient.dispatch_mode);
  find(torch, "_ZN2at4impl27torch_function_mode_enabledEv", ambient.function_mode);
  find(torch, "_ZN5torch3jit6tracer15getTracingStateEv", ambient.tracing);
  find(torch, "_ZNK2at10TensorBase8_versionEv", ambient.version);
  find(torch, "aoti_torch_empty_strided", ambient.empty);
  find(torch, "aoti_torch_delete_tensor_object", ambient.drop);
  find(torch, "aoti_torch_dtype_element_size", ambient.element_size);
  find(python, "_Z16THPVariable_WrapRKN2at10TensorBaseE", ambient.wrap);
  if (!ambient.dispatch_mode || !ambient.function_mode || !ambient.empty || !ambient.drop || !ambient.element_size) {
    ambient.wrap = nullptr;
  }
}

PyObject* find_ambient(PyObject*, PyObject* args) {
  const char *library, *bindings;
  PyObject *readers, *plain, *negative, *conjugate, *inference;
  if (!PyArg_ParseTuple(args, "ssO!O!OOO", &library, &bindings, &PyTuple_Type, &readers, &PyTuple_Type, &plain,
                        &negative, &conjugate, &inference)) {
    return nullptr;
  }
  if (PyTuple_GET_SIZE(readers) != 4) return PyErr_Format(PyExc_TypeError, "there must be four functions");
  python_inference_mode = Py_NewRef(PyTuple_GET_ITEM(readers, 0));
  python_autocast = Py_NewRef(PyTuple_GET_ITEM(readers, 1));
  python_autocast_dtype = Py_NewRef(PyTuple_GET_ITEM(readers, 2));
  python_profiler = Py_NewRef(PyTuple_GET_ITEM(readers, 3));
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  if (!requires_grad_name) return nullptr;
  if (void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD)) {
    find(handle, "_ZN3c1013InferenceMode10is_enabledEv", ambient.inference_mode);
    find(handle, "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE", ambient.autocast);
    find(handle, "_ZNK3c1010TensorImpl13requires_gradEv", ambient.requires_grad);
    find(handle, "_ZN5torch8profiler4impl15profilerEnabledEv", ambient.profiler);
  }
  find_clone(library, bindings);
  int found = 0;
  const Py_ssize_t end = layout.is_found ? layout.extents + kExtents * Py_ssize_t(sizeof(void*)) : kMostBytes;
  for (Py_ssize_t offset = sizeof(void*); offset < end; offset += sizeof(void*)) {
    if (!tells_keys(offset, plain, negative, conjugate, inference)) continue;
    ambient.keys = offset;
    ambient.plain = word_of(PyTuple_GET_ITEM(plain, 0), offset);
    ambient.plain_inference = word_of(inference, offset);
    ++found;
  }
  if (found != 1) ambient.keys = 0;
  layout.is_found &= ambient.keys == layout.extents + (kExtents - 1) * Py_ssize_t(sizeof(void*));  // as Forms have them
  const bool had_gradients = shim.grad_mode_is_enabled();
  shim.grad_mode_set_enabled(true);
  ambient.tells_holding = tells_holding(PyTuple_GET_ITEM(plain, 0));
  shim.grad_mode_set_enabled(had_gradients);
  Py_RETURN_NONE;
}

// What the core finds out by itself: (inference mode, autocast of a device, requires_grad and plainness of a tensor, a
// profiler), with None for what it calls Python for.
PyObject* read_ambient(PyObject*, PyObject* args) {
  PyObject* tensor;
  int device;
  if (!PyArg_ParseTuple(args, "O!i", tensor_type, &tensor, &device)) return nullptr;
  PyObject* found[] = {
      ambient.inference_mode ? PyBool_FromLong(ambient.inference_mode()) : Py_NewRef(Py_None),
      ambient.autocast ? PyBool_FromLong(ambient.autocast(static_cast<int8_t>(device))) : Py_NewRef(Py_None),
      ambient.requires_grad ? PyBool_FromLong(ambient.requires_grad(impl_of(tensor))) : Py_NewRef(Py_None),
      ambient.keys ? PyBool_FromLong(is_plain_host(tensor)) : Py_NewRef(Py_None),
      ambient.profiler ? PyBool_FromLong(ambient.profiler()) : Py_NewRef(Py_None),
  };
  return Py_BuildValue("(NNNNN)", found[0], found[1], found[2], found[3], found[4]);
}

// The copy that clone() makes of a plain tensor, or None.
PyObject* try_clone(PyObject*, PyObject* tensor) {
  PyObject* made = is_plain_tensor(tensor) ? clone(tensor) : nullptr;
  return made ? made : Py_NewRef(Py_None);
}

PyObject* forget_ambient(PyObject*, PyObject* place) {
  auto of = [](auto& function) { return reinterpret_cast<void**>(&function); };
  void** const functions[] = {of(ambient.inference_mode), of(ambient.autocast), of(ambient.requires_grad),
                              of(ambient.keys),           of(ambient.profiler), of(ambient.wrap)};
  const Py_ssize_t at = PyLong_AsSsize_t(place);
  if (at < 0 || at >= Py_ssize_t(std::size(functions))) return PyErr_Format(PyExc_IndexError, "there is no such fact");
  *functions[at] = nullptr;
  Py_RETURN_NONE;
}

}  // namespace

int in_inference_mode() {
  return ambient.inference_mode ? ambient.inference_mode() : truth(Ref(PyObject_CallNoArgs(python_inference_mode)));
}

int in_autocast(int device, PyObject* name) {
  if (ambient.autocast && device >= 0) return ambient.autocast(static_cast<int8_t>(device));
  return truth(Ref(PyObject_CallOneArg(python_autocast, name)));
}

int is_profiled() { return ambient.profiler ? ambient.profiler() : truth(Ref(PyObject_CallNoArgs(python_profiler))); }

PyObject* autocast_dtype(PyObject* name) { return PyObject_CallOneArg(python_autocast_dtype, name); }

PyObject* clone(PyObject* tensor) {
  constexpr int64_t kMostBytes = 256 * 1024;
  if (!ambient.wrap || ambient.dispatch_mode() || ambient.function_mode() || !is_plain_host(tensor)) return nullptr;
  void *handle = handle_of(tensor), *made = nullptr, *source = nullptr, *target = nullptr;
  bool is_contiguous = false;
  int64_t dims = 0, numel = 0, *sizes = nullptr, *strides = nullptr;
  if (shim.is_contiguous(handle, &is_contiguous) || !is_contiguous || shim.dim(handle, &dims) ||
      shim.numel(handle, &numel) || shim.sizes(handle, &sizes) || shim.strides(handle, &strides) ||
      shim.data_ptr(handle, &source)) {
    return nullptr;
  }
  int32_t dtype = 0;
  shim.dtype(handle, &dtype);
  const int64_t nbytes = numel * static_cast<int64_t>(ambient.element_size(dtype));
  if (nbytes > kMostBytes || (nbytes && !source)) return nullptr;
  constexpr int32_t kHost = 0;
  if (ambient.empty(dims, sizes, strides, dtype, kHost, 0, &made)) return nullptr;
  PyObject* result = nullptr;
  if (!shim.data_ptr(made, &target) && (target || !nbytes)) {
    if (nbytes) std::memcpy(target, source, static_cast<size_t>(nbytes));
    result = ambient.wrap(made);
    if (!result) PyErr_Clear();
  }
  ambient.drop(made);
  return result;
}

int needs_gradient(PyObject* tensor) {
  if (ambient.requires_grad) return ambient.requires_grad(impl_of(tensor));
  return truth(attribute(tensor, requires_grad_name));
}

PyMethodDef ambient_methods[] = {
    {"find_ambient", find_ambient, METH_VARARGS,
     "find_ambient(library, bindings, readers, plain, negative, conjugate, inference)\n--\n\nLook up where the "
     "thread's modes and a tensor's flags stand; `readers` are the functions of Python to call instead."},
    {"read_ambient", read_ambient, METH_VARARGS,
     "read_ambient(tensor, device)\n--\n\nWhat the core itself tells: inference mode, autocast of a device's number, "
     "whether the tensor requires a gradient, whether it is plain memory of the host, and whether a profiler is on; "
     "None where it must call Python."},
    {"try_clone", try_clone, METH_O,
     "try_clone(tensor)\n--\n\nWhat tensor.clone() gives, or None where torch has to do it."},
    {"forget_ambient", forget_ambient, METH_O,
     "forget_ambient(place)\n--\n\nCall Python from now on for one of the facts of read_ambient, by its place."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace gd
