#include "eager.h"

namespace gd {

namespace {

// The fields of a Standing of serve/hits.py, where a Decision has its reason, and what EagerPath.core_of gives.
enum { kRoute, kMisses, kSize, kDecision, kRows, kUntil, kCore };
constexpr Py_ssize_t kReason = 3;
enum { kFn, kReach, kPool, kIsCaptured, kStats, kIsHeld, kLocal, kNumParts };

// What it takes to serve a refused call of one server. The callable may have filled all caches since the last one, and
// then whatever is looked at costs more than what is done with it.
struct Refused {
  PyObject_HEAD PyObject* parts[kNumParts];
  Local here;  // where the server keeps the thread's latest decision
};

PyTypeObject* refused_type;

Slot replaying_of{names.replaying_on}, open_of{names.open}, runs_of{names._runs};
Slot reasons_of{names.reasons}, rows_of{names._rows_of_eager};

// Add one to a number in a dict, which is 0 if it is missing.
bool add_one(PyObject* dict, PyObject* key) {
  PyObject* old = item(dict, key);
  const long long value = old ? PyLong_AsLongLong(old) : 0;
  if (PyErr_Occurred()) return false;
  const Ref sum(PyLong_FromLongLong(value + 1));
  return sum && PyDict_SetItem(dict, key, sum.get()) == 0;
}

// The truth of what a method without arguments says: 1, 0, or -1 with an error.
int asked(PyObject* method) {
  const Ref answer(PyObject_CallNoArgs(method));
  return answer ? PyObject_IsTrue(answer.get()) : -1;
}

// Whether a capture window is open: 1, 0, or -1 with an error. A thread that is watched has opened one.
int is_open() {
  const Ref open = open_of.of(facts.windows);
  return open ? PyObject_IsTrue(open.get()) : -1;
}

// Have memory fetch what is looked at next, at once.
void fetch(PyObject* const* objects, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    for (int line = 0; line < 2; ++line) __builtin_prefetch(reinterpret_cast<const char*>(objects[i]) + 64 * line);
  }
}

// Whether Python has to look at the call: 1, 0, or -1 with an error. Nothing has changed yet.
int is_unusual(Refused* self) {
  if (shim.grad_mode_is_enabled()) return 1;
  const Ref replaying = replaying_of.of(self->parts[kPool]);
  if (replaying.get() != Py_None) return replaying ? 1 : -1;
  PyObject* level = item(PyModule_GetDict(facts.forward_ad), names._current_level);
  if (!level || PyLong_AsLong(level) >= 0) return PyErr_Occurred() ? -1 : 1;
  for (PyObject* method : {self->parts[kIsCaptured], self->parts[kIsHeld]}) {
    const int is_so = asked(method);
    if (is_so) return is_so;
  }
  return is_open();
}

// Count the call as a miss of its size, if so many may still pass, and as CUDAGraphStats.record_eager does: 1, 0 if
// Python has to look, -1 with an error. Nobody else counts meanwhile: all of this is one step for other threads, and
// nobody held the lock of the statistics before it.
int count(Refused* self, PyObject* standing) {
  PyObject *size = PyTuple_GET_ITEM(standing, kSize), *misses = PyTuple_GET_ITEM(standing, kMisses);
  PyObject* rows = PyTuple_GET_ITEM(standing, kRows);
  PyObject* reason = PyTuple_GET_ITEM(PyTuple_GET_ITEM(standing, kDecision), kReason);
  const Ref reasons = reasons_of.of(self->parts[kStats]), by_rows = rows_of.of(self->parts[kStats]);
  PyObject* missed = reasons && by_rows && PyDict_Check(misses) ? item(misses, size) : nullptr;
  if (!missed || !item(reasons.get(), reason)) return PyErr_Occurred() ? -1 : 0;  // the first of a reason is told
  const double until = PyFloat_AsDouble(PyTuple_GET_ITEM(standing, kUntil));
  if (PyErr_Occurred() || !(PyLong_AsDouble(missed) < until)) return PyErr_Occurred() ? -1 : 0;
  if (!add_one(misses, size) || !Ref(PyIter_Next(facts.uses)) || !add_one(reasons.get(), reason)) return -1;
  constexpr Py_ssize_t kMostRows = 4096;  // _MOST_ROWS of stats.py
  if (PyLong_AsLongLong(rows) > 0 && (PyDict_GET_SIZE(by_rows.get()) < kMostRows || item(by_rows.get(), rows))) {
    if (!add_one(by_rows.get(), rows)) return -1;
  }
  return PyErr_Occurred() ? -1 : 1;
}

// Windows.begin: what Windows.end takes.
Ref begin_run(PyObject* reach) {
  Ref run(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type)));
  const Ref runs = runs_of.of(facts.windows);
  const Ref here(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
  const Ref noted(run && runs && here ? PyTuple_Pack(2, here.get(), reach) : nullptr);
  if (!noted || PyObject_SetItem(runs.get(), run.get(), noted.get())) return Ref();
  const int open = is_open();
  if (open == 0) return run;
  if (open < 0 || PyObject_DelItem(runs.get(), run.get())) return Ref();
  return Ref(PyObject_CallMethodOneArg(facts.windows, names.begin, reach));
}

