#include "look.h"

#include <vector>

#include "ambient.h"
#include "facts.h"

namespace gd {

namespace {

constexpr int kMostDeep = 16;

class Parts {
 public:
  Parts() { parts_.reserve(32); }

  // Each adds to the look; false if it cannot be told, or with an error.
  bool object(PyObject* object) { return (parts_.push_back(Ref::of(object)), true); }
  bool number(int64_t number) { return (parts_.push_back(Ref(PyLong_FromLongLong(number))), parts_.back().get()); }

  bool value(PyObject* value, int depth) {
    if (!object(reinterpret_cast<PyObject*>(Py_TYPE(value)))) return false;
    if (is_plain_tensor(value)) return tensor(value);
    const bool is_dict = PyDict_CheckExact(value), is_list = PyList_CheckExact(value);
    if (!is_dict && !is_list && !PyTuple_CheckExact(value)) return true;  // its class says all
    if (depth == kMostDeep || !number(PyObject_Size(value))) return false;
    if (is_dict) return values(value, depth + 1);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      if (!this->value(PySequence_Fast_GET_ITEM(value, i), depth + 1)) return false;
    }
    return true;
  }

  // Names or keys, and the look of what they stand for.
  bool values(PyObject* dict, int depth) {
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
      if (!object(key) || !this->value(value, depth)) return false;
    }
    return true;
  }

  // The look itself; nothing can be added any more.
  Ref tuple() {
    Ref made(PyTuple_New(static_cast<Py_ssize_t>(parts_.size())));
    for (size_t i = 0; made && i < parts_.size(); ++i) PyTuple_SET_ITEM(made.get(), i, parts_[i].release());
    return made;
  }

 private:
  bool tensor(PyObject* tensor) {
    int64_t dim = 0, *sizes = nullptr;
    void* handle = handle_of(tensor);
    if (!is_plain_host(tensor) || shim.dim(handle, &dim) || shim.sizes(handle, &sizes) || !number(dim)) return false;
    for (int64_t d = 0; d < dim; ++d) {
      if (!number(sizes[d])) return false;
    }
    return true;
  }

  std::vector<Ref> parts_;
};

PyObject* look_of_call(PyObject*, PyObject* args) {
  PyObject *given, *named;
  if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &given, &PyDict_Type, &named)) return nullptr;
  Ref look = look_of(given, named);
  return look || PyErr_Occurred() ? look.release() : Py_NewRef(Py_None);
}

}  // namespace

Ref look_of(PyObject* args, PyObject* kwargs) {
  Parts look;
  const bool is_told = look.number(PyObject_Size(facts.nodes)) && look.value(args, 0) && look.values(kwargs, 0);
  return is_told ? look.tuple() : Ref();
}

PyMethodDef look_methods[] = {
    {"look_of", look_of_call, METH_VARARGS,
     "look_of(args, kwargs)\n--\n\nWhat tells calls that no graph can take apart, or None if it cannot be told."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace gd
