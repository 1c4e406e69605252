// The class Guard: how one is made, and what Python's collector sees of it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

#include "ambient.h"
#include "guard_parts.h"
#include "versions.h"

namespace gd {
namespace {

PyTypeObject* guard_type = nullptr;
int watcher = -1;  // CPython's number for who hears of changes

#if PY_VERSION_HEX >= 0x030C0000
int count_change(PyDict_WatchEvent event, PyObject*, PyObject*, PyObject*) {
  changes += event != PyDict_EVENT_DEALLOCATED;  // no guard has such a dict
  return 0;
}
#endif

// Give ``visit`` every reference of a guard. It may set them to null.
template <typename Visit>
int each_reference(Guard* self, Visit visit) {
  int stop = 0;
  auto one = [&](PyObject*& reference) {
    if (!stop && reference) stop = visit(reference);
  };
  one(self->absent), one(self->handles), one(self->latest);
  for (Dict& entry : self->parts.dicts) one(entry.dict);
  for (PyObject*& slot : self->parts.slots) one(slot);
  for (Sequence& entry : self->parts.sequences) one(entry.container);
  for (Field& entry : self->parts.fields) one(entry.object), one(entry.expected);
  for (Reader& entry : self->parts.readers) one(entry.subject), one(entry.expected);
  for (TensorPlace& entry : self->parts.tensors) one(entry.tensor), one(entry.kind);
  for (PyObject*& table : self->parts.hooks) one(table);
  return stop;
}

int guard_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  return each_reference(reinterpret_cast<Guard*>(object), [&](PyObject* held) { return visit(held, arg); });
}

int guard_clear(PyObject* object) {
  Guard* self = reinterpret_cast<Guard*>(object);
  self->is_dead = true;
  return each_reference(self, [](PyObject*& held) {
    Py_CLEAR(held);
    return 0;
  });
}

void guard_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  guard_clear(object);
  reinterpret_cast<Guard*>(object)->parts.~Parts();
  type->tp_free(object);
  Py_DECREF(type);
}

// Add references to the slots, and tell where they are.
Range keep(Guard* self, PyObject* tuple) {
  Range range{uint32_t(self->parts.slots.size()), uint32_t(PyTuple_GET_SIZE(tuple))};
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    self->parts.slots.push_back(Py_NewRef(PyTuple_GET_ITEM(tuple, i)));
  }
  return range;
}

void keep_dict(Guard* self, PyObject* dict, const Bindings& wanted) {
  self->parts.bindings.push_back(wanted);
  self->parts.dicts.push_back({Py_NewRef(dict), 0});
  self->watches &= uses_changes && watch(dict);
}

bool add_table(Guard* self, PyObject* item) {
  PyObject *dict, *keys, *names, *absent;
  Bindings wanted;
  if (!PyArg_ParseTuple(item, "O!OO!O!", &PyDict_Type, &dict, &keys, &PyTuple_Type, &names, &PyTuple_Type, &absent)) {
    return false;
  }
  wanted.absent = keep(self, absent);
  wanted.has_keys = PyTuple_Check(keys);
  if (wanted.has_keys) wanted.keys = keep(self, keys);
  wanted.names = keep(self, names);
  wanted.names.count /= 2;
  keep_dict(self, dict, wanted);
  return true;
}

bool add_content(Guard* self, PyObject* item) {
  PyObject *dict, *keys, *values;
  Bindings wanted;
  if (!PyArg_ParseTuple(item, "O!OO!", &PyDict_Type, &dict, &keys, &PyTuple_Type, &values)) return false;
  wanted.has_values = true;
  wanted.has_keys = PyTuple_Check(keys) && PyTuple_GET_SIZE(keys) == PyTuple_GET_SIZE(values);
  if (wanted.has_keys) wanted.keys = keep(self, keys);
  wanted.values = keep(self, values);
  keep_dict(self, dict, wanted);
  return true;
}

bool add_sequence(Guard* self, PyObject* item) {
  PyObject *container, *entries;
  if (!PyArg_ParseTuple(item, "OO!", &container, &PyTuple_Type, &entries)) return false;
  const Range range = keep(self, entries);
  self->parts.sequences.push_back({Py_NewRef(container), range});
  return true;
}

