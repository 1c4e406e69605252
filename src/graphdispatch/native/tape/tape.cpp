// The tape of a graph: operators with prepared arguments, which a replay calls in order with the GIL released.
//
// Each is called through torch's dispatcher, below autograd, as the Python loop of backends/cpu calls it: the same
// kernels for the same reasons, the profiler and the generators included. What cannot be prepared stays a call of
// Python, for which alone the GIL is taken.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>

#include "convert.h"

namespace {

using c10::IValue;
using Sizes = std::vector<std::vector<int64_t>>;

struct Step {
  std::optional<c10::OperatorHandle> op;  // none: Python's call
  torch::jit::Stack arguments;
  bool copies = false;  // whether new results are copied to `outs`
  std::vector<at::Tensor> outs;
  PyObject* call = nullptr;  // owned, where there is no operator
};

struct Tape {
  PyObject_HEAD std::vector<Step>* steps;
  Py_ssize_t position;  // the step that runs, or the last that ran
  PyObject* loop;       // owned; Python's way through all steps
  PyObject* tell;       // owned; gets a position, and an error to note it in, or shapes to refuse
};

// The GIL is released while one lives, but between `take` and `give`.
class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;
  // At the interpreter's end this may end the thread by unwinding it, which must not end the process.
  ~Released() noexcept(false) { take(); }
  void take() {
    if (state_) PyEval_RestoreThread(std::exchange(state_, nullptr));
  }
  void give() { state_ = PyEval_SaveThread(); }

 private:
  PyThreadState* state_;
};

// Keeps the warnings of one step, which then become Python's before the next step runs.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { kept_.push_back(warning); }
  void raise() {
    if (kept_.empty()) return;
    torch::PyWarningHandler python;
    tell();
  }
  void tell() {
    for (const c10::Warning& warning : std::exchange(kept_, {})) c10::warn(warning);
  }

 private:
  std::vector<c10::Warning> kept_;
};

// Whether nothing but the library's own guard changes what operators do on this thread: no mode, no transform, no
// trace.
bool is_plain_thread() {
  const auto added = c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set;
  return added.empty() && !at::impl::torch_function_mode_enabled();
}

void find_tensors(const IValue& value, std::vector<at::Tensor>& found) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) found.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) found.push_back(tensor);
    }
  } else if (value.isList()) {
    for (const IValue& item : value.toListRef()) find_tensors(item, found);
  }
}

void keep_new(const Step& step, std::vector<at::Tensor>& results) {
  std::vector<at::Tensor> given;
  for (const IValue& value : step.arguments) find_tensors(value, given);
  const auto is_given = [&](const at::Tensor& result) {
    return std::any_of(given.begin(), given.end(), [&](const at::Tensor& t) { return t.is_alias_of(result); });
  };
  results.erase(std::remove_if(results.begin(), results.end(), is_given), results.end());
}

// Copies what the step made to its places. False if it made other shapes than these, which `got` then holds.
bool copy_results(const Step& step, const torch::jit::Stack& stack, Sizes& got) {
  std::vector<at::Tensor> results;
  for (const IValue& value : stack) find_tensors(value, results);
  keep_new(step, results);
  bool agrees = results.size() == step.outs.size();
  for (size_t index = 0; agrees && index < results.size(); ++index) {
    agrees = results[index].sizes() == step.outs[index].sizes();
  }
  if (!agrees) {
    for (const at::Tensor& result : results) got.push_back(result.sizes().vec());
    return false;
  }
  for (size_t index = 0; index < results.size(); ++index) step.outs[index].copy_(results[index]);
  return true;
}

void call_python(const Step& step, Released& released) {
  released.take();
  PyObject* result = PyObject_CallNoArgs(step.call);
  if (!result) {
    python_error raised;
    raised.persist();
    throw raised;
  }
  Py_DECREF(result);
  released.give();
}

bool run(Tape* tape, Warnings& warnings, Sizes& got) {
  Released released;
  at::AutoDispatchBelowAutograd below;
  c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  torch::jit::Stack stack;
  stack.reserve(16);
  const std::vector<Step>& steps = *tape->steps;
  for (size_t index = 0; index < steps.size(); ++index) {
    const Step& step = steps[index];
    tape->position = static_cast<Py_ssize_t>(index);
    if (!step.op) {
      call_python(step, released);
      continue;
    }
    stack.assign(step.arguments.begin(), step.arguments.end());
    step.op->callBoxed(stack);
    if (step.copies && !copy_results(step, stack, got)) return false;
    warnings.raise();
  }
  return true;
}

