// The module graphdispatch.native._core. It is built without torch and bound to the installed one when it is loaded.
#include "served_call.h"
#include "guard.h"
#include "hit.h"

namespace {

PyObject* bind(PyObject*, PyObject* args) {
  const char *library, *bindings;
  PyObject *tensor, *parameter, *samples, *plain, *negative, *conjugate, *inference;
  if (!PyArg_ParseTuple(args, "ssO!O!O!O!OOO", &library, &bindings, &PyType_Type, &tensor, &PyType_Type, &parameter,
                        &PyTuple_Type, &samples, &PyTuple_Type, &plain, &negative, &conjugate, &inference)) {
    return nullptr;
  }
  if (gd::find_torch(library, bindings, tensor, parameter, samples) &&
      gd::find_keys(plain, negative, conjugate, inference)) {
    Py_RETURN_NONE;
  }
  if (PyErr_ExceptionMatches(PyExc_ImportError)) return nullptr;
  return PyErr_Format(PyExc_ImportError, "a torch.Tensor lies in memory in an unknown way");
}

PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS,
     "bind(library, bindings, Tensor, Parameter, samples, plain, negative, conjugate, inference)\n--\n\nFind the "
     "functions of the loaded torch and where its tensors keep things, and test that on samples with their figures. "
     "Raises ImportError; then nothing else of this module may be used."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "What a hit runs, in C++.", -1, methods, nullptr, nullptr, nullptr, nullptr,
};

// Add the types and functions of each part; false with an error.
bool fill(PyObject* module) {
  if (PyModule_AddStringConstant(module, "SOURCES", GD_SOURCES)) return false;
  if (!gd::add_guard(module) || !gd::make_names() || !gd::add_signature(module) || !gd::add_plan(module)) return false;
  for (PyMethodDef* functions : {gd::ambient_methods, gd::plan_methods, gd::hit_methods, gd::served_call_methods}) {
    if (PyModule_AddFunctions(module, functions)) return false;
  }
  return true;
}

}  // namespace

PyMODINIT_FUNC PyInit__core() {
  PyObject* module = PyModule_Create(&definition);
  if (module && !fill(module)) Py_CLEAR(module);
  return module;
}
