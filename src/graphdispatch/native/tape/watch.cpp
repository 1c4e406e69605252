#include "watch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

#include <unordered_map>
#include <unordered_set>

namespace {

// What torch keeps free for tests of its dispatcher: operators go there first, before their parts are made, on threads
// that ask for it.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

enum class Kind { kOther, kQuiet, kComposite, kConverting, kLimiting, kGrouping };  // as the numbers of `judge`

struct Watch {
  PyObject_HEAD PyObject* judge;          // owned; gets an operator's name and overload
  PyObject* stop;                         // owned; the class of the error that ends the run
  std::unordered_set<const void*>* used;  // storages
  uint64_t plain;                         // the dispatch keys that a tensor may have
  bool was_stopped, limits_values, groups_rows;
};

thread_local Watch* current = nullptr;
// What was said of the operators met so far, and who said it. Operators of torch stay for good, and no other is quiet.
thread_local std::unordered_map<const c10::FunctionSchema*, Kind> kinds;
thread_local PyObject* judge_of_kinds = nullptr;  // held, so that no other object gets its address

Kind ask(Watch* watch, const c10::OperatorHandle& op) {
  pybind11::gil_scoped_acquire gil;
  const auto& name = op.operator_name();
  PyThreadState* thread = PyThreadState_Get();
  PyThreadState_EnterTracing(thread);  // a trace of the run shall not see this
  PyObject* answer = PyObject_CallFunction(watch->judge, "ss", name.name.c_str(), name.overload_name.c_str());
  const long kind = answer ? PyLong_AsLong(answer) : 0;
  Py_XDECREF(answer);
  PyErr_Clear();
  PyThreadState_LeaveTracing(thread);
  return kind > 0 && kind <= static_cast<long>(Kind::kGrouping) ? static_cast<Kind>(kind) : Kind::kOther;
}

Kind kind_of(Watch* watch, const c10::OperatorHandle& op) {
  const auto known = kinds.find(&op.schema());
  return known != kinds.end() ? known->second : kinds.emplace(&op.schema(), ask(watch, op)).first->second;
}

// Note the storage of a tensor; false for one that is not plain memory.
bool note(Watch* watch, const at::Tensor& tensor) {
  if (!tensor.defined()) return true;
  if ((tensor.key_set().raw_repr() & ~watch->plain) || !tensor.has_storage()) return false;
  watch->used->insert(tensor.storage().unsafeGetStorageImpl());
  return true;
}

bool note_all(Watch* watch, const torch::jit::Stack& stack, size_t count) {
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (value.isTensor()) {
      if (!note(watch, value.toTensor())) return false;
    } else if (value.isList()) {
      for (const c10::IValue& entry : value.toListRef()) {
        if (entry.isTensor() && !note(watch, entry.toTensor())) return false;
      }
    }
  }
  return true;
}

// Whether integers were made of floating-point numbers.
bool made_integers(const c10::IValue& made) {
  return made.isTensor() && at::isIntegralType(made.toTensor().scalar_type(), /*includeBool=*/false);
}

bool are_real(const torch::jit::Stack& stack, size_t count) {
  const c10::IValue& first = stack[stack.size() - count];
  return first.isTensor() && at::isFloatingType(first.toTensor().scalar_type());
}

[[noreturn]] void stop(Watch* watch, const c10::OperatorHandle& op) {
  TORCH_CHECK(watch, "a thread that another one started runs ", op.operator_name(), " in a run that is watched");
  watch->was_stopped = true;
  pybind11::gil_scoped_acquire gil;
  PyErr_SetString(watch->stop, op.operator_name().name.c_str());
  python_error error;
  error.persist();
  throw error;
}

void see(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto later = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  Kind kind = Kind::kQuiet;
  bool converts = false;
  // Torch hides some of its own work from modes, such as the memory of a new torch.tensor().
  if (!c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) {
    const size_t count = op.schema().arguments().size();
    kind = current ? kind_of(current, op) : Kind::kOther;
    if (kind == Kind::kComposite) return op.redispatchBoxed(later, stack);
    if (kind == Kind::kOther || !note_all(current, *stack, count)) stop(current, op);
    converts = kind == Kind::kConverting && are_real(*stack, count);
    current->limits_values |= kind == Kind::kLimiting;
    current->groups_rows |= kind == Kind::kGrouping;
  }
  c10::impl::ExcludeDispatchKeyGuard below(kKey);
  op.redispatchBoxed(later, stack);
  if (converts && made_integers(stack->back())) current->limits_values = true;
}

