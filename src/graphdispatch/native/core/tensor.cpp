#include "tensor.h"

#include <dlfcn.h>

namespace gd {

Shim shim;
Layout layout{};
Py_ssize_t tensor_offset = 0;
PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;

namespace {

constexpr Py_ssize_t kWord = sizeof(void*);
constexpr Py_ssize_t kMostWords = 8;  // behind the head of a PyObject

bool load_shim(const char* library) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (!handle) {
    PyErr_Format(PyExc_ImportError, "%s is not loaded", library);
    return false;
  }
  struct {
    const char* name;
    void** target;
  } const table[] = {
      {"aoti_torch_get_data_ptr", reinterpret_cast<void**>(&shim.data_ptr)},
      {"aoti_torch_get_dim", reinterpret_cast<void**>(&shim.dim)},
      {"aoti_torch_get_numel", reinterpret_cast<void**>(&shim.numel)},
      {"aoti_torch_get_sizes", reinterpret_cast<void**>(&shim.sizes)},
      {"aoti_torch_get_strides", reinterpret_cast<void**>(&shim.strides)},
      {"aoti_torch_get_dtype", reinterpret_cast<void**>(&shim.dtype)},
      {"aoti_torch_get_device_type", reinterpret_cast<void**>(&shim.device_type)},
      {"aoti_torch_get_device_index", reinterpret_cast<void**>(&shim.device_index)},
      {"aoti_torch_get_layout", reinterpret_cast<void**>(&shim.layout)},
      {"aoti_torch_is_contiguous", reinterpret_cast<void**>(&shim.is_contiguous)},
      {"aoti_torch_grad_mode_is_enabled", reinterpret_cast<void**>(&shim.grad_mode_is_enabled)},
      {"aoti_torch_grad_mode_set_enabled", reinterpret_cast<void**>(&shim.grad_mode_set_enabled)},
  };
  for (const auto& entry : table) {
    *entry.target = dlsym(handle, entry.name);
    if (!*entry.target) {
      PyErr_Format(PyExc_ImportError, "this torch has no %s", entry.name);
      return false;
    }
  }
  return true;
}

// An attribute or the result of a method without arguments, as a number; -1 with an error.
long long number_of(PyObject* object, const char* name, bool is_method) {
  PyObject* value = is_method ? PyObject_CallMethod(object, name, nullptr) : PyObject_GetAttrString(object, name);
  long long number = value ? PyLong_AsLongLong(value) : -1;
  Py_XDECREF(value);
  return number;
}

// Where a tensor's PyObject holds the pointer that its ``_cdata`` tells; 0 if nowhere.
Py_ssize_t find_offset(PyObject* tensor) {
  PyObject* cdata = PyObject_GetAttrString(tensor, "_cdata");
  void* impl = cdata ? PyLong_AsVoidPtr(cdata) : nullptr;
  Py_XDECREF(cdata);
  const Py_ssize_t size = Py_TYPE(tensor)->tp_basicsize;
  for (Py_ssize_t offset = sizeof(PyObject); impl && offset + kWord <= size; offset += kWord) {
    if (offset > Py_ssize_t(sizeof(PyObject)) + kMostWords * kWord) break;
    if (*reinterpret_cast<void**>(reinterpret_cast<char*>(tensor) + offset) == impl) return offset;
  }
  return 0;
}

// Whether the shim tells of a tensor what Python tells.
bool agrees(PyObject* tensor) {
  void* handle = handle_of(tensor);
  void* data = nullptr;
  int64_t dim = -1, numel = -1;
  int64_t *sizes = nullptr, *strides = nullptr;
  if (shim.data_ptr(handle, &data) || shim.dim(handle, &dim) || shim.numel(handle, &numel) ||
      shim.sizes(handle, &sizes) || shim.strides(handle, &strides)) {
    return false;
  }
  if (number_of(tensor, "data_ptr", true) != static_cast<long long>(reinterpret_cast<intptr_t>(data))) return false;
  if (number_of(tensor, "dim", true) != dim || number_of(tensor, "numel", true) != numel) return false;
  for (int64_t d = 0; d < dim; ++d) {
    PyObject* size = PyObject_CallMethod(tensor, "size", "L", static_cast<long long>(d));
    PyObject* stride = PyObject_CallMethod(tensor, "stride", "L", static_cast<long long>(d));
    const bool same = size && stride && PyLong_AsLongLong(size) == sizes[d] && PyLong_AsLongLong(stride) == strides[d];
    Py_XDECREF(size);
    Py_XDECREF(stride);
    if (!same) return false;
  }
  return !PyErr_Occurred();
}

// What a method or an attribute of a tensor's storage tells, as a word; 0 with an error.
uint64_t of_storage(PyObject* tensor, const char* name, bool is_method) {
  PyObject* storage = PyObject_CallMethod(tensor, "untyped_storage", nullptr);
  const uint64_t word = storage ? number_of(storage, name, is_method) : 0;
  Py_XDECREF(storage);
  return PyErr_Occurred() ? 0 : word;
}

// The offset of a value among the first words at an address; 0 if it is not there, or the first.
Py_ssize_t offset_of(const char* address, uint64_t value) {
  for (Py_ssize_t offset = kWord; offset < kMostWords * kWord; offset += kWord) {
    if (std::memcmp(&value, address + offset, sizeof value) == 0) return offset;
  }
  return 0;
}

// Whether what the layout points to in a tensor is what the shim and Python tell of it.
bool has_layout(PyObject* tensor) {
  constexpr Py_ssize_t kStrides = 6, kOffset = 11, kDtype = 13;  // words; five sizes come before five strides
  void* handle = handle_of(tensor);
  const char* impl = static_cast<const char*>(impl_of(tensor));
  const char* words = impl + layout.extents;
  int64_t dim = -1, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = -1;
  if (shim.dim(handle, &dim) || shim.sizes(handle, &sizes) || shim.strides(handle, &strides)) return false;
  if (shim.dtype(handle, &dtype)) return false;
  uint16_t kept;
  std::memcpy(&kept, words + kDtype * kWord, sizeof kept);
  if (reinterpret_cast<char*>(sizes) != words + kWord || reinterpret_cast<char*>(strides) != words + kStrides * kWord) {
    return false;
  }
  const uint64_t dims = dim, offset = number_of(tensor, "storage_offset", true);
  const uint64_t storage = of_storage(tensor, "_cdata", false), data = of_storage(tensor, "data_ptr", true);
  return !PyErr_Occurred() && kept == dtype && std::memcmp(&dims, words, sizeof dims) == 0 &&
         std::memcmp(&offset, words + kOffset * kWord, sizeof offset) == 0 &&
         std::memcmp(&storage, impl + layout.storage, sizeof storage) == 0 &&
         std::memcmp(&data, reinterpret_cast<char*>(storage) + layout.data, sizeof data) == 0;
}

// Find the layout in the first sample, and test it on all. It stays unknown where any tells otherwise.
void find_layout(PyObject* samples) {
  PyObject* first = PyTuple_GET_ITEM(samples, 0);
  const char* impl = static_cast<const char*>(impl_of(first));
  const uint64_t storage = of_storage(first, "_cdata", false), data = of_storage(first, "data_ptr", true);
  int64_t* sizes = nullptr;
  if (!storage || !data || shim.sizes(handle_of(first), &sizes)) return;
  layout.extents = reinterpret_cast<char*>(sizes - 1) - impl;
  layout.storage = offset_of(impl, storage);
  layout.data = offset_of(reinterpret_cast<char*>(storage), data);
  const bool is_inside = layout.extents > 0 && layout.extents < 2 * kMostWords * kWord;
  bool is_found = is_inside && layout.storage && layout.data;
  for (Py_ssize_t i = 0; is_found && i < PyTuple_GET_SIZE(samples); ++i) {
    is_found = has_layout(PyTuple_GET_ITEM(samples, i));
  }
  layout.is_found = is_found;
}

}  // namespace

