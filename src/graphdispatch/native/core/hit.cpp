#include "hit.h"

#include "guard.h"

namespace gd {

namespace {

constexpr Py_ssize_t kMostValues = 64;  // of a call; one of more is Python's

constexpr Py_ssize_t kOfHit = 5;  // fields of a Hit in GraphGroup.hits

enum class Outcome { kServed, kMissed, kRaised };

// What the core reads of a server and what belongs to it.
Slot forms_of{names.forms}, signature_of{names.signature}, hits_of{names.hits};
Slot call_of{names.call}, is_flat_of{names.is_flat}, order_of{names.order};
Slot native_of_signature{names.native}, native_of_plan{names.native}, native_of_guard{names.native};
Slot observes_of{names.observes}, stats_of{names.stats}, local_of{names.local};

// A call under way: what Server.serve was given, and what it finds.
struct Call {
  PyObject *server, *route, *args, *kwargs;
  Ref groups, group, hit;  // those of its form, the one that fits, and its hit
  Ref stays;  // the StayEager in the place of a hit
  bool is_matched = false;  // whether it fits a group and needs no gradients
  bool is_of_python = false;  // whether its hit is none of the core's, as one in parts
  PyObject* result = nullptr;
};

Outcome outcome(int truth) { return truth == 1 ? Outcome::kServed : truth == 0 ? Outcome::kMissed : Outcome::kRaised; }

// Whether a key is the form of a call, by the identity of the names; another one may be equal still.
bool is_form(const Call& call, PyObject* key) {
  const Py_ssize_t keywords = PyDict_GET_SIZE(call.kwargs);
  if (!PyTuple_CheckExact(key) || PyTuple_GET_SIZE(key) != 1 + keywords) return false;
  if (PyLong_AsSsize_t(PyTuple_GET_ITEM(key, 0)) != PyTuple_GET_SIZE(call.args)) return false;
  PyObject *name, *value;
  for (Py_ssize_t at = 0, i = 1; PyDict_Next(call.kwargs, &at, &name, &value); ++i) {
    if (PyTuple_GET_ITEM(key, i) != name) return false;
  }
  return true;
}

// The groups of calls of this form: (number of positional arguments, *keywords).
Ref groups_of(const Call& call) {
  const Ref forms = forms_of.of(call.route);
  if (!forms || !PyDict_Check(forms.get())) return Ref();
  PyObject *first, *found;
  Py_ssize_t begin = 0;
  if (PyDict_Next(forms.get(), &begin, &first, &found) && is_form(call, first)) return Ref::of(found);
  const Py_ssize_t keywords = PyDict_GET_SIZE(call.kwargs);
  const Ref key(PyTuple_New(1 + keywords));
  PyObject* count = key ? PyLong_FromSsize_t(PyTuple_GET_SIZE(call.args)) : nullptr;
  if (!count) return Ref();
  PyTuple_SET_ITEM(key.get(), 0, count);
  PyObject *name, *value;
  for (Py_ssize_t at = 0, i = 1; i <= keywords && PyDict_Next(call.kwargs, &at, &name, &value); ++i) {
    PyTuple_SET_ITEM(key.get(), i, Py_NewRef(name));
  }
  return Ref::of(PyDict_GetItemWithError(forms.get(), key.get()));
}

// The arguments as they come, then in the order of the callable's own; false if there is no such place.
bool arguments(const Call& call, PyObject* order, PyObject** values) {
  const Py_ssize_t given = PyTuple_GET_SIZE(call.args), count = given + PyDict_GET_SIZE(call.kwargs);
  PyObject *first[kMostValues], **plain = order == Py_None ? values : first;
  if (order != Py_None && (!PyTuple_CheckExact(order) || PyTuple_GET_SIZE(order) != count)) return false;
  for (Py_ssize_t i = 0; i < given; ++i) plain[i] = PyTuple_GET_ITEM(call.args, i);
  PyObject *name, *value;
  for (Py_ssize_t at = 0, i = given; i < count && PyDict_Next(call.kwargs, &at, &name, &value); ++i) plain[i] = value;
  for (Py_ssize_t i = 0; order != Py_None && i < count; ++i) {
    const Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(order, i));
    if (place < 0 || place >= count) return false;
    values[i] = plain[place];
  }
  return true;
}

// Whether a value is no tensor and holds none.
bool is_constant(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyUnicode_CheckExact(value) || PyComplex_CheckExact(value) || PyBytes_CheckExact(value);
}

// StateGuard.trainable of a guard that has just been found to hold; -1 with an error.
int is_trainable(PyObject* guard) {
  const Ref native = native_of_guard.of(guard);
  const int trainable = native && is_guard(native.get()) ? guard_trainable(native.get()) : -1;
  if (!native || trainable >= 0) return trainable;
  const Ref answer = attribute(guard, names.trainable);
  return truth(answer);
}

// Server.may_need_gradients; -1 with an error.
int may_need_gradients(const Call& call, Values& values, PyObject* guard) {
  bool is_plain = guard != Py_None;
  for (Py_ssize_t i = 0; is_plain && i < values.count(); ++i) {
    PyObject* value = values[i];
    if (is_plain_tensor(value)) {
      if (needs_gradient(value)) return 1;
    } else {
      is_plain = is_constant(value);
    }
  }
  if (is_plain) return is_trainable(guard);
  PyObject* list = values.list();
  const Ref answer(list ? PyObject_CallMethodObjArgs(call.server, names.may_need_gradients, list, guard, nullptr)
                        : nullptr);
  return truth(answer);
}

// Find the prepared hit of a call of the group with so many rows: 1, 0 if there is none, -1 with an error.
int find(Call& call, const Ref& number) {
  call.is_matched = number && PyLong_AsLongLong(number.get()) >= 0;
  const Ref hits = number ? hits_of.of(call.group.get()) : Ref();
  if (!hits) return -1;
  call.hit = Ref::of(PyDict_Check(hits.get()) ? PyDict_GetItemWithError(hits.get(), number.get()) : nullptr);
  if (!call.hit && !PyErr_Occurred()) call.hit = Ref(PyObject_GetItem(hits.get(), number.get()));
  if (!call.hit) return -1;
  if (PyTuple_Check(call.hit.get())) return PyTuple_GET_SIZE(call.hit.get()) == kOfHit;
  if (call.hit.get() != Py_None) call.stays = std::move(call.hit);
  return 0;
}

// The same as find() for the group that fits, among those of the call's form. All of a call's values are leaves.
int find_group(Call& call, const Values& values) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call.groups.get()); ++i) {
    Ref group = Ref::of(PyTuple_GET_ITEM(call.groups.get(), i));
    const Ref signature = signature_of.of(group.get());
    const Ref core = signature ? native_of_signature.of(signature.get()) : Ref();
    if (!core) return -1;
    if (!Py_IS_TYPE(core.get(), signature_type)) continue;  // Python knows what fits it
    const int64_t rows = match(reinterpret_cast<SignatureObject*>(core.get()), values.items(), values.count());
    if (rows < 0) continue;
    const Ref flat = call_of.of(group.get());
    const Ref is_flat = flat ? is_flat_of.of(flat.get()) : Ref();
    if (!is_flat) return -1;
    if (is_flat.get() != Py_True) continue;  // the same holds for nested arguments
    call.group = std::move(group);
    return find(call, Ref(PyLong_FromLongLong(rows)));
  }
  return 0;
}

