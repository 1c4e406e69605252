#include "eager.h"

#include "slot.h"

namespace gd {

namespace {

// The fields of a Standing of serve/hits.py, of its parts (EagerPath.parts_of), and those of a Decision that count.
enum { kRoute, kMisses, kSize, kDecision, kUntil, kParts };
enum { kFn, kLocal, kReach, kIsCaptured, kAcquire, kRelease, kPool, kStats, kAcquireStats, kReleaseStats, kNumParts };
enum { kReason = 3, kRowsOfDecision = 4 };

Slot replaying_of{names.replaying_on};

PyObject* part(PyObject* parts, Py_ssize_t place) { return PyTuple_GET_ITEM(parts, place); }

bool call(PyObject* method) { return static_cast<bool>(Ref(PyObject_CallNoArgs(method))); }

// Add one to a number in a dict, which is 0 if it is missing.
bool add_one(PyObject* dict, PyObject* key) {
  PyObject* old = item(dict, key);
  const long long value = old ? PyLong_AsLongLong(old) : 0;
  if (PyErr_Occurred()) return false;
  const Ref sum(PyLong_FromLongLong(value + 1));
  return sum && PyDict_SetItem(dict, key, sum.get()) == 0;
}

// Whether a capture window is open: 1, 0, or -1 with an error. A thread that is watched has opened one.
int is_open() {
  const Ref open = attribute(facts.windows, names.open);
  return open ? PyObject_IsTrue(open.get()) : -1;
}

// Whether Python has to look at the call: 1, 0, or -1 with an error. Nothing has changed yet.
int is_unusual(PyObject* parts, PyObject* decision) {
  if (PyTuple_GET_SIZE(parts) != kNumParts || shim.grad_mode_is_enabled()) return 1;
  PyObject* reasons = item(part(parts, kStats), names.reasons);
  if (!reasons || !item(reasons, PyTuple_GET_ITEM(decision, kReason))) return PyErr_Occurred() ? -1 : 1;  // it is told
  const Ref replaying = replaying_of.of(part(parts, kPool));
  if (replaying.get() != Py_None) return replaying ? 1 : -1;
  PyObject* level = item(PyModule_GetDict(facts.forward_ad), names._current_level);
  if (!level || PyLong_AsLong(level) >= 0) return PyErr_Occurred() ? -1 : 1;
  const Ref is_captured(PyObject_CallNoArgs(part(parts, kIsCaptured)));
  if (!is_captured) return -1;
  return is_captured.get() == Py_False ? is_open() : 1;
}

// Count a miss of the size, if so many may still pass: 1, 0 if Python has to look, -1 with an error.
int count_miss(PyObject* standing, PyObject* parts) {
  PyObject *size = PyTuple_GET_ITEM(standing, kSize), *misses = PyTuple_GET_ITEM(standing, kMisses);
  const Ref taken(PyObject_CallOneArg(part(parts, kAcquire), Py_False));
  if (!taken || taken.get() != Py_True) return taken ? 0 : -1;
  PyObject* count = item(misses, size);
  int done = count ? PyObject_RichCompareBool(count, PyTuple_GET_ITEM(standing, kUntil), Py_LT) : 0;
  if (done == 1 && !(add_one(misses, size) && Ref(PyIter_Next(facts.uses)))) done = -1;
  return call(part(parts, kRelease)) ? done : -1;
}

// CUDAGraphStats.record_eager of a call that led to no capture and no comparison.
bool count(PyObject* parts, PyObject* decision) {
  PyObject *reason = PyTuple_GET_ITEM(decision, kReason), *rows = PyTuple_GET_ITEM(decision, kRowsOfDecision);
  PyObject* stats = part(parts, kStats);
  if (!call(part(parts, kAcquireStats))) return false;
  PyObject *reasons = item(stats, names.reasons), *by_rows = item(stats, names._rows_of_eager);
  constexpr Py_ssize_t kMostRows = 4096;  // _MOST_ROWS of stats.py
  bool done = reasons && by_rows && add_one(reasons, reason);
  if (done && PyLong_AsLongLong(rows) > 0 && (PyDict_GET_SIZE(by_rows) < kMostRows || item(by_rows, rows))) {
    done = add_one(by_rows, rows);
  }
  done = done && add_one(stats, names.misses) && add_one(stats, names.fallbacks);
  return call(part(parts, kReleaseStats)) && done;
}

// Windows.begin: what Windows.end takes.
Ref begin_run(PyObject* reach) {
  Ref run(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type)));
  const Ref runs = attribute(facts.windows, names._runs);
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
  const Ref runs = attribute(facts.windows, names._runs);
  const int open = runs ? is_open() : -1;
  if (open == 0 && PyDict_Contains(runs.get(), run) == 1) return PyDict_DelItem(runs.get(), run) == 0;
  return open >= 0 && Ref(PyObject_CallMethodOneArg(facts.windows, names.end, run));
}

// EagerPath.run_eagerly.
PyObject* run_eagerly(PyObject* parts, PyObject* decision, PyObject* args, PyObject* kwargs) {
  PyObject* local = part(parts, kLocal);
  if (PyObject_SetAttr(local, names.decision, decision)) return nullptr;
  const Ref run = count(parts, decision) ? begin_run(part(parts, kReach)) : Ref();
  if (!run) return nullptr;
  Ref answer(PyObject_Call(part(parts, kFn), args, kwargs));
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  const bool has_ended = end_run(run.get());
  if (has_ended && PyObject_SetAttr(local, names.decision, decision) == 0) {  // the callable may have called the server
    PyErr_Restore(type, error, trace);
    return answer.release();
  }
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(trace);
  return nullptr;
}

}  // namespace

PyObject* refuse(PyObject* server, PyObject* standing, PyObject* args, PyObject* kwargs) {
  PyObject* parts = PyTuple_GET_ITEM(standing, kParts);
  const int unusual = is_unusual(parts, PyTuple_GET_ITEM(standing, kDecision));
  const int counted = unusual < 0 ? -1 : unusual ? 0 : count_miss(standing, parts);
  if (counted < 0) return nullptr;
  if (counted) return run_eagerly(parts, PyTuple_GET_ITEM(standing, kDecision), args, kwargs);
  PyObject* all[] = {server, standing, args, kwargs};
  return PyObject_VectorcallMethod(names.refuse, all, 4, nullptr);
}

}  // namespace gd
