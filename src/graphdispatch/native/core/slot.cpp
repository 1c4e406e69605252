#include "slot.h"

#include <structmember.h>

#include <cstring>

namespace gd {

namespace {

// What a class has under a name, by Python's order of lookup, borrowed; null if it has nothing.
PyObject* in_class(PyTypeObject* type, PyObject* name) {
  PyObject* order = type->tp_mro;
  for (Py_ssize_t i = 0; order && i < PyTuple_GET_SIZE(order); ++i) {
    const Ref dict(PyObject_GetAttr(PyTuple_GET_ITEM(order, i), names.__dict__));
    const Ref found(dict ? PyObject_GetItem(dict.get(), name) : nullptr);
    if (found) return found.get();  // the class holds it
    PyErr_Clear();
  }
  return nullptr;
}

// Whether the attributes of a class's objects are read as Python reads most: what the class has in slots comes first,
// and its ``__getattr__``, if it has one, last.
bool reads_plainly(PyTypeObject* type) {
  if (type->tp_getattro == PyObject_GenericGetAttr) return true;
  return in_class(type, names.__getattribute__) == in_class(&PyBaseObject_Type, names.__getattribute__);
}

// Whether a class makes its objects differ by thread, as CPython's own does and its subclasses do. Others of that name,
// which libraries put in its place, may differ by more than the thread.
bool is_by_thread(PyTypeObject* type) {
  for (; type; type = type->tp_base) {
    if (std::strcmp(type->tp_name, "_thread._local") == 0) return true;
  }
  return false;
}

}  // namespace

void Slot::learn(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  if (!(type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG) || !reads_plainly(type)) return;
  PyObject* found = in_class(type, name_);
  if (!found || Py_TYPE(found) != &PyMemberDescr_Type) return;
  const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(found)->d_member;
  if (member->type != T_OBJECT_EX || (member->flags & READONLY)) return;
  offset_ = member->offset;
  version_ = type->tp_version_tag;
}

bool Slot::add(PyObject* object, int64_t more) {
  const Ref old = of(object);
  const long long value = old ? PyLong_AsLongLong(old.get()) : -1;
  if (value == -1 && PyErr_Occurred()) return false;
  const Ref sum(PyLong_FromLongLong(value + more));
  return sum && put(object, sum.get());
}

Ref Local::here(PyObject* object) {
  const uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
  if (dict_ && thread == thread_ && object == object_.get()) return Ref::of(dict_.get());
  if (!is_by_thread(Py_TYPE(object))) return Ref();
  Ref found = attribute(object, names.__dict__), held = Ref::of(object);
  if (!found || !PyDict_CheckExact(found.get())) return Ref();
  Ref dict = Ref::of(found.get());
  std::swap(object_, held);  // what they held is dropped at the end, when all three fit each other
  std::swap(dict_, dict);
  thread_ = thread;
  return found;
}

}  // namespace gd
