// How a plan is made, and how it is collected.
#include "copy_kernel.h"

namespace gd {

namespace {

// What a hit adds to the counters, but for those to which it adds nothing; false with an error.
bool read_counts(PlanObject* self, PyObject* counts) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(facts.counted_by_hits); ++i) {
    const Ref value(PyObject_GetAttr(counts, PyTuple_GET_ITEM(facts.counted_by_hits, i)));
    const long long more = value ? PyLong_AsLongLong(value.get()) : -1;
    if (more == -1 && PyErr_Occurred()) return false;
    if (more) self->amounts->push_back(Amount{i, more});
  }
  const Ref rows(PyObject_GetAttr(counts, names.real_rows));
  self->cells = rows ? PyLong_AsLongLong(rows.get()) : -1;
  return !PyErr_Occurred();
}

bool read_entry(PlanObject* self) {
  self->backend = PyObject_GetAttr(self->entry, names.backend);
  self->watch = self->backend ? PyObject_GetAttr(self->backend, names.watch) : nullptr;
  self->pool = PyObject_GetAttr(self->entry, names.pool);
  const Ref lock(self->watch && self->pool ? PyObject_GetAttr(self->pool, names.lock) : nullptr);
  self->acquire = lock ? PyObject_GetAttr(lock.get(), names.acquire) : nullptr;
  self->release = self->acquire ? PyObject_GetAttr(lock.get(), names.release) : nullptr;
  return self->release;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *plan, *entry, *counts, *inputs, *watched, *parts = nullptr, *is_own = nullptr;
  long long rows, size;
  int is_inline, reads_watch, uses_rng, is_mutated, has_written, has_device, is_tuple = 0;
  if (!PyArg_ParseTuple(args, "OOLLOOO!pppppp|O!O!p", &plan, &entry, &rows, &size, &counts, &inputs, &PyTuple_Type,
                        &watched, &is_inline, &reads_watch, &uses_rng, &is_mutated, &has_written, &has_device, &PyTuple_Type, &parts, &PyTuple_Type, &is_own, &is_tuple)) {
    return nullptr;
  }
  if (parts && (!is_own || PyTuple_GET_SIZE(parts) != PyTuple_GET_SIZE(is_own) || !PyTuple_GET_SIZE(parts))) {
    return PyErr_Format(PyExc_ValueError, "as many flags as outputs, and at least one");
  }
  Ref made(type->tp_alloc(type, 0));
  auto* self = reinterpret_cast<PlanObject*>(made.get());
  if (!self) return nullptr;
  self->copies = new std::vector<Copy>();
  self->amounts = new std::vector<Amount>();
  self->output_copies = new std::vector<OutputCopies>(parts ? PyTuple_GET_SIZE(parts) : 0);
  self->plan = plan;
  self->entry = Py_NewRef(entry);
  self->inputs = Py_NewRef(inputs);
  self->watched = Py_NewRef(watched);
  self->parts = Py_XNewRef(parts);
  self->is_own = Py_XNewRef(is_own);
  self->is_tuple = is_tuple;
  self->is_inline = is_inline;
  self->reads_watch = reads_watch;
  self->uses_rng = uses_rng, self->is_mutated = is_mutated;
  self->has_written = has_written, self->has_device = has_device;
  self->rows = rows;
  self->size = size;
  self->rows_object = PyLong_FromLongLong(rows);
  return self->rows_object && read_counts(self, counts) && read_entry(self) ? made.release() : nullptr;
}

// clang-format off
#define GD_REFERENCES(VISIT) \
  VISIT(entry) VISIT(pool) VISIT(inputs) VISIT(rows_object) VISIT(acquire) \
  VISIT(release) VISIT(backend) VISIT(watch) VISIT(ident) VISIT(targets) VISIT(watched) VISIT(parts) VISIT(is_own)
// clang-format on

#define GD_LOCALS(VISIT) VISIT(of_watch) VISIT(of_server)

int traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<PlanObject*>(object);
  Py_VISIT(Py_TYPE(object));
#define GD_VISIT(field) Py_VISIT(self->field);
  GD_REFERENCES(GD_VISIT)
#undef GD_VISIT
#define GD_VISIT(field) \
  if (const int stop = self->field.traverse(visit, arg)) return stop;
  GD_LOCALS(GD_VISIT)
#undef GD_VISIT
  for (const OutputCopies& copies : *self->output_copies) {
    if (const int stop = copies.traverse(visit, arg)) return stop;
  }
  return 0;
}

int clear(PyObject* object) {
  auto* self = reinterpret_cast<PlanObject*>(object);
#define GD_CLEAR(field) Py_CLEAR(self->field);
  GD_REFERENCES(GD_CLEAR)
#undef GD_CLEAR
#define GD_CLEAR(field) self->field.clear();
  GD_LOCALS(GD_CLEAR)
#undef GD_CLEAR
  for (OutputCopies& copies : *self->output_copies) copies.clear();
  return 0;
}

void destroy(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  clear(object);
  delete reinterpret_cast<PlanObject*>(object)->copies;
  delete reinterpret_cast<PlanObject*>(object)->kernel;
  delete reinterpret_cast<PlanObject*>(object)->amounts;
  delete reinterpret_cast<PlanObject*>(object)->output_copies;
  type->tp_free(object);
  Py_DECREF(type);
}

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_doc, const_cast<char*>("The replay of one graph for one number of rows; see runtime/replay.py.")},
    {0, nullptr},
};

PyType_Spec spec = {"graphdispatch.native._core.Plan", sizeof(PlanObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                    slots};

}  // namespace

int is_done_by_core(PyObject* object, PyObject* method) {
  const Ref function(PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(object)), method));
  if (!function) return -1;
  const Ref mark(PyObject_GetAttr(function.get(), names._is_done_by_core));
  if (mark) return PyObject_IsTrue(mark.get());
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
  PyErr_Clear();
  return 0;
}

bool add_plan(PyObject* module) {
  plan_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return plan_type && PyModule_AddObjectRef(module, "Plan", reinterpret_cast<PyObject*>(plan_type)) == 0;
}

}  // namespace gd