PyObject* to_shapes(const Sizes& sizes) {
  PyObject* shapes = PyList_New(0);
  for (const auto& size : sizes) {
    PyObject* shape = PyTuple_New(static_cast<Py_ssize_t>(size.size()));
    for (size_t dim = 0; dim < size.size(); ++dim) PyTuple_SET_ITEM(shape, dim, PyLong_FromLongLong(size[dim]));
    PyList_Append(shapes, shape);
    Py_DECREF(shape);
  }
  return shapes;
}

// What the steps give: None, or the shapes that the graph has no place for.
PyObject* run_steps(Tape* tape) {
  HANDLE_TH_ERRORS
  Warnings warnings;
  Sizes got;
  try {
    if (!run(tape, warnings, got)) return to_shapes(got);
  } catch (...) {
    warnings.tell();
    throw;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* replay(PyObject* self, PyObject*) {
  auto* tape = reinterpret_cast<Tape*>(self);
  if (!is_plain_thread()) return PyObject_CallNoArgs(tape->loop);
  PyObject* result = run_steps(tape);
  if (result == Py_None) return result;
  if (result) return PyObject_CallFunction(tape->tell, "nN", tape->position, result);
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  PyObject* noted = PyObject_CallFunction(tape->tell, "nO", tape->position, error);
  if (!noted) PyErr_Clear();
  Py_XDECREF(noted);
  PyErr_Restore(type, error, traceback);
  return nullptr;
}

bool prepare(Step& step, const char* name, const char* overload, PyObject* args, PyObject* kwargs) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!op || !graphdispatch::has_plain_results(op->schema())) return false;
  if (!graphdispatch::convert_arguments(op->schema(), args, kwargs, step.arguments)) return false;
  step.op = op;
  return true;
}

PyObject* add(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *call, *args, *kwargs, *outs;
  const char *name, *overload;
  if (!PyArg_ParseTuple(arguments, "OssO!O!O", &call, &name, &overload, &PyTuple_Type, &args, &PyDict_Type, &kwargs,
                        &outs))
    return nullptr;
  Step step;
  bool is_native = prepare(step, name, overload, args, kwargs);
  if (is_native && outs != Py_None) {
    step.copies = true;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(outs); ++index) {
      step.outs.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(outs, index)));
    }
  }
  if (!is_native) {
    step = Step();
    step.call = Py_NewRef(call);
  }
  reinterpret_cast<Tape*>(self)->steps->push_back(std::move(step));
  return PyBool_FromLong(is_native);
  END_HANDLE_TH_ERRORS
}

PyObject* add_call(PyObject* self, PyObject* call) {
  Step step;
  step.call = Py_NewRef(call);
  reinterpret_cast<Tape*>(self)->steps->push_back(std::move(step));
  Py_RETURN_NONE;
}

Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(reinterpret_cast<Tape*>(self)->steps->size()); }

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *loop, *tell;
  if (!PyArg_ParseTuple(args, "OO", &loop, &tell)) return nullptr;
  auto* tape = reinterpret_cast<Tape*>(type->tp_alloc(type, 0));
  if (!tape) return nullptr;
  tape->steps = new std::vector<Step>();
  tape->loop = Py_NewRef(loop);
  tape->tell = Py_NewRef(tell);
  return reinterpret_cast<PyObject*>(tape);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  auto* tape = reinterpret_cast<Tape*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(tape->loop);
  Py_VISIT(tape->tell);
  if (!tape->steps) return 0;
  for (const Step& step : *tape->steps) Py_VISIT(step.call);
  return 0;
}

int clear(PyObject* self) {
  auto* tape = reinterpret_cast<Tape*>(self);
  Py_CLEAR(tape->loop);
  Py_CLEAR(tape->tell);
  std::vector<Step> steps;
  std::swap(steps, *tape->steps);
  for (Step& step : steps) Py_XDECREF(step.call);
  return 0;
}

void drop(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  delete reinterpret_cast<Tape*>(self)->steps;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, nullptr},
    {"add_call", add_call, METH_O, nullptr},
    {"replay", replay, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_methods, reinterpret_cast<void*>(methods)},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {0, nullptr},
};
PyType_Spec tape_type = {
    "graphdispatch.native._tape.Tape", sizeof(Tape), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};
int fill(PyObject* made) {
  PyObject* type = PyType_FromSpec(&tape_type);
  const int failed = type ? PyModule_AddObjectRef(made, "Tape", type) : -1;
  Py_XDECREF(type);
  return failed;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {0, nullptr}};
PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_tape", nullptr, 0, nullptr, module_slots, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__tape() { return PyModuleDef_Init(&module); }