PyObject* enter(PyObject* self, PyObject*) {
  if (current) return PyErr_Format(PyExc_RuntimeError, "the thread is watched already");
  current = reinterpret_cast<Watch*>(Py_NewRef(self));
  if (judge_of_kinds != current->judge) {
    kinds.clear();
    Py_XSETREF(judge_of_kinds, Py_NewRef(current->judge));
  }
  c10::impl::tls_set_dispatch_key_included(kKey, true);
  Py_RETURN_NONE;
}

PyObject* leave(PyObject* self, PyObject*) {
  if (reinterpret_cast<PyObject*>(current) != self)
    return PyErr_Format(PyExc_RuntimeError, "the thread is not watched");
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  current = nullptr;
  Py_DECREF(self);
  Py_RETURN_NONE;
}

PyObject* used(PyObject* self, PyObject*) {
  PyObject* keys = PySet_New(nullptr);
  for (const void* storage : *reinterpret_cast<Watch*>(self)->used) {
    PyObject* key = keys ? PyLong_FromVoidPtr(const_cast<void*>(storage)) : nullptr;
    if (!key || PySet_Add(keys, key)) Py_CLEAR(keys);
    Py_XDECREF(key);
  }
  return keys;
}

PyObject* was_stopped(PyObject* self, PyObject*) {
  return PyBool_FromLong(reinterpret_cast<Watch*>(self)->was_stopped);
}

PyObject* limits_values(PyObject* self, PyObject*) {
  return PyBool_FromLong(reinterpret_cast<Watch*>(self)->limits_values);
}

PyObject* groups_rows(PyObject* self, PyObject*) {
  return PyBool_FromLong(reinterpret_cast<Watch*>(self)->groups_rows);
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *judge, *stop;
  if (!PyArg_ParseTuple(args, "OO", &judge, &stop)) return nullptr;
  auto* watch = reinterpret_cast<Watch*>(type->tp_alloc(type, 0));
  if (!watch) return nullptr;
  watch->used = new std::unordered_set<const void*>();
  watch->judge = Py_NewRef(judge);
  watch->stop = Py_NewRef(stop);
  using c10::DispatchKey;
  const c10::DispatchKeySet kept({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU,
                                  DispatchKey::AutogradCUDA, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA,
                                  DispatchKey::ADInplaceOrView, DispatchKey::Conjugate, DispatchKey::Negative});
  watch->plain = kept.raw_repr();
  return reinterpret_cast<PyObject*>(watch);
  END_HANDLE_TH_ERRORS
}

void drop(PyObject* self) {
  auto* watch = reinterpret_cast<Watch*>(self);
  Py_XDECREF(watch->judge);
  Py_XDECREF(watch->stop);
  delete watch->used;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"enter", enter, METH_NOARGS, nullptr},
    {"leave", leave, METH_NOARGS, nullptr},
    {"used", used, METH_NOARGS, nullptr},
    {"was_stopped", was_stopped, METH_NOARGS, nullptr},
    {"limits_values", limits_values, METH_NOARGS, nullptr},
    {"groups_rows", groups_rows, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
    {Py_tp_methods, reinterpret_cast<void*>(methods)},
    {0, nullptr},
};
PyType_Spec spec = {"graphdispatch.native._tape.Watch", sizeof(Watch), 0, Py_TPFLAGS_DEFAULT, slots};

// Have torch call `see` under the key, for as long as the process lives.
void listen() {
  static torch::Library library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&see>());
}

}  // namespace

namespace graphdispatch {

int add_watch(PyObject* module) {
  try {
    listen();
  } catch (const std::exception&) {  // somebody has the key already, such as another copy of this extension
    return 0;
  }
  PyObject* type = PyType_FromSpec(&spec);
  const int failed = type ? PyModule_AddObjectRef(module, "Watch", type) : -1;
  Py_XDECREF(type);
  return failed;
}

}  // namespace graphdispatch
