#include "ambient.h"

#include <cstring>
#include <iterator>

#include "object.h"

namespace gd {

uint64_t plain_keys, inference_keys;

namespace {

bool is_one_bit(uint64_t word) { return word && !(word & (word - 1)); }

// What the core reads of the thread and of a tensor: whether inference mode, autocast of a device's number, a profiler
// and any other mode are on, whether the dtype is that of autocast, and whether the tensor requires a gradient and is
// plain memory of the host.
PyObject* read_ambient(PyObject*, PyObject* args) {
  PyObject* tensor;
  signed char device;
  int32_t dtype = -1;
  if (!PyArg_ParseTuple(args, "O!b", tensor_type, &tensor, &device)) return nullptr;
  shim.dtype(handle_of(tensor), &dtype);
  const bool flags[] = {shim.inference_mode(), shim.autocast(device), shim.profiler(), may_be_in_mode(),
                        shim.autocast_dtype(device) == dtype, needs_gradient(tensor), is_plain_host(tensor)};
  Ref found(PyTuple_New(std::size(flags)));
  for (size_t i = 0; found && i < std::size(flags); ++i) PyTuple_SET_ITEM(found.get(), i, PyBool_FromLong(flags[i]));
  return found.release();
}

// The copy that clone() makes of a plain tensor, or None.
PyObject* try_clone(PyObject*, PyObject* tensor) {
  PyObject* made = is_plain_tensor(tensor) ? clone(tensor) : nullptr;
  return made ? made : Py_NewRef(Py_None);
}

}  // namespace

PyObject* clone(PyObject* tensor) {
  constexpr int64_t kMostBytes = 256 * 1024;
  if (shim.dispatch_mode() || shim.function_mode() || !is_plain_host(tensor)) return nullptr;
  void *handle = handle_of(tensor), *source = nullptr, *target = nullptr;
  int64_t numel = 0;
  int32_t dtype = 0;
  if (shim.numel(handle, &numel) || shim.data_ptr(handle, &source) || shim.dtype(handle, &dtype)) return nullptr;
  const int64_t nbytes = numel * static_cast<int64_t>(shim.element_size(dtype));
  if (nbytes > kMostBytes || (nbytes && !source)) return nullptr;
  PyObject* result = empty_like(tensor, &target);
  if (result && nbytes) std::memcpy(target, source, static_cast<size_t>(nbytes));
  return result;
}

PyObject* empty_like(PyObject* tensor, void** data) {
  void *handle = handle_of(tensor), *made = nullptr;
  bool is_contiguous = false;
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, type = 0, index = 0;
  if (shim.is_contiguous(handle, &is_contiguous) || !is_contiguous || shim.dim(handle, &dims) ||
      shim.sizes(handle, &sizes) || shim.strides(handle, &strides) || shim.dtype(handle, &dtype) ||
      shim.device_type(handle, &type) || shim.device_index(handle, &index) ||
      shim.empty(dims, sizes, strides, dtype, type, index, &made)) {
    return nullptr;
  }
  PyObject* result = shim.data_ptr(made, data) ? nullptr : shim.wrap(made);
  if (!result) PyErr_Clear();
  shim.drop(made);
  return result;
}

bool find_keys(PyObject* plain, PyObject* negative, PyObject* conjugate, PyObject* inference) {
  plain_keys = keys_of(PyTuple_GET_ITEM(plain, 0)), inference_keys = keys_of(inference);
  for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(plain); ++i) {
    if (keys_of(PyTuple_GET_ITEM(plain, i)) != plain_keys) return false;
  }
  const uint64_t negated = keys_of(negative) ^ plain_keys, conjugated = keys_of(conjugate) ^ plain_keys;
  return is_one_bit(negated) && !(negated & plain_keys) && is_one_bit(conjugated) && !(conjugated & plain_keys) &&
         conjugated != negated && inference_keys && inference_keys != plain_keys &&
         (inference_keys & plain_keys) == inference_keys;
}

PyMethodDef ambient_methods[] = {
    {"read_ambient", read_ambient, METH_VARARGS,
     "read_ambient(tensor, device)\n--\n\nWhat the core reads: whether inference mode, autocast of a device's number, a "
     "profiler and a mode of somebody's are on, whether the tensor's dtype is that of autocast, and whether it requires "
     "a gradient and is plain memory of the host."},
    {"try_clone", try_clone, METH_O,
     "try_clone(tensor)\n--\n\nWhat tensor.clone() gives, or None where torch has to do it."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace gd