// The same for the group that was found last; the others are looked at if it does not fit and nothing is nested.
int find_hit(Call& call, PyObject* signature, Values& values, bool is_flat) {
  const Ref core = native_of_signature.of(signature);
  if (!core) return -1;
  if (!Py_IS_TYPE(core.get(), signature_type)) {
    PyObject* list = values.list();
    return list ? find(call, Ref(PyObject_CallMethodOneArg(signature, names.match, list))) : -1;
  }
  const int64_t rows = match(reinterpret_cast<SignatureObject*>(core.get()), values.items(), values.count());
  if (rows >= 0) return find(call, Ref(PyLong_FromLongLong(rows)));
  return is_flat ? find_group(call, values) : 0;
}

// Whether the guard holds: 1, 0, or -1 with an error.
int holds(PyObject* guard) {
  if (guard == Py_None) return 1;
  const Ref native = native_of_guard.of(guard);
  if (!native) return -1;
  if (is_guard(native.get()) && guard_holds(native.get())) return 1;
  const Ref answer(PyObject_CallMethodNoArgs(guard, names.holds));
  return truth(answer);
}

// What a ReplayError means for the call: served eagerly, unless Python raises it again.
Outcome refused(const Call& call) {
  const Ref error = take_error();
  PyObject* args[] = {call.server, call.group.get(), error.get()};
  const Ref done(PyObject_VectorcallMethod(names.replay_failed, args, 3, nullptr));
  return done ? Outcome::kMissed : Outcome::kRaised;
}

Outcome replay(Call& call, PlanObject* plan, Values& values) {
  const Ref observes = observes_of.of(call.server), stats = stats_of.of(call.server);
  if (!observes || !stats) return Outcome::kRaised;
  if (observes.get() == Py_False) {
    call.result = run(plan, values, stats.get());
  } else {
    PyObject* list = values.list();
    PyObject* args[] = {call.server, plan->entry, plan->rows_object, list};
    call.result = list ? PyObject_VectorcallMethod(names.observed, args, 4, nullptr) : nullptr;
  }
  if (!call.result) {
    return PyErr_ExceptionMatches(facts.replay_error) ? refused(call) : Outcome::kRaised;
  }
  const Ref local = local_of.of(call.server);
  if (!local || !plan->of_server.put(local.get(), names.decision, PyTuple_GET_ITEM(call.hit.get(), 2))) {
    Py_CLEAR(call.result);
    return Outcome::kRaised;
  }
  return Outcome::kServed;
}

