#include "tensor.h"

#include <dlfcn.h>

#include <algorithm>

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

// A tensor, with what Python tells of it.
struct Sample {
  PyObject *tensor, *shape, *strides;
  unsigned long long impl, data, numel, offset, storage, memory;

  bool read(PyObject* item) {
    return PyArg_ParseTuple(item, "OKKKKKKO!O!", &tensor, &impl, &data, &numel, &offset, &storage, &memory,
                            &PyTuple_Type, &shape, &PyTuple_Type, &strides);
  }
};

bool is_at(const char* address, uint64_t value) { return std::memcmp(&value, address, sizeof value) == 0; }

// The offset of a value among the first words at an address, from one on; 0 if it is not there.
Py_ssize_t offset_of(const char* address, uint64_t value, Py_ssize_t from = kWord, Py_ssize_t end = kMostWords * kWord) {
  for (Py_ssize_t offset = from; offset + kWord <= end; offset += kWord) {
    if (is_at(address + offset, value)) return offset;
  }
  return 0;
}

// Whether the shim, and what the layout points to in a tensor, tell of it what Python tells.
bool agrees(const Sample& sample) {
  constexpr Py_ssize_t kStrides = 6, kOffset = 11, kDtype = 13;  // words; five sizes come before five strides
  void *handle = handle_of(sample.tensor), *data = nullptr;
  const char *impl = static_cast<const char*>(impl_of(sample.tensor)), *words = impl + layout.extents;
  int64_t dim = -1, numel = -1, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = -1;
  if (shim.data_ptr(handle, &data) || shim.dim(handle, &dim) || shim.numel(handle, &numel) ||
      shim.sizes(handle, &sizes) || shim.strides(handle, &strides) || shim.dtype(handle, &dtype)) {
    return false;
  }
  if (reinterpret_cast<uintptr_t>(data) != sample.data || static_cast<uint64_t>(numel) != sample.numel) return false;
  if (dim != PyTuple_GET_SIZE(sample.shape) || dim != PyTuple_GET_SIZE(sample.strides)) return false;
  for (int64_t d = 0; d < dim; ++d) {
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(sample.shape, d)) != sizes[d]) return false;
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(sample.strides, d)) != strides[d]) return false;
  }
  uint16_t kept;
  std::memcpy(&kept, words + kDtype * kWord, sizeof kept);
  return reinterpret_cast<char*>(sizes) == words + kWord && reinterpret_cast<char*>(strides) == words + kStrides * kWord &&
         kept == dtype && is_at(words, dim) && is_at(words + kOffset * kWord, sample.offset) &&
         is_at(impl + layout.storage, sample.storage) &&
         is_at(reinterpret_cast<char*>(sample.storage) + layout.data, sample.memory);
}

// Find the layout in the first sample, which has an address; false with or without an error.
bool find_layout(const Sample& first) {
  const Py_ssize_t end = std::min(Py_TYPE(first.tensor)->tp_basicsize, Py_ssize_t(sizeof(PyObject)) + kMostWords * kWord);
  layout.tensor = offset_of(reinterpret_cast<char*>(first.tensor), first.impl, sizeof(PyObject), end);
  int64_t* sizes = nullptr;
  if (!layout.tensor || !first.storage || !first.memory || shim.sizes(handle_of(first.tensor), &sizes)) return false;
  layout.extents = reinterpret_cast<char*>(sizes - 1) - reinterpret_cast<char*>(first.impl);
  layout.storage = offset_of(reinterpret_cast<char*>(first.impl), first.storage);
  layout.data = offset_of(reinterpret_cast<char*>(first.storage), first.memory);
  return layout.extents > 0 && layout.extents < 2 * kMostWords * kWord && layout.storage && layout.data;
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
    Sample sample;
    if (!sample.read(PyTuple_GET_ITEM(samples, i)) || (i == 0 && !find_layout(sample))) return false;
    if (impl_of(sample.tensor) != reinterpret_cast<void*>(sample.impl) || !agrees(sample)) return false;
  }
  return true;
}

}  // namespace gd
