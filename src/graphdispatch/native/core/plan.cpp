#include "plan.h"

#include <algorithm>
#include <cmath>

#include "copy_kernel.h"

namespace gd {

PyTypeObject* plan_type = nullptr;

PyObject* Values::list() {
  if (!list_) {
    list_ = Ref(PyList_New(count_));
    for (Py_ssize_t i = 0; list_ && i < count_; ++i) PyList_SET_ITEM(list_.get(), i, Py_NewRef(items_[i]));
    if (list_) items_ = PySequence_Fast_ITEMS(list_.get());
  }
  return list_.get();
}

namespace {

// What the core reads of an entry, of plans and of statistics.
struct {
  Slot state{names.state}, graph{names.graph}, written{names.written};
  Slot replay_count{names.replay_count}, last_used{names.last_used}, verify_at{names.verify_at};
} of_entry;
struct {
  std::vector<Slot> counted_by_hits;  // in the order of their names among the facts
  Slot by_rows{names._rows_of_hits};
} of_stats;
Slot native_of_plan{names.native}, clean_from_of{names._clean_from}, replaying_on_of{names.replaying_on};
Slot tape_of{names.tape}, pool_of{names._pool}, generation_of{names.generation};

constexpr size_t kMostBytes = 256 * 1024;  // of one call that are copied here; torch copies more on several threads

PyObject* call(PyObject* object, PyObject* method) { return PyObject_CallMethodNoArgs(object, method); }

// Count a batch of so many rows among others; false with an error.
bool count_rows(PyObject* by_rows, PyObject* rows) {
  constexpr Py_ssize_t kMostRows = 4096;  // MOST_ROWS of stats.py
  PyObject* old = item(by_rows, rows);
  if (!old && (PyErr_Occurred() || PyDict_GET_SIZE(by_rows) >= kMostRows)) return !PyErr_Occurred();
  const long long value = old ? PyLong_AsLongLong(old) : 0;
  if (value == -1 && PyErr_Occurred()) return false;
  const Ref sum(PyLong_FromLongLong(value + 1));
  return sum && PyDict_SetItem(by_rows, rows, sum.get()) == 0;
}

// count_hit of runtime/replay.py, and the figures of the entry.
bool count_hit(PlanObject* self, PyObject* stats) {
  const Ref used(PyIter_Next(facts.uses));
  if (!used || !of_entry.replay_count.add(self->entry, 1) || !of_entry.last_used.put(self->entry, used.get())) {
    return false;
  }
  const Ref rows(self->cells == self->rows ? Py_NewRef(self->rows_object) : PyLong_FromLongLong(self->cells));
  if (!rows) return false;
  for (const Amount& amount : *self->amounts) {
    if (!of_stats.counted_by_hits[amount.counter].add(stats, amount.more)) return false;
  }
  const Ref by_rows = of_stats.by_rows.of(stats);
  return by_rows && count_rows(by_rows.get(), rows.get());
}

// Find out, with the pool's lock held, where the rows of a batch go.
bool prepare(PlanObject* self) {
  const Ref rows(PyLong_FromLongLong(self->rows)), size(PyLong_FromLongLong(self->size));
  if (!rows || !size) return false;
  const Ref found(PyObject_CallMethodObjArgs(self->inputs, names.layout_for, rows.get(), size.get(), nullptr));
  PyObject* targets;
  int one_layout, follows_data;
  if (!found || !PyArg_ParseTuple(found.get(), "O!pp", &PyList_Type, &targets, &one_layout, &follows_data)) return false;
  self->is_prepared = true;
  if (!one_layout) return true;  // Python loads
  self->follows_data = follows_data;
  bool is_host = true, is_dense = true;
  size_t total = 0;
  for (Py_ssize_t group = 0; group < PyList_GET_SIZE(targets); ++group) {
    PyObject *tensors, *places;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(targets, group), "O!O!", &PyList_Type, &tensors, &PyTuple_Type, &places)) {
      return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
      PyObject* target = PyList_GET_ITEM(tensors, i);
      Copy copy{PyLong_AsSsize_t(PyTuple_GET_ITEM(places, i)), 0, 0, keys_of(target), 0, nullptr, {}};
      bool is_contiguous = false;
      if (is_plain_tensor(target) && copy.keys) {
        void* handle = handle_of(target);
        const Ref nbytes(PyObject_GetAttrString(target, "nbytes"));
        if (!nbytes) return false;
        copy.nbytes = PyLong_AsSize_t(nbytes.get());
        copy.kind = kind_of(handle);
        if (shim.numel(handle, &copy.numel) || shim.data_ptr(handle, &copy.data) ||
            shim.is_contiguous(handle, &is_contiguous)) {
          is_contiguous = false;
        }
      }
      total += copy.nbytes;
      is_host = is_host && is_plain_host(target);
      is_dense = is_dense && is_contiguous;
      self->copies->push_back(copy);
    }
  }
  if (PyErr_Occurred()) return false;
  self->copies_bytes = is_dense && is_host && total <= kMostBytes;
  if (is_dense && !is_host && !CopyKernel::take(self)) return false;
  self->targets = Py_NewRef(targets);
  return true;
}