Imprint imprint_of(void* handle, bool counts, Form& form) {
  Imprint imprint{};
  imprint.handle = handle;
  const char* impl = *static_cast<const char**>(handle);
  int64_t* sizes = nullptr;
  if (!layout.is_found || shim.sizes(handle, &sizes)) return imprint;
  if (reinterpret_cast<const char*>(sizes - 1) != impl + layout.extents) return imprint;
  if (counts) {
    std::memcpy(&imprint.storage, impl + layout.storage, sizeof imprint.storage);
    if (!imprint.storage) return imprint;
    std::memcpy(imprint.data, imprint.storage + layout.data, sizeof imprint.data);
  }
  std::memcpy(form.words, impl + layout.extents, sizeof form.words);
  imprint.form = &form;
  imprint.impl = impl;
  return imprint;
}

bool find_torch(const char* library, PyObject* tensor_class, PyObject* parameter_class, PyObject* samples) {
  if (!load_shim(library)) return false;
  tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor_class));
  parameter_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter_class));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(samples); ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(samples, i);
    const Py_ssize_t offset = find_offset(tensor);
    if (i == 0) tensor_offset = offset;
    if (!offset || offset != tensor_offset || !agrees(tensor)) {
      PyErr_Clear();
      PyErr_SetString(PyExc_ImportError, "a torch.Tensor lies in memory in an unknown way");
      return false;
    }
  }
  find_layout(samples);
  PyErr_Clear();
  return true;
}

}  // namespace gd
