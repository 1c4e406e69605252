#include "served_call.h"

#include "hit.h"

namespace gd {

namespace {

struct {
  Slot server{names._server}, route{names._route};
} of_served;

PyObject* compiler_here = nullptr;  // what torch tells the calling thread's compiler with; kept for good

// Whether the calling thread's frames run as Python runs them; below zero with an error. They do not where torch's
// compiler is at work; then what a call runs has to be kept from it, as the method in Python does. Torch may go on
// looking at each frame when no compiler is at work in any thread, as it does once it refused a whole graph.
int runs_plainly() {
  if (_PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) == _PyEval_EvalFrameDefault) return 1;
  const Ref compiler(PyObject_CallNoArgs(compiler_here));
  return compiler ? compiler.get() == Py_None : -1;
}

// Serve a call by the method of the server's class; the core's is not looked up while nobody changes that class.
PyObject* serve_by_class(PyObject* server, PyObject* route, PyObject* args, PyObject* kwargs) {
  static unsigned version = 0;  // of a class with the core's method, as in Slot
  if (version && Py_TYPE(server)->tp_version_tag == version) return serve(server, route, args, kwargs);
  const Ref method = attribute(reinterpret_cast<PyObject*>(Py_TYPE(server)), names.serve);
  if (!method) return nullptr;
  if (is_serve(method.get())) version = Py_TYPE(server)->tp_version_tag;
  PyObject* all[] = {server, route, args, kwargs};
  return PyObject_VectorcallMethod(names.serve, all, 4, nullptr);
}

// The slot behind __call__.
PyObject* call_served(PyObject* served, PyObject* args, PyObject* named) {
  const int plain = runs_plainly();
  if (plain < 0) return nullptr;
  if (!plain) {
    const Ref method = attribute(served, names.__call__);
    return method ? PyObject_Call(method.get(), args, named) : nullptr;
  }
  if (named && !PyArg_ValidateKeywordArguments(named)) return nullptr;
  // A dict of which nobody else knows is the call's own, as a Python function has one.
  const Ref kwargs(!named ? PyDict_New() : Py_REFCNT(named) == 1 ? Py_NewRef(named) : PyDict_Copy(named));
  const Ref server = of_served.server.of(served), route = of_served.route.of(served);
  if (!kwargs || !server || !route) return nullptr;
  return serve_by_class(server.get(), route.get(), args, kwargs.get());
}

PyObject* take_calls(PyObject*, PyObject* args) {
  PyObject *type, *compiler;
  if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &compiler)) return nullptr;
  if (!PyType_HasFeature(reinterpret_cast<PyTypeObject*>(type), Py_TPFLAGS_HEAPTYPE)) {
    return PyErr_Format(PyExc_TypeError, "take_calls() takes a class that was made in Python");
  }
  Py_XSETREF(compiler_here, Py_NewRef(compiler));
  reinterpret_cast<PyTypeObject*>(type)->tp_call = call_served;
  PyType_Modified(reinterpret_cast<PyTypeObject*>(type));
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef served_call_methods[] = {
    {"take_calls", take_calls, METH_VARARGS,
     "take_calls(cls, compiler)\n--\n\nLet calls of the class's objects go to their servers without a frame of Python, "
     "until its __call__ is replaced; subclasses keep the one in Python. ``compiler()`` tells which torch "
     "compiler is at work in the calling thread, or None."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace gd