bool copy_by_torch(PlanObject* self, const Values& values) {
  size_t next = 0;  // of the copies, which are in the order of the groups
  for (Py_ssize_t group = 0; group < PyList_GET_SIZE(self->targets); ++group) {
    PyObject* tensors = PyTuple_GET_ITEM(PyList_GET_ITEM(self->targets, group), 0);
    const Py_ssize_t count = PyList_GET_SIZE(tensors);
    if (count == 1) {
      PyObject* pair[] = {PyList_GET_ITEM(tensors, 0), values[(*self->copies)[next++].position]};
      if (!Ref(PyObject_VectorcallMethod(names.copy_, pair, 2, nullptr))) return false;
      continue;
    }
    const Ref sources(PyList_New(count));
    if (!sources) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyList_SET_ITEM(sources.get(), i, Py_NewRef(values[(*self->copies)[next++].position]));
    }
    PyObject* lists[] = {tensors, sources.get()};
    if (!Ref(PyObject_Vectorcall(facts.foreach_copy, lists, 2, nullptr))) return false;
  }
  return true;
}

bool copy_in(PlanObject* self, const Values& values) {
  constexpr size_t kMost = 64;
  std::vector<Copy>& copies = *self->copies;
  if (!self->copies_bytes || copies.size() > kMost) return copy_by_torch(self, values);
  void* sources[kMost];
  for (size_t i = 0; i < copies.size(); ++i) {
    sources[i] = bytes_of(copies[i], values[copies[i].position]);
    if (!sources[i] && copies[i].nbytes) return copy_by_torch(self, values);
  }
  for (size_t i = 0; i < copies.size(); ++i) {  // which may be the static inputs themselves
    if (copies[i].nbytes) std::memmove(copies[i].data, sources[i], copies[i].nbytes);
  }
  return true;
}

// StaticInputs.load.
bool load(PlanObject* self, Values& values) {
  if (self->inputs == Py_None) return true;
  if (!self->is_prepared && !prepare(self)) return false;
  const Ref size(PyLong_FromLongLong(self->size));
  if (!size) return false;
  if (!self->targets) {
    PyObject* list = values.list();
    PyObject* args[] = {self->inputs, list, self->rows_object, size.get()};
    return list && Ref(PyObject_VectorcallMethod(names.load, args, 4, nullptr));
  }
  const Ref given = clean_from_of.of(self->inputs);
  int64_t clean_from = given ? PyLong_AsLongLong(given.get()) : -1;
  if (clean_from < 0) return false;
  if (self->rows > clean_from) {
    clean_from = self->rows;
    if (!clean_from_of.put(self->inputs, self->rows_object)) return false;
  }
  const int is_done = self->kernel ? self->kernel->load(self, values, clean_from) : 0;
  if (is_done) {
    const bool is_padded = self->rows < std::min(self->size, clean_from);
    return is_done > 0 && (!is_padded || clean_from_of.put(self->inputs, self->rows_object));
  }
  if (!copy_in(self, values)) return false;
  if (self->rows < self->size && (self->follows_data || self->rows < clean_from)) {
    PyObject* args[] = {self->inputs, self->rows_object, size.get()};
    return static_cast<bool>(Ref(PyObject_VectorcallMethod(names.pad, args, 3, nullptr)));
  }
  return true;
}

// A part of the outputs as the caller gets it: a clone, or the tensor itself.
PyObject* give(PlanObject* self, Py_ssize_t i) {
  PyObject* tensor = PyTuple_GET_ITEM(self->parts, i);
  if (PyTuple_GET_ITEM(self->is_own, i) != Py_True) return Py_NewRef(tensor);
  PyObject* filled = self->kernel ? self->kernel->output(i) : nullptr;
  if (filled) return filled;
  PyObject* made = is_plain_tensor(tensor) ? (*self->output_copies)[i].copy_of(tensor) : nullptr;
  return made ? made : call(tensor, names.clone);
}