// Where an object keeps what Python reads as a ``kind`` of it; null if nowhere.
PyObject** place_of(PyObject* object, const char* kind, PyObject* descriptor) {
  if (std::strcmp(kind, "__class__") == 0) return reinterpret_cast<PyObject**>(&object->ob_type);
  if (std::strcmp(kind, "__dict__") == 0) return _PyObject_GetDictPtr(object);
  size_t offset = 0;
  if (PyFunction_Check(object)) {
    const std::pair<const char*, size_t> names[] = {
        {"__code__", offsetof(PyFunctionObject, func_code)},
        {"__defaults__", offsetof(PyFunctionObject, func_defaults)},
        {"__kwdefaults__", offsetof(PyFunctionObject, func_kwdefaults)},
        {"__name__", offsetof(PyFunctionObject, func_name)},
        {"__qualname__", offsetof(PyFunctionObject, func_qualname)},
        {"__module__", offsetof(PyFunctionObject, func_module)},
        {"__doc__", offsetof(PyFunctionObject, func_doc)},
    };
    for (const auto& name : names) {
      if (std::strcmp(kind, name.first) == 0) offset = name.second;
    }
  } else if (std::strcmp(kind, "cell") == 0 && PyCell_Check(object)) {
    offset = offsetof(PyCellObject, ob_ref);
  } else if (std::strcmp(kind, "__mro__") == 0 && PyType_Check(object)) {
    offset = offsetof(PyTypeObject, tp_mro);
  } else if (std::strcmp(kind, "slot") == 0 && Py_TYPE(descriptor) == &PyMemberDescr_Type &&
             PyObject_TypeCheck(object, reinterpret_cast<PyDescrObject*>(descriptor)->d_type)) {
    const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
    if (member->type == T_OBJECT_EX) offset = member->offset;  // of a class made by a class statement
  }
  return offset ? reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset) : nullptr;
}

bool add_reader(Guard* self, PyObject* item) {
  const char* name;
  PyObject *subject, *descriptor, *expected;
  if (!PyArg_ParseTuple(item, "sOOO", &name, &subject, &descriptor, &expected)) return false;
  if (PyObject** place = place_of(subject, name, descriptor)) {
    PyObject* empty = PyFunction_Check(subject) ? Py_None : self->absent;
    self->parts.fields.push_back({Py_NewRef(subject), place, empty, Py_NewRef(expected)});
    return true;
  }
  const bool is_reference = std::strcmp(name, "reference") == 0, is_context = std::strcmp(name, "context") == 0;
  if (is_reference ? !PyWeakref_CheckRef(subject)
                   : is_context ? !PyContextVar_CheckExact(subject) : std::strcmp(name, "call") != 0) {
    PyErr_Format(PyExc_TypeError, "%R cannot be read as a %s", subject, name);
    return false;
  }
  const Kind kind = is_reference ? Kind::kReference : is_context ? Kind::kContext : Kind::kCall;
  self->parts.readers.push_back({kind, Py_NewRef(subject), Py_NewRef(expected)});
  return true;
}

bool add_extents(Guard* self, PyObject* numbers) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); ++i) {
    self->parts.extents.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, i)));
  }
  return !PyErr_Occurred();
}

bool add_tensor(Guard* self, PyObject* item) {
  PyObject *tensor, *kind, *address, *shape, *strides;
  TensorPlace place{};
  int is_loose = 0;
  if (!PyArg_ParseTuple(item, "OOOpO!O!", &tensor, &kind, &address, &is_loose, &PyTuple_Type, &shape, &PyTuple_Type,
                        &strides)) {
    return false;
  }
  place.is_loose = is_loose;
  if (!PyObject_TypeCheck(tensor, tensor_type)) {
    PyErr_SetString(PyExc_TypeError, "a guard compares torch.Tensor by address and keys, and nothing else");
    return false;
  }
  place.is_used = address != Py_None;
  place.data = place.is_used ? PyLong_AsVoidPtr(address) : nullptr;
  if (PyErr_Occurred()) return false;
  place.dim = PyTuple_GET_SIZE(shape);
  place.extents = self->parts.extents.size();
  if (!add_extents(self, shape) || !add_extents(self, strides)) return false;
  if (PyTuple_GET_SIZE(strides) != place.dim) {
    PyErr_SetString(PyExc_TypeError, "a tensor has a stride for each dimension");
    return false;
  }
  shim.dtype(handle_of(tensor), &place.dtype);
  place.keys = keys_of(tensor);
  place.tensor = Py_NewRef(tensor), place.kind = Py_NewRef(kind);
  self->parts.tensors.push_back(place);
  self->parts.imprints.push_back({handle_of(tensor), nullptr, nullptr, nullptr, {}, nullptr});
  self->parts.forms.emplace_back();
  return true;
}

bool add_hooks(Guard* self, PyObject* item) {
  PyObject* table;
  if (!PyArg_ParseTuple(item, "O!", &PyDict_Type, &table)) return false;
  self->parts.hooks.push_back(Py_NewRef(table));
  return true;
}

bool add_each(Guard* self, PyObject* items, bool (*add)(Guard*, PyObject*)) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); ++i) {
    PyObject* item = PyTuple_GET_ITEM(items, i);
    if (!PyTuple_Check(item)) PyErr_SetString(PyExc_TypeError, "a guard is made of tuples");
    if (PyErr_Occurred() || !add(self, item)) return false;
  }
  return true;
}

