// Decisions by one lookup: what CudagraphKeyDispatcher.decide answers for batches that were decided before.
//
// Decide is a callable with the signature of that method. It knows answers by the plain arguments of a call, and asks a
// Python callable, the decisions of the table that is in use, for all others. Whatever is unusual (other types, modes
// that are none of the three) goes to Python as it came. Needs the GIL, and no torch.
#include "decide.h"

#include <structmember.h>

#include <cstdint>
#include <vector>

namespace {

constexpr int64_t kNone = INT64_MIN;
constexpr size_t kMostAnswers = 65536;
constexpr size_t kFirstSlots = 256;
constexpr int kModes = 3;
constexpr int kPositional = 2;
enum Argument { kTokens, kReqs, kQueryLen, kVariant, kAllowed, kExcluded, kArguments };
constexpr const char* kNames[kArguments] = {"num_tokens", "num_reqs",      "query_len",
                                            "variant",    "allowed_modes", "excluded_modes"};
PyObject* names[kArguments];

struct Batch {
  int64_t tokens, reqs, query_len, variant, modes;
  bool operator==(const Batch& other) const {
    return tokens == other.tokens && reqs == other.reqs && query_len == other.query_len && variant == other.variant &&
           modes == other.modes;
  }
  size_t hash() const {
    uint64_t h = 0;
    for (int64_t part : {tokens, reqs, query_len, variant, modes}) {
      h = (h ^ uint64_t(part)) * 0x9E3779B97F4A7C15ull;
      h ^= h >> 29;
    }
    return size_t(h);
  }
};

struct Slot {
  Batch batch;
  PyObject* answer;  // owned; null in a free slot
};

struct Decide {
  PyObject_HEAD vectorcallfunc call;
  PyObject* ask;            // owned
  PyObject* modes[kModes];  // owned
  std::vector<Slot>* slots;
  size_t used;
  uint64_t generation;  // of ``ask``
};

Decide* self_of(PyObject* object) { return reinterpret_cast<Decide*>(object); }

Slot* find(const Decide* self, const Batch& batch) {
  std::vector<Slot>& slots = *self->slots;
  const size_t mask = slots.size() - 1;
  size_t place = batch.hash() & mask;
  while (slots[place].answer && !(slots[place].batch == batch)) place = (place + 1) & mask;
  return &slots[place];
}

// Take the answers away before any of them is released, which may run Python.
void forget(Decide* self) {
  std::vector<Slot> old(kFirstSlots, Slot{});
  if (self->slots) old.swap(*self->slots);
  self->used = 0;
  for (Slot& slot : old) Py_XDECREF(slot.answer);
}

void keep(Decide* self, const Batch& batch, PyObject* answer) {
  if (self->used >= kMostAnswers) forget(self);
  if (2 * self->used >= self->slots->size()) {
    std::vector<Slot> old(2 * self->slots->size(), Slot{});
    old.swap(*self->slots);
    for (const Slot& slot : old) {
      if (slot.answer) *find(self, slot.batch) = slot;
    }
  }
  Slot* slot = find(self, batch);
  if (slot->answer) return;
  *slot = Slot{batch, Py_NewRef(answer)};
  ++self->used;
}

// An int or None as a number; false for anything else.
bool number_of(PyObject* value, int64_t& number) {
  if (!value || value == Py_None) {
    number = kNone;
    return true;
  }
  if (!PyLong_CheckExact(value)) return false;
  int overflow = 0;
  number = PyLong_AsLongLongAndOverflow(value, &overflow);
  return !overflow && number != kNone;
}

// One bit for each mode in a collection; false where it holds anything else.
bool modes_of(const Decide* self, PyObject* collection, int64_t& bits) {
  if (!PyAnySet_CheckExact(collection) && !PyTuple_CheckExact(collection) && !PyList_CheckExact(collection))
    return false;
  PyObject* entries = PyObject_GetIter(collection);
  bits = 0;
  bool known = entries != nullptr;
  while (known) {
    PyObject* entry = PyIter_Next(entries);
    if (!entry) break;
    int bit = 0;
    while (bit < kModes && self->modes[bit] != entry) ++bit;
    known = bit < kModes;
    bits |= int64_t(1) << bit;
    Py_DECREF(entry);
  }
  Py_XDECREF(entries);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return known;
}

// The values of a call by parameter; false where it is not spelled as the signature wants.
bool spell(PyObject* const* args, Py_ssize_t count, PyObject* kwnames, PyObject** values) {
  for (Py_ssize_t i = 0; i < count; ++i) values[i] = args[i];
  const Py_ssize_t keywords = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t k = 0; k < keywords; ++k) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, k);
    int place = 0;
    while (place < kArguments && names[place] != name) ++place;
    if (place == kArguments || values[place]) return false;
    values[place] = args[count + k];
  }
  return values[kTokens] != nullptr;
}

bool read(const Decide* self, PyObject* const* values, Batch& batch) {
  if (!number_of(values[kTokens], batch.tokens) || batch.tokens == kNone) return false;
  if (!number_of(values[kReqs], batch.reqs) || !number_of(values[kQueryLen], batch.query_len) ||
      !number_of(values[kVariant], batch.variant)) {
    return false;
  }
  batch.modes = (1 << kModes) - 1;
  if (values[kAllowed] && values[kAllowed] != Py_None && !modes_of(self, values[kAllowed], batch.modes)) return false;
  int64_t excluded = 0;
  if (values[kExcluded] && !modes_of(self, values[kExcluded], excluded)) return false;
  batch.modes &= ~excluded;
  return true;
}