// ReplayPlan.take.
PyObject* take(PlanObject* self, Values& values) {
  if (!self->parts) {
    PyObject* list = values.list();
    return list ? PyObject_CallMethodOneArg(self->plan, names.take, list) : nullptr;
  }
  if (!self->is_tuple) return give(self, 0);
  Ref result(PyTuple_New(PyTuple_GET_SIZE(self->parts)));
  for (Py_ssize_t i = 0; result && i < PyTuple_GET_SIZE(self->parts); ++i) {
    PyObject* part = give(self, i);
    if (!part) return nullptr;
    PyTuple_SET_ITEM(result.get(), i, part);
  }
  return result.release();
}

// Whether a graph is one of the backend for the CPU, with that class's own replay().
bool is_cpu_graph(PlanObject* self, PyObject* graph) {
  const PyTypeObject* type = Py_TYPE(graph);
  if (type->tp_version_tag != self->graph_version || !(type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG)) {
    self->knows_graph = is_done_by_core(graph, names.replay) == 1;
    self->graph_version = type->tp_version_tag;
    PyErr_Clear();
  }
  const Ref own(self->knows_graph ? PyObject_GenericGetDict(graph, nullptr) : nullptr);
  return own && !item(own.get(), names.replay);
}

// Graph.replay; of CPUGraph, where replays run at once.
bool replay(PlanObject* self, PyObject* graph) {
  if (self->is_inline && is_cpu_graph(self, graph)) {
    const Ref tape = tape_of.of(graph);
    if (tape && tape.get() != Py_None) {
      const Ref pool = pool_of.of(graph);
      return pool && generation_of.add(pool.get(), 1) && Ref(call(tape.get(), names.replay));
    }
  }
  PyErr_Clear();
  return static_cast<bool>(Ref(call(graph, names.replay)));
}

// Raise what ReplayPlan.failed makes of the error that is set.
void fail(PlanObject* self, Values& values, const char* stage) {
  const Ref error = take_error(), name(PyUnicode_FromString(stage));
  PyObject* args[] = {self->plan, error.get(), values.list(), name.get()};
  const Ref done(args[2] && name ? PyObject_VectorcallMethod(names.failed, args, 4, nullptr) : nullptr);
  if (done && !PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "a failed replay raised nothing");
}

// Whether Python has to run this replay: to refuse it, to keep the state of the generator, or to be seen in a profile.
bool is_unusual(PlanObject* self) {
  const Ref state = of_entry.state.of(self->entry);
  if (!state || state.get() == facts.evicted || state.get() == facts.failed_state) return true;
  if (replaying_on_of.of(self->pool).get() != Py_None || self->uses_rng || shim.profiler()) return true;
  return self->has_written && truth(attribute(facts.windows, names.open)) != 0;
}

PyObject* run_by_python(PlanObject* self, Values& values, PyObject* stats) {
  PyErr_Clear();
  PyObject* list = values.list();
  PyObject* args[] = {self->plan, list, stats};
  return list ? PyObject_VectorcallMethod(names.run_in_python, args, 3, nullptr) : nullptr;
}

// Note that this thread is within a replay of the pool, from load to the last copy; false with an error.
bool begin(PlanObject* self) {
  const unsigned long thread = PyThread_get_thread_ident();
  if (!self->ident || thread != self->thread) {
    PyObject* ident = PyLong_FromUnsignedLong(thread);
    if (!ident) return false;
    Py_XSETREF(self->ident, ident);
    self->thread = thread;
  }
  return replaying_on_of.put(self->pool, self->ident);
}

PyObject* replay_all(PlanObject* self, Values& values, PyObject* stats, PyObject* graph) {
  const bool is_loaded = load(self, values);
  const bool is_replayed = is_loaded && replay(self, graph);
  Ref result(is_replayed ? take(self, values) : nullptr);
  if (!result) {
    if (self->kernel) self->kernel->forget_outputs(!is_replayed);
    fail(self, values, is_replayed ? "take" : is_loaded ? "run" : "load");
    return nullptr;
  }
  if (!count_hit(self, stats)) return nullptr;
  if (self->is_mutated) {
    PyObject* list = values.list();
    PyObject* args[] = {self->entry, list, self->rows_object};
    if (!list || !Ref(PyObject_VectorcallMethod(names.copy_back, args, 3, nullptr))) return nullptr;
  }
  return result.release();
}

