#include "output_copies.h"

#include <atomic>

namespace gd {

namespace {

constexpr size_t kMostBytes = 64 * 1024;         // of one copy
constexpr size_t kMostOfAll = 16 * 1024 * 1024;  // of all copies in the process

const char* storage_of(const char* impl) { return *reinterpret_cast<const char* const*>(impl + layout.storage); }

// Whether a tensor is another object than torch makes: of a class, with attributes or weak references of somebody's.
bool is_marked(PyObject* tensor) {
  if (Py_TYPE(tensor) != tensor_type || *PyObject_GET_WEAKREFS_LISTPTR(tensor)) return true;
  PyObject** attributes = _PyObject_GetDictPtr(tensor);
  return attributes && *attributes && PyDict_GET_SIZE(*attributes);
}

}  // namespace

size_t OutputCopies::all_bytes = 0;

Holding Holding::of(PyObject* tensor) {
  Holding now;
  const char* address = static_cast<const char*>(impl_of(tensor));
  std::memcpy(now.impl, address, sizeof now.impl);
  std::memcpy(now.storage, storage_of(address), sizeof now.storage);
  return now;
}

bool Holding::is_of(PyObject* tensor) const {
  const char* address = static_cast<const char*>(impl_of(tensor));
  if (std::memcmp(impl, address, sizeof impl) || std::memcmp(storage, storage_of(address), sizeof storage))
    return false;
  std::atomic_thread_fence(std::memory_order_acquire);  // after whatever another thread did before it let go
  return true;
}

PyObject* OutputCopies::copy_of(PyObject* tensor) {
  if (!is_learnt_) is_kept_ = learn(tensor), is_learnt_ = true;
  if (!is_kept_ || shim.dispatch_mode() || shim.function_mode() || !is_plain_host(tensor) ||
      !is_as(source_, layout) || shim.inference_mode() != is_inference_) {
    return clone(tensor);
  }
  for (Made& made : made_) {
    PyObject* copy = made.tensor.get();
    if (!copy || Py_REFCNT(copy) != 1) continue;
    if (!is_marked(copy) && is_plain_host(copy) && made.holding.is_of(copy) &&
        (is_inference_ || !shim.version(handle_of(copy)))) {
      std::memcpy(made.data, from_, nbytes_);
      return Py_NewRef(copy);
    }
    if (spent_) continue;
    spent_ = std::move(made.tensor);
    all_bytes -= nbytes_;
  }
  PyObject* copy = clone(tensor);
  if (copy) keep(copy);
  return copy;
}

// Find out what copies of the output take, and whether any are kept.
bool OutputCopies::learn(PyObject* tensor) {
  if (!is_plain_tensor(tensor) || !is_plain_host(tensor)) return false;
  void *handle = handle_of(tensor), *data = nullptr;
  int64_t numel = 0;
  int32_t dtype = 0;
  if (shim.data_ptr(handle, &data) || shim.numel(handle, &numel) || shim.dtype(handle, &dtype)) return false;
  source_ = imprint_of(tensor, true, form_);
  from_ = data;
  nbytes_ = static_cast<size_t>(numel) * shim.element_size(dtype);
  is_inference_ = shim.inference_mode();
  return source_.impl && data && nbytes_ && nbytes_ <= kMostBytes;
}

// Keep a copy that was just made, in the place of none or of one that is in use.
void OutputCopies::keep(PyObject* copy) {
  int place = made_[0].tensor ? made_[1].tensor ? oldest_ : 1 : 0;
  Made& made = made_[place];
  if (made.tensor ? Py_REFCNT(made.tensor.get()) == 1 : all_bytes + nbytes_ > kMostOfAll) return;
  if (shim.data_ptr(handle_of(copy), &made.data)) return;
  if (!made.tensor) all_bytes += nbytes_;
  made.holding = Holding::of(copy);
  made.tensor = Ref::of(copy);  // of the old one somebody has a reference
  oldest_ = 1 - place;
}

int OutputCopies::traverse(visitproc visit, void* arg) const {
  for (const Made& made : made_) Py_VISIT(made.tensor.get());
  Py_VISIT(spent_.get());
  return 0;
}

void OutputCopies::clear() {
  for (Made& made : made_) {
    if (made.tensor) all_bytes -= nbytes_;
    const Ref dropped = std::move(made.tensor);
  }
  drop_spent();
}

}  // namespace gd
