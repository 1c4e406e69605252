#include "names.h"

namespace gd {

Names names;
Facts facts;

bool make_names() {
#define GD_MAKE(name)                             \
  names.name = PyUnicode_InternFromString(#name); \
  if (!names.name) return false;
  GD_NAMES(GD_MAKE)
#undef GD_MAKE
  return true;
}

PyObject* method_with_facts(PyObject* args, PyMethodDef* definition) {
  PyObject *type, *dict;
  if (!PyArg_ParseTuple(args, "O!O!", &PyType_Type, &type, &PyDict_Type, &dict)) return nullptr;
  Py_ssize_t found = 0;
#define GD_READ(name)                                        \
  if (PyObject* value = PyDict_GetItemString(dict, #name)) { \
    Py_XSETREF(facts.name, Py_NewRef(value));                \
    ++found;                                                 \
  }
  GD_FACTS(GD_READ)
#undef GD_READ
  if (found != PyDict_GET_SIZE(dict)) return PyErr_Format(PyExc_KeyError, "a fact that the core does not know");
  return PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type), definition);
}

}  // namespace gd