PyObject* run_locked(PlanObject* self, Values& values, PyObject* stats) {
  if (is_unusual(self)) return run_by_python(self, values, stats);
  if (!self->is_inline && !Ref(call(self->pool, names.order_after_last_use))) return nullptr;
  const Ref graph = of_entry.graph.of(self->entry);
  if (!graph) return run_by_python(self, values, stats);
  Ref result(begin(self) ? replay_all(self, values, stats, graph.get()) : nullptr);
  const Ref error = take_error();
  const bool is_ended = replaying_on_of.put(self->pool, Py_None);
  if (error) {
    set_error(error);
  } else if (!is_ended) {
    return nullptr;
  }
  return result.release();
}

uintptr_t address_in(PyObject* number) { return reinterpret_cast<uintptr_t>(PyLong_AsVoidPtr(number)); }

// Addresses from the first one up to the other.
struct AddressRange {
  uintptr_t begin, end;
  bool overlaps(const AddressRange& other) const { return begin < other.end && other.begin < end; }
};

// Whether the addresses of a tensor lie in none of the ranges of Spans.
bool is_outside(PyObject* written, const AddressRange& taken) {
  const Ref spans = attribute(written, names.spans);
  if (!spans || !PyTuple_CheckExact(spans.get())) {
    PyErr_Clear();
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(spans.get()); ++i) {
    PyObject* span = PyTuple_GET_ITEM(spans.get(), i);
    if (!PyTuple_CheckExact(span) || PyTuple_GET_SIZE(span) != 2) return false;
    const AddressRange one{address_in(PyTuple_GET_ITEM(span, 0)), address_in(PyTuple_GET_ITEM(span, 1))};
    if (one.overlaps(taken)) return false;
  }
  return true;
}

// Whether an argument takes its bytes one after the other; sets what addresses it takes.
bool find_range(PlanObject* self, Py_ssize_t position, PyObject* tensor, AddressRange* taken) {
  void* data = nullptr;
  bool is_contiguous = false;
  if (!is_plain_tensor(tensor) || !is_plain_host(tensor) || shim.data_ptr(handle_of(tensor), &data)) return false;
  if (shim.is_contiguous(handle_of(tensor), &is_contiguous) || !is_contiguous) return false;
  for (const Copy& copy : *self->copies) {
    if (copy.position != position) continue;
    const auto begin = reinterpret_cast<uintptr_t>(data);
    *taken = AddressRange{begin, begin + copy.nbytes};
    return true;
  }
  return false;  // before the first call was loaded
}

// Whether the arguments share no memory with what the graph writes, as far as a look at addresses tells.
bool shares_nothing(PlanObject* self, const Values& values) {
  if (self->is_mutated) return false;
  const Ref written = of_entry.written.of(self->entry), low = written ? attribute(written.get(), names.low) : Ref();
  const Ref high = low ? attribute(written.get(), names.high) : Ref();
  if (!high) {
    PyErr_Clear();
    return false;
  }
  const AddressRange all{address_in(low.get()), address_in(high.get())};
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->watched); ++i) {
    const Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GET_ITEM(self->watched, i));
    AddressRange taken{0, 0};
    if (!find_range(self, position, values[position], &taken)) return false;
    if (all.overlaps(taken) && !is_outside(written.get(), taken)) return false;
  }
  return true;
}

// Whether the thread is being captured or compared.
int is_watched(PlanObject* self) {
  const int is_deep = truth(self->of_watch.of(self->watch, names.depth));
  if (is_deep) return is_deep;
  return truth(self->reads_watch ? self->of_watch.of(self->watch, names.is_capturing)
                                 : Ref(call(self->backend, names.is_capturing)));
}

// ReplayPlan.run(values, stats).
PyObject* run_method_of(PyObject* plan, PyObject* const* args, Py_ssize_t count) {
  const Ref native = native_of_plan.of(plan);
  if (!native) return nullptr;
  if (count != 2 || !PyList_Check(args[0]) || args[1] == Py_None || !Py_IS_TYPE(native.get(), plan_type)) {
    PyObject* all[3] = {plan, count > 0 ? args[0] : nullptr, count > 1 ? args[1] : nullptr};
    if (count > 2) return PyErr_Format(PyExc_TypeError, "run() takes values and statistics");
    return PyObject_VectorcallMethod(names.run_in_python, all, 1 + count, nullptr);
  }
  Values values(Ref::of(args[0]));
  return run(reinterpret_cast<PlanObject*>(native.get()), values, args[1]);
}

