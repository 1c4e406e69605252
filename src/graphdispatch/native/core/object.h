// Small helpers around CPython's interface.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <utility>

namespace gd {

// An owned reference, given back at the end of the scope.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  static Ref of(PyObject* borrowed) { return Ref(Py_XNewRef(borrowed)); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// An attribute, by an interned name.
inline Ref attribute(PyObject* object, PyObject* name) { return Ref(PyObject_GetAttr(object, name)); }

// Whether a value is true: 1, 0, or -1 with an error.
inline int truth(const Ref& value) { return value ? PyObject_IsTrue(value.get()) : -1; }

// A value in the ``__dict__`` of an object, borrowed; null without an error if it is missing.
inline PyObject* item(PyObject* dict, PyObject* name) { return PyDict_GetItemWithError(dict, name); }

// The error that is set, with where it was raised; then none is. Null if there was none.
inline Ref take_error() {
  if (!PyErr_Occurred()) return Ref();
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace) PyException_SetTraceback(error, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return Ref(error);
}

// Set an error again, in the place of any other.
inline void set_error(const Ref& error) {
  PyErr_Restore(Py_NewRef(Py_TYPE(error.get())), Py_NewRef(error.get()), PyException_GetTraceback(error.get()));
}

}  // namespace gd
