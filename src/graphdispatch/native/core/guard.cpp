// The comparisons of a Guard.
#include "guard.h"

#include <algorithm>
#include <cstring>

#include "ambient.h"
#include "guard_parts.h"
#include "versions.h"

namespace gd {

bool uses_versions = false, uses_changes = false;
PyObject* next_id = nullptr;

namespace {

// Whether two objects are equal constants of one type that calls no code of the user's.
bool equal_constants(PyObject* a, PyObject* b) {
  if (!a || !b || Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyLong_CheckExact(a)) return PyObject_RichCompareBool(a, b, Py_EQ) == 1;
  if (PyFloat_CheckExact(a)) {  // by bits: zeros differ by their sign
    const double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (PyUnicode_CheckExact(a)) return PyUnicode_Compare(a, b) == 0 && !PyErr_Occurred();
  if (PyBytes_CheckExact(a)) {
    const Py_ssize_t size = PyBytes_GET_SIZE(a);
    return size == PyBytes_GET_SIZE(b) && std::memcmp(PyBytes_AS_STRING(a), PyBytes_AS_STRING(b), size) == 0;
  }
  return false;
}

// Whether ``now`` is what is expected. An equal constant takes the place of the other, and is found faster next time.
inline bool matches(PyObject*& expected, PyObject* now) {
  if (now == expected) return true;
  if (!equal_constants(now, expected)) return false;
  Py_INCREF(now);
  Py_SETREF(expected, now);
  return true;
}

bool dict_matches(Guard* self, Dict& entry, const Bindings& wanted) {
  const uint64_t version = version_of(entry.dict);
  PyObject** slot = self->parts.slots.data() + wanted.names.first;
  for (uint32_t i = 0; i < wanted.names.count; ++i, slot += 2) {
    PyObject* now = PyDict_GetItemWithError(entry.dict, slot[0]);
    if (!now || !matches(slot[1], now)) return false;
  }
  for (uint32_t i = 0; i < wanted.absent.count; ++i) {
    PyObject* name = self->parts.slots[wanted.absent.first + i];
    if (PyDict_GetItemWithError(entry.dict, name) || PyErr_Occurred()) return false;
  }
  if (wanted.has_values || wanted.has_keys) {
    PyObject *key, *value;
    PyObject** keys = self->parts.slots.data() + wanted.keys.first;
    PyObject** values = self->parts.slots.data() + wanted.values.first;
    const uint32_t count = wanted.has_values ? wanted.values.count : wanted.keys.count;
    Py_ssize_t position = 0;
    uint32_t i = 0;
    for (; PyDict_Next(entry.dict, &position, &key, &value); ++i) {
      if (i >= count || (wanted.has_values && !matches(values[i], value))) return false;
      if (wanted.has_keys && !matches(keys[i], key)) return false;
    }
    if (i != count) return false;
  }
  entry.version = version;
  return true;
}

// How far ahead of a comparison memory is fetched. What little is compared at each hit lies in the cache.
constexpr size_t kFew = 64;
size_t steps_ahead(size_t count) { return count > kFew ? 8 : count; }

bool dicts_match(Guard* self) {
  const uint64_t now = changes;  // first: CPython tells of a change before it is made
  if (uses_changes && self->seen_changes == now) return true;
  Dict* const dicts = self->parts.dicts.data();
  const size_t count = self->parts.dicts.size(), ahead = steps_ahead(count);
  const bool versions = uses_versions;
  for (size_t i = 0; i < count; ++i) {
    if (i + ahead < count) __builtin_prefetch(dicts[i + ahead].dict);
    if (versions && version_of(dicts[i].dict) == dicts[i].version) continue;
    if (!dict_matches(self, dicts[i], self->parts.bindings[i])) return false;
  }
  if (self->watches) self->seen_changes = now;
  return true;
}

bool iterable_matches(PyObject** slots, uint32_t count, PyObject* container) {
  PyObject* entries = PyObject_GetIter(container);
  if (!entries) return false;
  uint32_t i = 0;
  bool same = true;
  while (PyObject* now = same ? PyIter_Next(entries) : nullptr) {
    same = i < count && matches(slots[i], now);
    Py_DECREF(now);
    ++i;
  }
  Py_DECREF(entries);
  return same && i == count && !PyErr_Occurred();
}

bool sequences_match(Guard* self) {
  for (const Sequence& entry : self->parts.sequences) {
    PyObject** slots = self->parts.slots.data() + entry.entries.first;
    const uint32_t count = entry.entries.count;
    if (PyList_Check(entry.container)) {
      if (PyList_GET_SIZE(entry.container) != Py_ssize_t(count)) return false;
      for (uint32_t i = 0; i < count; ++i) {
        if (!matches(slots[i], PyList_GET_ITEM(entry.container, i))) return false;
      }
    } else if (!iterable_matches(slots, count, entry.container)) {
      return false;
    }
  }
  return true;
}

// What a weak reference points to, as a new reference.
PyObject* referent(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* value = nullptr;
  if (PyWeakref_GetRef(reference, &value) < 0) return nullptr;
  return value ? value : Py_NewRef(Py_None);
#else
  PyObject* value = PyWeakref_GetObject(reference);
  return Py_XNewRef(value);
#endif
}

// What a reader reads now, as a new reference; null if it fails.
PyObject* read(Guard* self, const Reader& reader) {
  PyObject* value = nullptr;
  switch (reader.kind) {
    case Kind::kReference:
      return referent(reader.subject);
    case Kind::kContext:
      return PyContextVar_Get(reader.subject, self->absent, &value) < 0 ? nullptr : value;
    case Kind::kCall:
      return PyObject_CallNoArgs(reader.subject);
  }
  return nullptr;
}

bool readers_match(Guard* self) {
  for (size_t i = 0; i < self->parts.readers.size(); ++i) {
    PyObject* now = read(self, self->parts.readers[i]);  // may run Python code
    const bool same = now && matches(self->parts.readers[i].expected, now);
    Py_XDECREF(now);
    if (!same) return false;
  }
  return true;
}

bool fields_match(Guard* self) {
  Field* const fields = self->parts.fields.data();
  const size_t count = self->parts.fields.size(), ahead = steps_ahead(count);
  for (size_t i = 0; i < count; ++i) {
    if (i + ahead < count) __builtin_prefetch(fields[i + ahead].place);
    PyObject* now = *fields[i].place;
    if (!matches(fields[i].expected, now ? now : fields[i].empty)) return false;
  }
  return true;
}

bool tensor_matches(const TensorPlace& place, const int64_t* expected) {
  void *handle = handle_of(place.tensor), *data = nullptr;
  int64_t dim = -1, *shape = nullptr, *strides = nullptr;
  int32_t dtype = -1;
  if (reinterpret_cast<PyObject*>(Py_TYPE(place.tensor)) != place.kind) return false;
  if (place.is_used && (shim.data_ptr(handle, &data) || data != place.data)) return false;
  if (shim.dim(handle, &dim) || dim != place.dim || shim.dtype(handle, &dtype) || dtype != place.dtype) return false;
  if (keys_of(place.tensor) != place.keys) return false;
  if (shim.sizes(handle, &shape) || shim.strides(handle, &strides)) return false;
  return std::equal(shape, shape + dim, expected) && std::equal(strides, strides + dim, expected + dim);
}

// Take the imprint of a tensor. What layers have alike they refer to in one place, which then lies in the cache. To
// write to a place makes at most others that refer to it compare anew.
void take_imprint(Parts& parts, size_t i) {
  constexpr size_t kLooked = 256;
  Imprint& imprint = parts.imprints[i];
  Form found{};
  imprint = imprint_of(parts.tensors[i].tensor, parts.tensors[i].is_used, found);
  size_t place = i > kLooked ? i - kLooked : 0;
  while (place < i && std::memcmp(&parts.forms[place], &found, sizeof found) != 0) ++place;
  parts.forms[place] = found;
  imprint.form = &parts.forms[place];
}

// The first tensor from one on that is not as its imprint says; the end if all are. As a function of its own it is
// compiled to a loop in registers.
__attribute__((noinline)) const Imprint* next_other(const Imprint* from, const Imprint* end, const Layout at) {
  const Py_ssize_t ahead = steps_ahead(end - from);
  auto fetch = [](const char* base, size_t offset) {  // of what may be nowhere
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(base) + offset));
  };
  for (; end - from > ahead; ++from) {
    __builtin_prefetch(from[ahead].handle);
    fetch(from[ahead].storage, at.data);
    for (size_t line = 0; line < 3; ++line) fetch(from[ahead].impl, at.storage + line * 64);
    if (__builtin_expect(!is_as(*from, at), false)) return from;
  }
  while (from != end && __builtin_expect(is_as(*from, at), true)) ++from;
  return from;
}

bool tensors_match(Guard* self) {
  const Imprint *const imprints = self->parts.imprints.data(), *const end = imprints + self->parts.imprints.size();
  for (const Imprint* at = next_other(imprints, end, layout); at != end; at = next_other(at + 1, end, layout)) {
    const size_t i = at - imprints;
    const TensorPlace& place = self->parts.tensors[i];
    if (!tensor_matches(place, self->parts.extents.data() + place.extents)) return false;
    take_imprint(self->parts, i);
  }
  return true;
}

// Whether no hook was registered in the watched tables. Handles are numbered, and later ones have larger numbers.
bool hooks_match(Guard* self) {
  PyObject* now = PyDict_GetItemWithError(self->handles, next_id);
  if (!now) return false;
  if (now == self->latest) return true;
  for (PyObject* table : self->parts.hooks) {
    PyObject *number, *hook;
    Py_ssize_t position = 0;
    while (PyDict_Next(table, &position, &number, &hook)) {
      if (!PyLong_CheckExact(number) || PyObject_RichCompareBool(number, self->latest, Py_GE) != 0) return false;
    }
  }
  Py_INCREF(now);
  Py_SETREF(self->latest, now);
  return true;
}

bool all_match(Guard* self) {
  if (self->is_dead || !hooks_match(self) || !dicts_match(self) || !sequences_match(self)) return false;
  return fields_match(self) && readers_match(self) && tensors_match(self);
}

}  // namespace

bool guard_holds(PyObject* guard) {
  Guard* self = reinterpret_cast<Guard*>(guard);
  if (all_match(self)) {
    self->has_held = true;
    return true;
  }
  PyErr_Clear();
  return false;
}

int guard_trainable(PyObject* guard) {
  const Guard* self = reinterpret_cast<Guard*>(guard);
  if (self->is_dead || self->trains < 0) return -1;
  for (size_t i = 0; i < self->parts.tensors.size(); ++i) {
    if (!self->parts.tensors[i].is_used || !(self->trains || self->parts.tensors[i].is_loose)) continue;
    if (needs_gradient(self->parts.tensors[i].tensor)) return 1;
  }
  return 0;
}

}  // namespace gd