// What the core reads of a tensor to tell whether somebody holds or has changed it.
PyObject* read_holding(PyObject*, PyObject* tensor) {
  if (!is_plain_tensor(tensor)) Py_RETURN_NONE;
  const Holding found = Holding::of(tensor);
  return Py_BuildValue("y#L", &found, sizeof found, static_cast<long long>(shim.version(handle_of(tensor))));
}

PyMethodDef run_definition = {
    "run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_method_of)), METH_FASTCALL,
    "run($self, values, stats=None, /)\n--\n\nThe outputs for a call whose arguments were compared."};

PyObject* run_method(PyObject*, PyObject* args) {
  PyObject* method = method_with_facts(args, &run_definition);
  if (!method) return nullptr;
  of_stats.counted_by_hits.clear();
  PyObject* counters = facts.counted_by_hits;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(counters); ++i) {
    of_stats.counted_by_hits.emplace_back(PySequence_Fast_ITEMS(counters)[i]);
  }
  return method;
}

}  // namespace

PyMethodDef plan_methods[] = {
    {"run_method", run_method, METH_VARARGS,
     "run_method(cls, facts)\n--\n\nThe method `run` for a class of plans, and what of the package it needs."},
    {"read_holding", read_holding, METH_O,
     "read_holding(tensor)\n--\n\nWhat tells whether somebody holds a plain tensor of the host, and its version."},
    {nullptr, nullptr, 0, nullptr},
};

void* bytes_of(Copy& copy, PyObject* tensor) {
  if (!is_plain_tensor(tensor) || !are_alike(keys_of(tensor), copy.keys)) return nullptr;
  void* handle = handle_of(tensor);
  int64_t numel = -1;
  bool is_contiguous = false;
  void* data = nullptr;
  if (!copy.seen.is_of(tensor)) {
    if (shim.numel(handle, &numel) || numel != copy.numel || kind_of(handle) != copy.kind) return nullptr;
    if (shim.is_contiguous(handle, &is_contiguous) || !is_contiguous) return nullptr;
    copy.seen.take(tensor);
  }
  return shim.data_ptr(handle, &data) ? nullptr : data;
}

int may_run(PlanObject* self, Values& values, PyObject* per_call) {
  PyObject* entry = self->entry;
  const Ref count = of_entry.replay_count.of(entry), verify_at = of_entry.verify_at.of(entry);
  if (!count || !verify_at) return -1;
  if (!(PyFloat_CheckExact(verify_at.get()) && std::isinf(PyFloat_AS_DOUBLE(verify_at.get())))) {
    const int is_before = PyObject_RichCompareBool(count.get(), verify_at.get(), Py_LT);
    if (is_before != 1) return is_before;
  }
  const int watched = is_watched(self);
  if (watched) return watched < 0 ? -1 : 0;
  if (self->has_device || may_be_in_mode()) {
    const int fits = truth(Ref(call(entry, names.fits_modes)));
    if (fits != 1) return fits;
  }
  if ((self->is_mutated || self->has_written) && !shares_nothing(self, values)) {
    PyObject* list = values.list();
    const Ref clash(list ? PyObject_CallMethodOneArg(self->plan, names.clash, list) : nullptr);
    if (!clash || clash.get() != Py_None) return clash ? 0 : -1;
  }
  if (per_call != Py_None) {
    PyObject* list = values.list();
    const int serves = list ? truth(Ref(PyObject_CallOneArg(per_call, list))) : -1;
    if (serves != 1) return serves;
  }
  return PyErr_Occurred() ? -1 : 1;
}

PyObject* run(PlanObject* self, Values& values, PyObject* stats) {
  if (!Ref(PyObject_CallNoArgs(self->acquire))) return nullptr;
  PyObject* result = run_locked(self, values, stats);
  const Ref error = take_error(), released(PyObject_CallNoArgs(self->release));
  if (error) {
    set_error(error);
  } else if (!released) {
    Py_CLEAR(result);
  }
  if (result) {  // else an error is set, under which no Python may run
    for (OutputCopies& copies : *self->output_copies) copies.drop_spent();
  }
  return result;
}

}  // namespace gd