PyObject* guard_new(PyTypeObject* type, PyObject* args, PyObject* named) {
  static const char* names[] = {"absent",    "handles", "latest",  "trains", "tables", "contents",
                                "sequences", "readers", "tensors", "hooks",  nullptr};
  PyObject *absent, *handles, *latest, *parts[6];
  int trains;
  if (!PyArg_ParseTupleAndKeywords(args, named, "$OO!O!iO!O!O!O!O!O!", const_cast<char**>(names), &absent,
                                   &PyDict_Type, &handles, &PyLong_Type, &latest, &trains, &PyTuple_Type, &parts[0],
                                   &PyTuple_Type, &parts[1], &PyTuple_Type, &parts[2], &PyTuple_Type, &parts[3],
                                   &PyTuple_Type, &parts[4], &PyTuple_Type, &parts[5])) {
    return nullptr;
  }
  Guard* self = reinterpret_cast<Guard*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  new (&self->parts) Parts();
  self->absent = Py_NewRef(absent);
  self->handles = Py_NewRef(handles);
  self->latest = Py_NewRef(latest);
  self->trains = trains;
  self->watches = true;
  bool (*const adders[])(Guard*, PyObject*) = {add_table, add_content, add_sequence, add_reader, add_tensor, add_hooks};
  for (int i = 0; i < 6; ++i) {
    if (!add_each(self, parts[i], adders[i])) {
      Py_DECREF(self);
      return nullptr;
    }
  }
  return reinterpret_cast<PyObject*>(self);
}

PyObject* holds(PyObject* self, PyObject*) { return PyBool_FromLong(guard_holds(self)); }

PyObject* trainable(PyObject* self, PyObject*) {
  const int answer = guard_trainable(self);
  if (answer < 0) Py_RETURN_NONE;
  return PyBool_FromLong(answer);
}

PyObject* has_held(PyObject* self, void*) { return PyBool_FromLong(reinterpret_cast<Guard*>(self)->has_held); }

PyObject* skip_dicts(PyObject*, PyObject* args) {
  int versions, news;
  if (!PyArg_ParseTuple(args, "pp", &versions, &news)) return nullptr;
  uses_versions = versions && kHasVersions;
  uses_changes = news && watcher >= 0;
  Py_RETURN_NONE;
}

PyObject* dict_version(PyObject*, PyObject* dict) {
  if (!PyDict_Check(dict)) return PyErr_Format(PyExc_TypeError, "only a dict has a version");
  return PyLong_FromUnsignedLongLong(version_of(dict));
}

PyObject* dict_changes(PyObject*, PyObject* dict) {
  if (!PyDict_Check(dict)) return PyErr_Format(PyExc_TypeError, "only a dict can be watched");
  return PyLong_FromUnsignedLongLong(watch(dict) ? changes : 0);
}

PyMethodDef guard_methods[] = {
    {"holds", holds, METH_NOARGS,
     "Whether everything is as it was; a no may be wrong, and then StateGuard finds that it holds."},
    {"trainable", trainable, METH_NOARGS,
     "Of a guard that has just been found to hold: whether a call may have to be differentiated; None if only "
     "StateGuard can tell."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef guard_attributes[] = {
    {"has_held", has_held, nullptr, "Whether the guard has held since it was made.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot guard_slots[] = {
    {Py_tp_doc, const_cast<char*>("What a StateGuard compares, compared in one pass.")},
    {Py_tp_new, reinterpret_cast<void*>(guard_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(guard_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(guard_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(guard_clear)},
    {Py_tp_methods, guard_methods},
    {Py_tp_getset, guard_attributes},
    {0, nullptr},
};

PyType_Spec guard_spec = {
    "graphdispatch.native._core.Guard",
    sizeof(Guard),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    guard_slots,
};

PyMethodDef functions[] = {
    {"skip_dicts", skip_dicts, METH_VARARGS,
     "skip_dicts(versions, changes)\n--\n\nWhether guards skip dicts whose version is as it was, and all dicts while "
     "no watched one is changed."},
    {"dict_version", dict_version, METH_O,
     "dict_version(dict)\n--\n\nA number that is another after each change of the dict; 0 where Python has none."},
    {"dict_changes", dict_changes, METH_O,
     "dict_changes(dict)\n--\n\nThe same as dict_version for a dict that is watched from now on."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

uint64_t changes = 1;

bool watch([[maybe_unused]] PyObject* dict) {
#if PY_VERSION_HEX >= 0x030C0000
  if (watcher >= 0 && PyDict_Watch(watcher, dict) == 0) return true;
  PyErr_Clear();
#endif
  return false;
}

bool is_guard(PyObject* object) { return Py_TYPE(object) == guard_type; }

bool add_guard(PyObject* module) {
#if PY_VERSION_HEX >= 0x030C0000
  watcher = PyDict_AddWatcher(count_change);
  PyErr_Clear();  // CPython has no more of them
#endif
  next_id = PyUnicode_InternFromString("next_id");
  guard_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&guard_spec));
  if (!next_id || !guard_type) return false;
  return PyModule_AddFunctions(module, functions) == 0 &&
         PyModule_AddObjectRef(module, "Guard", reinterpret_cast<PyObject*>(guard_type)) == 0;
}

}  // namespace gd
