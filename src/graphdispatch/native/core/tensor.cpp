#include "tensor.h"

#include <dlfcn.h>

namespace gd {

Shim shim;
Layout layout{};
PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;

namespace {

constexpr Py_ssize_t kWord = sizeof(void*);
constexpr Py_ssize_t kMostWords = 8;  // behind the head of a PyObject

// Look up all functions in the two libraries; false with an ImportError where one is missing.
bool load_shim(const char* library, const char* bindings) {
  void *torch = dlopen(library, RTLD_LAZY | RTLD_NOLOAD), *python = dlopen(bindings, RTLD_LAZY | RTLD_NOLOAD);
  if (!torch || !python) {
    PyErr_Format(PyExc_ImportError, "%s is not loaded", torch ? bindings : library);
    return false;
  }
  auto of = [](auto& function) { return reinterpret_cast<void**>(&function); };
  struct {
    void* from;
    const char* name;
    void** target;
  } const table[] = {
      {torch, "aoti_torch_get_data_ptr", of(shim.data_ptr)},
      {torch, "aoti_torch_get_dim", of(shim.dim)},
      {torch, "aoti_torch_get_numel", of(shim.numel)},
      {torch, "aoti_torch_get_sizes", of(shim.sizes)},
      {torch, "aoti_torch_get_strides", of(shim.strides)},
      {torch, "aoti_torch_get_dtype", of(shim.dtype)},
      {torch, "aoti_torch_get_device_type", of(shim.device_type)},
      {torch, "aoti_torch_get_device_index", of(shim.device_index)},
      {torch, "aoti_torch_get_layout", of(shim.layout)},
      {torch, "aoti_torch_is_contiguous", of(shim.is_contiguous)},
      {torch, "aoti_torch_grad_mode_is_enabled", of(shim.grad_mode_is_enabled)},
      {torch, "aoti_torch_grad_mode_set_enabled", of(shim.grad_mode_set_enabled)},
      {torch, "aoti_torch_empty_strided", of(shim.empty)},
      {torch, "aoti_torch_dtype_element_size", of(shim.element_size)},
      {torch, "aoti_torch_delete_tensor_object", of(shim.drop)},
      {torch, "_ZN3c1013InferenceMode10is_enabledEv", of(shim.inference_mode)},
      {torch, "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE", of(shim.autocast)},
      {torch, "_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE", of(shim.autocast_dtype)},
      {torch, "_ZN5torch8profiler4impl15profilerEnabledEv", of(shim.profiler)},
      {torch, "_ZN3c104impl21dispatch_mode_enabledEv", of(shim.dispatch_mode)},
      {torch, "_ZN2at4impl27torch_function_mode_enabledEv", of(shim.function_mode)},
      {torch, "_ZN5torch3jit6tracer15getTracingStateEv", of(shim.tracing)},
      {torch, "_ZN2at9functorch20getDynamicLayerStackEv", of(shim.transforms)},
      {torch, "_ZNK3c1010TensorImpl13requires_gradEv", of(shim.requires_grad)},
      {torch, "_ZNK2at10TensorBase8_versionEv", of(shim.version)},
      {python, "_Z16THPVariable_WrapRKN2at10TensorBaseE", of(shim.wrap)},
  };
  for (const auto& entry : table) {
    *entry.target = dlsym(entry.from, entry.name);
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

// Find the layout in the first sample, and test it on all.
bool find_layout(PyObject* samples) {
  PyObject* first = PyTuple_GET_ITEM(samples, 0);
  const char* impl = static_cast<const char*>(impl_of(first));
  const uint64_t storage = of_storage(first, "_cdata", false), data = of_storage(first, "data_ptr", true);
  int64_t* sizes = nullptr;
  if (!storage || !data || shim.sizes(handle_of(first), &sizes)) return false;
  layout.extents = reinterpret_cast<char*>(sizes - 1) - impl;
  layout.storage = offset_of(impl, storage);
  layout.data = offset_of(reinterpret_cast<char*>(storage), data);
  const bool is_inside = layout.extents > 0 && layout.extents < 2 * kMostWords * kWord;
  if (!is_inside || !layout.storage || !layout.data) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(samples); ++i) {
    if (!has_layout(PyTuple_GET_ITEM(samples, i))) return false;
  }
  return true;
}

}  // namespace

Imprint imprint_of(PyObject* tensor, bool counts, Form& form) {
  Imprint imprint{};
  void* const handle = imprint.handle = handle_of(tensor);
  imprint.kind = Py_TYPE(tensor);
  const char* impl = *static_cast<const char**>(handle);
  int64_t* sizes = nullptr;
  if (shim.sizes(handle, &sizes)) return imprint;
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

bool find_torch(const char* library, const char* bindings, PyObject* tensor_class, PyObject* parameter_class,
                PyObject* samples) {
  if (!load_shim(library, bindings)) return false;
  tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor_class));
  parameter_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter_class));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(samples); ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(samples, i);
    const Py_ssize_t offset = find_offset(tensor);
    if (i == 0) layout.tensor = offset;
    if (!offset || offset != layout.tensor || !agrees(tensor)) return false;
  }
  return find_layout(samples);
}

}  // namespace gd