// Windows.end.
bool end_run(PyObject* run) {
  const Ref runs = runs_of.of(facts.windows);
  const int open = runs ? is_open() : -1;
  if (open == 0 && PyDict_Contains(runs.get(), run) == 1) return PyDict_DelItem(runs.get(), run) == 0;
  return open >= 0 && Ref(PyObject_CallMethodOneArg(facts.windows, names.end, run));
}

// EagerPath.run_eagerly, after the call is counted.
PyObject* run_eagerly(Refused* self, PyObject* decision, PyObject* args, PyObject* kwargs) {
  if (!self->here.put(self->parts[kLocal], names.decision, decision)) return nullptr;
  const Ref run = begin_run(self->parts[kReach]);
  if (!run) return nullptr;
  Ref answer(PyObject_Call(self->parts[kFn], args, kwargs));
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  const bool has_ended = end_run(run.get());
  // The callable may have called the server.
  if (has_ended && self->here.put(self->parts[kLocal], names.decision, decision)) {
    PyErr_Restore(type, error, trace);
    return answer.release();
  }
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(trace);
  return nullptr;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  if (PyTuple_GET_SIZE(args) != kNumParts) return PyErr_Format(PyExc_TypeError, "Refused() takes %d parts", kNumParts);
  PyObject* made = type->tp_alloc(type, 0);
  for (int i = 0; made && i < kNumParts; ++i) {
    reinterpret_cast<Refused*>(made)->parts[i] = Py_NewRef(PyTuple_GET_ITEM(args, i));
  }
  return made;
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Refused*>(object);
  Py_VISIT(Py_TYPE(object));
  for (PyObject* part : self->parts) Py_VISIT(part);
  return self->here.traverse(visit, arg);
}

int clear(PyObject* object) {
  auto* self = reinterpret_cast<Refused*>(object);
  for (PyObject*& part : self->parts) Py_CLEAR(part);
  self->here.clear();
  return 0;
}

void destroy(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_doc, const_cast<char*>("What serves refused calls of one server; see EagerPath.core_of in serve/eager.py.")},
    {0, nullptr},
};

PyType_Spec spec = {"graphdispatch.native._core.Refused", sizeof(Refused), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                    slots};

}  // namespace

PyObject* refuse(PyObject* server, PyObject* standing, PyObject* args, PyObject* kwargs) {
  PyObject* core = PyTuple_GET_ITEM(standing, kCore);
  if (Py_IS_TYPE(core, refused_type)) {
    auto* self = reinterpret_cast<Refused*>(core);
    fetch(self->parts, kNumParts);
    fetch(&PyTuple_GET_ITEM(standing, kMisses), kCore - kMisses);
    const int unusual = is_unusual(self);
    const int counted = unusual < 0 ? -1 : unusual ? 0 : count(self, standing);
    if (counted < 0) return nullptr;
    if (counted) return run_eagerly(self, PyTuple_GET_ITEM(standing, kDecision), args, kwargs);
  }
  PyObject* all[] = {server, standing, args, kwargs};
  return PyObject_VectorcallMethod(names.refuse, all, 4, nullptr);
}

bool add_eager(PyObject* module) {
  refused_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return refused_type && PyModule_AddObjectRef(module, "Refused", reinterpret_cast<PyObject*>(refused_type)) == 0;
}

}  // namespace gd
