#include "door.h"

#include "slot.h"

namespace gd {

namespace {

struct {
  Slot server{names._server}, decode{names._decode}, uniform_decode{names._uniform_decode};
} of_door;

// Whether frames run as Python runs them. They do not while torch's compiler is at work in some thread; then what a
// call runs has to be kept from it, as the method in Python does.
bool runs_plainly() {
  return _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) == _PyEval_EvalFrameDefault;
}

// The slot behind __call__. The method in Python serves the calls whose route has to be chosen, too.
PyObject* call_door(PyObject* door, PyObject* args, PyObject* named) {
  const Ref chosen = of_door.uniform_decode.of(door);
  if (!chosen) return nullptr;
  if (chosen.get() != Py_None || !runs_plainly()) {
    const Ref method = attribute(door, names.__call__);
    return method ? PyObject_Call(method.get(), args, named) : nullptr;
  }
  if (named && !PyArg_ValidateKeywordArguments(named)) return nullptr;
  // A dict of which nobody else knows is the call's own, as a Python function has one.
  const Ref kwargs(!named ? PyDict_New() : Py_REFCNT(named) == 1 ? Py_NewRef(named) : PyDict_Copy(named));
  const Ref server = of_door.server.of(door), route = of_door.decode.of(door);
  if (!kwargs || !server || !route) return nullptr;
  PyObject* all[] = {server.get(), route.get(), args, kwargs.get()};
  return PyObject_VectorcallMethod(names.serve, all, 4, nullptr);
}

PyObject* take_calls(PyObject*, PyObject* type) {
  if (!PyType_Check(type) || !PyType_HasFeature(reinterpret_cast<PyTypeObject*>(type), Py_TPFLAGS_HEAPTYPE)) {
    return PyErr_Format(PyExc_TypeError, "take_calls() takes a class that was made in Python");
  }
  reinterpret_cast<PyTypeObject*>(type)->tp_call = call_door;
  PyType_Modified(reinterpret_cast<PyTypeObject*>(type));
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef door_methods[] = {
    {"take_calls", take_calls, METH_O,
     "take_calls(cls)\n--\n\nLet calls of the class's objects go to their servers without a frame of Python, until its "
     "__call__ is replaced; subclasses keep the one in Python."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace gd