Outcome serve_values(Call& call, Values& values, bool is_flat) {
  const Ref signature = signature_of.of(call.group.get());
  const int found = signature ? find_hit(call, signature.get(), values, is_flat) : -1;
  if (found != 1) return outcome(found);
  PyObject* guard = PyTuple_GET_ITEM(call.hit.get(), 3);
  const Ref native = native_of_plan.of(PyTuple_GET_ITEM(call.hit.get(), 1));
  if (!native) return Outcome::kRaised;
  call.is_of_python = !Py_IS_TYPE(native.get(), plan_type);
  if (call.is_of_python) return Outcome::kMissed;
  auto* plan = reinterpret_cast<PlanObject*>(native.get());
  PyObject* level = item(PyModule_GetDict(facts.forward_ad), names._current_level);
  if (!level || PyLong_AsLong(level) >= 0) return PyErr_Occurred() ? Outcome::kRaised : Outcome::kMissed;
  int may = may_run(plan, values, PyTuple_GET_ITEM(call.hit.get(), 4));
  if (may == 1) may = holds(guard);
  if (may != 1) return outcome(may);
  if (!shim.grad_mode_is_enabled()) return replay(call, plan, values);
  const int needed = may_need_gradients(call, values, guard);
  call.is_matched = !needed;
  if (needed) return needed < 0 ? Outcome::kRaised : Outcome::kMissed;
  shim.grad_mode_set_enabled(false);
  const Outcome done = replay(call, plan, values);
  shim.grad_mode_set_enabled(true);
  return done;
}

Outcome serve_call(Call& call) {
  call.groups = groups_of(call);
  if (!call.groups) return PyErr_Occurred() ? Outcome::kRaised : Outcome::kMissed;
  if (!PyTuple_CheckExact(call.groups.get()) || !PyTuple_GET_SIZE(call.groups.get())) return Outcome::kMissed;
  call.group = Ref::of(PyTuple_GET_ITEM(call.groups.get(), 0));
  const Ref flat = call_of.of(call.group.get());
  const Ref order = flat ? order_of.of(flat.get()) : Ref(), is_flat = order ? is_flat_of.of(flat.get()) : Ref();
  if (!is_flat) return Outcome::kRaised;
  const Py_ssize_t count = PyTuple_GET_SIZE(call.args) + PyDict_GET_SIZE(call.kwargs);
  PyObject* items[kMostValues];
  if (!arguments(call, order.get(), items)) return PyErr_Occurred() ? Outcome::kRaised : Outcome::kMissed;
  Values values(items, count);
  if (is_flat.get() == Py_True) return serve_values(call, values, true);
  PyObject* list = values.list();
  Ref leaves(list ? PyObject_CallMethodOneArg(flat.get(), names.flatten, list) : nullptr);
  if (!leaves) return Outcome::kRaised;
  if (!PyList_Check(leaves.get())) return Outcome::kMissed;
  Values flattened(std::move(leaves));
  return serve_values(call, flattened, false);
}

PyObject* serve_method(PyObject* server, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyTuple_CheckExact(args[1]) || !PyDict_CheckExact(args[2])) {
    return PyErr_Format(PyExc_TypeError, "serve() takes a route, a tuple and a dict");
  }
  return serve(server, args[0], args[1], args[2]);
}

PyMethodDef serve_definition = {
    "serve", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(serve_method)), METH_FASTCALL,
    "serve($self, route, args, kwargs, /)\n--\n\nServe one call, by a graph where one fits and eagerly elsewhere. "
    "Raises what the callable raises."};

PyObject* make_serve(PyObject*, PyObject* args) { return method_with_facts(args, &serve_definition); }

}  // namespace

PyObject* serve(PyObject* server, PyObject* route, PyObject* args, PyObject* kwargs) {
  PyObject* again[] = {server, route, args, kwargs};
  if (shim.profiler()) return PyObject_VectorcallMethod(names.serve_in_range, again, 4, nullptr);
  if (PyTuple_GET_SIZE(args) + PyDict_GET_SIZE(kwargs) > kMostValues) {
    return PyObject_VectorcallMethod(names.serve_in_python, again, 4, nullptr);
  }
  Call call{server, route, args, kwargs, {}, {}, {}, {}};
  const Outcome done = serve_call(call);
  if (done == Outcome::kServed) return call.result;
  if (done == Outcome::kRaised) return nullptr;
  if (call.is_of_python) return PyObject_VectorcallMethod(names.serve_in_python, again, 4, nullptr);
  if (!call.stays) {
    return PyObject_VectorcallMethod(call.is_matched ? names.step : names.serve_unmatched, again, 4, nullptr);
  }
  PyObject* stay[] = {server, call.stays.get(), route, args, kwargs};
  return PyObject_VectorcallMethod(names.stay_eager, stay, 5, nullptr);
}

bool is_serve(PyObject* method) {
  return Py_IS_TYPE(method, &PyMethodDescr_Type) &&
         reinterpret_cast<PyMethodDescrObject*>(method)->d_method == &serve_definition;
}

PyMethodDef hit_methods[] = {
    {"serve_method", make_serve, METH_VARARGS,
     "serve_method(cls, facts)\n--\n\nThe method `serve` for a class of servers, and what of the package it needs."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace gd
