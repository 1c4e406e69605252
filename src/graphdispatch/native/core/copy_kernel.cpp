#include "copy_kernel.h"

#include <algorithm>
#include <memory>

namespace gd {

namespace {

// Put an address, which Python has as a number, into a pointer.
int address_of(PyObject* number, void* pointer) {
  void* address = PyLong_AsVoidPtr(number);
  std::memcpy(pointer, &address, sizeof address);
  return !PyErr_Occurred();
}

}  // namespace

bool CopyKernel::take(PlanObject* plan) {
  const Ref kernel = attribute(plan->backend, names.copy_kernel), device = attribute(plan->backend, names.device);
  if (!kernel || !device) return false;
  if (kernel.get() == Py_None || plan->copies->size() > kMostInputs) return true;
  const Ref paddings(PyObject_CallMethodOneArg(plan->inputs, names.paddings_on, device.get()));
  if (!paddings || paddings.get() == Py_None) return static_cast<bool>(paddings);
  auto made = std::make_unique<CopyKernel>();
  if (!made->take_addresses(kernel.get()) || !made->take_inputs(plan, paddings.get()) || !made->take_outlet(plan)) {
    return false;
  }
  plan->kernel = made.release();
  return true;
}

bool CopyKernel::take_addresses(PyObject* kernel) {
  PyObject* give;  // was called by the capture
  return PyArg_ParseTuple(kernel, "O&O&O&O&O", address_of, &launch_, address_of, &current_, address_of, &function_,
                          address_of, &context_, &give);
}

bool CopyKernel::take_inputs(PlanObject* plan, PyObject* paddings) {
  for (size_t i = 0; i < plan->copies->size(); ++i) {
    const Copy& copy = (*plan->copies)[i];
    CopiedInput& input = inputs_.each[i];
    PyObject* padding = PyDict_GetItemWithError(paddings, Ref(PyLong_FromSsize_t(copy.position)).get());
    input.target = copy.data;
    input.real = copy.nbytes;
    rows_[i] = padding ? copy.nbytes / plan->rows : 0;
    if (padding == Py_None) input.row = rows_[i];
    if (padding && PyBytes_Check(padding)) std::memcpy(input.fill, PyBytes_AS_STRING(padding), sizeof input.fill);
  }
  return !PyErr_Occurred();
}

// Find out which outputs the graph puts where they are wanted; false with an error.
bool CopyKernel::take_outlet(PlanObject* plan) {
  const Ref graph = attribute(plan->entry, names.graph), outlet = graph ? attribute(graph.get(), names.outlet) : Ref();
  if (!outlet || outlet.get() == Py_None || !plan->parts) return static_cast<bool>(outlet);
  const Ref addresses = attribute(outlet.get(), names.addresses), wanted = attribute(outlet.get(), names.wanted);
  if (!addresses || !wanted) return false;
  if (PyTuple_GET_SIZE(addresses.get()) != PyTuple_GET_SIZE(plan->parts)) return true;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plan->parts); ++i) {
    PyObject* part = PyTuple_GET_ITEM(plan->parts, i);
    const Ref nbytes(PyObject_GetAttrString(part, "nbytes"));
    void *source = nullptr, *data = nullptr;
    bool is_contiguous = false;
    if (!nbytes || !address_of(PyTuple_GET_ITEM(addresses.get(), i), &source)) return false;
    if (PyTuple_GET_ITEM(plan->is_own, i) != Py_True || !is_plain_tensor(part)) continue;
    if (shim.data_ptr(handle_of(part), &data) || data != source) continue;
    if (shim.is_contiguous(handle_of(part), &is_contiguous) || !is_contiguous) continue;
    inputs_.outputs[i].bytes = PyLong_AsSize_t(nbytes.get());
  }
  return !PyErr_Occurred() && address_of(wanted.get(), &wanted_);
}

// Make a tensor for each output that the graph puts somewhere; false without an error where torch has to clone them.
bool CopyKernel::make_outputs(PlanObject* plan) {
  if (!wanted_ || shim.dispatch_mode() || shim.function_mode()) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plan->parts); ++i) {
    Place& output = inputs_.outputs[i];
    if (output.bytes) outputs_[i] = Ref(empty_like(PyTuple_GET_ITEM(plan->parts, i), &output.address));
    if (output.bytes && !outputs_[i]) return false;
  }
  return true;
}

int CopyKernel::load(PlanObject* plan, const Values& values, int64_t clean_from) {
  constexpr unsigned kThreads = 256, kMostBlocks = 1024, kOfBlock = 16 * 1024;  // the last: bytes
  void* context = nullptr;
  if (current_(&context) || context != context_) return 0;  // another device's, or a new thread
  unsigned long long most = 0;
  const unsigned count = plan->copies->size();
  for (unsigned i = 0; i < count; ++i) {
    CopiedInput& input = inputs_.each[i];
    Copy& copy = (*plan->copies)[i];
    input.source = bytes_of(copy, values[copy.position]);
    if (!input.source && copy.nbytes) return 0;
    const int64_t end = plan->rows == plan->size ? plan->rows : input.row ? plan->size : clean_from;
    input.all = copy.nbytes + rows_[i] * (end - plan->rows);
    most = std::max(most, input.all);
  }
  const Ref raw = attribute(plan->pool, names._last_raw);
  void* stream = raw ? PyLong_AsVoidPtr(raw.get()) : nullptr;
  if (PyErr_Occurred()) return -1;
  inputs_.wanted = make_outputs(plan) ? wanted_ : nullptr;
  void* parameters[] = {&inputs_};
  const unsigned blocks = std::clamp<unsigned long long>(most / kOfBlock, 1, kMostBlocks);
  int refused;
  Py_BEGIN_ALLOW_THREADS;  // a full stream waits for its work, which may be a callback that wants the interpreter
  refused = launch_(function_, blocks, count, 1, kThreads, 1, 1, 0, stream, parameters, nullptr);
  Py_END_ALLOW_THREADS;
  if (refused || !inputs_.wanted) forget_outputs(false);
  return !refused;
}

void CopyKernel::forget_outputs(bool are_noted) {
  for (Ref& output : outputs_) {
    if (are_noted) output.release();
    const Ref dropped = std::move(output);
  }
}

}  // namespace gd