// The answer for a call, from what is known or from ``ask``.
PyObject* Decide_call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  Decide* self = self_of(object);
  const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  if (count > kPositional) {  // ``ask`` may take more
    return PyErr_Format(PyExc_TypeError, "decide() takes at most %d positional arguments but %zd were given",
                        kPositional, count);
  }
  PyObject* values[kArguments] = {};
  Batch batch;
  const bool is_usual = spell(args, count, kwnames, values) && read(self, values, batch);
  if (is_usual) {
    const Slot* slot = find(self, batch);
    if (slot->answer) return Py_NewRef(slot->answer);
  }
  const uint64_t generation = self->generation;
  PyObject* ask = Py_NewRef(self->ask);
  PyObject* answer = PyObject_Vectorcall(ask, args, nargsf, kwnames);
  Py_DECREF(ask);
  if (answer && is_usual && generation == self->generation) keep(self, batch, answer);
  return answer;
}

PyObject* Decide_use(PyObject* object, PyObject* args) {
  Decide* self = self_of(object);
  PyObject *ask, *attributes, *table;
  if (!PyArg_ParseTuple(args, "OO!O", &ask, &PyDict_Type, &attributes, &table)) return nullptr;
  // What goes is released at the end, since that may run Python: until then no thread can see the one without the
  // other.
  PyObject* old_table = PyDict_GetItemString(attributes, "table");
  Py_XINCREF(old_table);
  PyObject* old_ask = self->ask;
  const int failed = PyDict_SetItemString(attributes, "table", table);
  if (!failed) {
    ++self->generation;
    self->ask = Py_NewRef(ask);
    forget(self);
    Py_XDECREF(old_ask);
  }
  Py_XDECREF(old_table);
  if (failed) return nullptr;
  Py_RETURN_NONE;
}

PyObject* Decide_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject* modes;
  if (kwargs && PyDict_GET_SIZE(kwargs)) {
    PyErr_SetString(PyExc_TypeError, "Decide takes no keywords");
    return nullptr;
  }
  if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &modes)) return nullptr;
  if (PyTuple_GET_SIZE(modes) != kModes) {
    PyErr_SetString(PyExc_ValueError, "modes must be NONE, PIECEWISE and FULL");
    return nullptr;
  }
  Decide* self = reinterpret_cast<Decide*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->call = Decide_call;
  self->slots = new std::vector<Slot>(kFirstSlots, Slot{});
  self->ask = Py_NewRef(Py_None);
  for (int i = 0; i < kModes; ++i) self->modes[i] = Py_NewRef(PyTuple_GET_ITEM(modes, i));
  return reinterpret_cast<PyObject*>(self);
}

int Decide_traverse(PyObject* object, visitproc visit, void* arg) {
  Decide* self = self_of(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->ask);
  for (PyObject* mode : self->modes) Py_VISIT(mode);
  if (self->slots) {
    for (const Slot& slot : *self->slots) Py_VISIT(slot.answer);
  }
  return 0;
}

int Decide_clear(PyObject* object) {
  Decide* self = self_of(object);
  // A call may still come from a finalizer of the same garbage: it asks None, which raises.
  PyObject* old = self->ask;
  self->ask = Py_NewRef(Py_None);
  Py_XDECREF(old);
  forget(self);
  return 0;
}

void Decide_dealloc(PyObject* object) {
  Decide* self = self_of(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  forget(self);
  Py_XDECREF(self->ask);
  for (PyObject* mode : self->modes) Py_XDECREF(mode);
  delete self->slots;
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef Decide_methods[] = {
    {"use", Decide_use, METH_VARARGS,
     "use(ask, attributes, table)\n--\n\nForget all answers, ask another callable from now on, and put its table into "
     "a "
     "dictionary of attributes at the same moment."},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef Decide_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Decide, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot Decide_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(Decide_new)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, Decide_methods},
    {Py_tp_members, Decide_members},
    {Py_tp_traverse, reinterpret_cast<void*>(Decide_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(Decide_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Decide_dealloc)},
    {Py_tp_doc, const_cast<char*>("Decide(modes)\n--\n\n``CudagraphKeyDispatcher.decide`` with the answers that were "
                                  "given before: one lookup each. Thread-safe.")},
    {0, nullptr},
};
PyType_Spec Decide_spec = {"graphdispatch.native._core.Decide", sizeof(Decide), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, Decide_slots};

}  // namespace

namespace gd {

int add_decide(PyObject* module) {
  for (int i = 0; i < kArguments; ++i) {
    names[i] = PyUnicode_InternFromString(kNames[i]);
    if (!names[i]) return -1;
  }
  PyObject* type = PyType_FromSpec(&Decide_spec);
  const int failed = type ? PyModule_AddObjectRef(module, "Decide", type) : -1;
  Py_XDECREF(type);
  return failed;
}

}  // namespace gd
