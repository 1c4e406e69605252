// Attributes that a hit reads where they lie: slots of a class, and what a threading.local holds for the thread.
#pragma once

#include "names.h"

namespace gd {

// An attribute that a class keeps in a slot. It is read and set in place in objects of the class that was met last, as
// long as nobody changes that class, and in all others as Python does it.
class Slot {
 public:
  explicit Slot(PyObject* const& name) : name_(name) {}

  // A new reference; null with an error.
  Ref of(PyObject* object) {
    if (fits(object)) {
      if (PyObject* value = at(object)) return Ref::of(value);
    }
    learn(object);
    return attribute(object, name_);
  }

  // Set the attribute; false with an error.
  bool put(PyObject* object, PyObject* value) {
    if (!fits(object)) {
      learn(object);
      return PyObject_SetAttr(object, name_, value) == 0;
    }
    Py_INCREF(value);
    Py_XSETREF(at(object), value);
    return true;
  }

  // Add to a number; false with an error.
  bool add(PyObject* object, int64_t more);

 private:
  bool fits(PyObject* object) const {
    return version_ && Py_TYPE(object)->tp_version_tag == version_;  // 0 is the tag of a class that was changed
  }
  PyObject*& at(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
  }
  void learn(PyObject* object);

  PyObject* const& name_;
  Py_ssize_t offset_ = 0;
  unsigned version_ = 0;  // of the class: no other class has it, and a change takes it away; 0: no class yet
};

// The attributes of an object that a threading.local may be: of that, what it holds in the calling thread, whose dict
// is kept until another object or thread is met. Values are read and set by whoever holds the GIL; none is borrowed,
// since to drop an old dict may run Python.
class Local {
 public:
  // A new reference; null with an error.
  Ref of(PyObject* object, PyObject* name) {
    const Ref dict = here(object);
    PyObject* value = dict ? item(dict.get(), name) : nullptr;
    return value ? Ref::of(value) : PyErr_Occurred() ? Ref() : attribute(object, name);
  }

  // Set an attribute; false with an error.
  bool put(PyObject* object, PyObject* name, PyObject* value) {
    const Ref dict = here(object);
    if (dict) return PyDict_SetItem(dict.get(), name, value) == 0;
    return !PyErr_Occurred() && PyObject_SetAttr(object, name, value) == 0;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(object_.get());
    Py_VISIT(dict_.get());
    return 0;
  }
  void clear() { object_ = Ref(), dict_ = Ref(); }

 private:
  Ref here(PyObject* object);  // the dict of the calling thread; null for another kind of object, or with an error

  Ref object_, dict_;
  uint64_t thread_;  // whose dict it is
};

}  // namespace gd
