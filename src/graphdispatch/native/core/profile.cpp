#include "profile.h"

#include <cstring>

namespace gd {

namespace {

struct Profiler {
  PyObject_HEAD PyObject *note, *plain, *trusted;
};

PyTypeObject* profiler_type = nullptr;
PyObject *of_call, *of_return, *of_c_call;  // the names of the events

// Whether a compiled function is a method of a trusted class. Of str, two look up what they are told by name.
bool is_trusted(Profiler* self, PyObject* function) {
  if (!function || !PyCFunction_Check(function)) return false;
  PyObject* owner = PyCFunction_GET_SELF(function);
  if (!owner) owner = Py_None;
  constexpr char kLooksUp[] = "format";  // and format_map
  if (PyUnicode_CheckExact(owner)) {
    const char* name = reinterpret_cast<PyCFunctionObject*>(function)->m_ml->ml_name;
    return std::strncmp(name, kLooksUp, sizeof kLooksUp - 1) != 0;
  }
  return PySet_Contains(self->trusted, reinterpret_cast<PyObject*>(Py_TYPE(owner))) == 1;
}

// Whether nothing more is to be noted of the code of a frame: its address is among those of ``plain``.
bool is_plain(Profiler* self, PyFrameObject* frame) {
  const Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const Ref address(PyLong_FromVoidPtr(code.get()));
  return address && PyDict_GetItemWithError(self->plain, address.get());
}

int on_event(PyObject* object, PyFrameObject* frame, int what, PyObject* arg) {
  auto* self = reinterpret_cast<Profiler*>(object);
  PyObject* event = what == PyTrace_CALL     ? of_call
                    : what == PyTrace_RETURN ? of_return
                    : what == PyTrace_C_CALL ? of_c_call
                                             : nullptr;
  if (!event || (event == of_c_call ? is_trusted(self, arg) : is_plain(self, frame))) return PyErr_Occurred() ? -1 : 0;
  const Ref keep = Ref::of(object);
  PyObject* args[] = {reinterpret_cast<PyObject*>(frame), event, arg ? arg : Py_None};
  if (Ref(PyObject_Vectorcall(self->note, args, 3, nullptr))) return 0;
  PyEval_SetProfile(nullptr, nullptr);  // as Python does with a profiler that raises
  return -1;
}

PyObject* start(PyObject* self, PyObject*) {
  PyEval_SetProfile(on_event, self);
  Py_RETURN_NONE;
}

PyObject* call_note(PyObject* self, PyObject* args, PyObject* named) {
  return PyObject_Call(reinterpret_cast<Profiler*>(self)->note, args, named);
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *note, *plain, *trusted;
  if (!PyArg_ParseTuple(args, "OO!O!", &note, &PyDict_Type, &plain, &PyFrozenSet_Type, &trusted)) return nullptr;
  auto* self = reinterpret_cast<Profiler*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->note = Py_NewRef(note);
  self->plain = Py_NewRef(plain);
  self->trusted = Py_NewRef(trusted);
  return reinterpret_cast<PyObject*>(self);
}

void destroy(PyObject* object) {
  auto* self = reinterpret_cast<Profiler*>(object);
  Py_CLEAR(self->note);
  Py_CLEAR(self->plain);
  Py_CLEAR(self->trusted);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef profiler_methods[] = {
    {"start", start, METH_NOARGS, "Profile the calling thread, in place of whatever profiles it."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot profiler_slots[] = {
    {Py_tp_doc, const_cast<char*>("Profiler(note, plain, trusted)\n--\n\nA profiler that hands on to ``note`` what "
                                  "CodeTrace does not pass over: calls of code whose address is no key of ``plain``, "
                                  "and of methods whose class is not ``trusted``.")},
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_call, reinterpret_cast<void*>(call_note)},
    {Py_tp_methods, profiler_methods},
    {0, nullptr},
};

PyType_Spec profiler_spec = {
    "graphdispatch.native._core.Profiler",         sizeof(Profiler), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, profiler_slots,
};

}  // namespace

bool add_profiler(PyObject* module) {
  of_call = PyUnicode_InternFromString("call");
  of_return = PyUnicode_InternFromString("return");
  of_c_call = PyUnicode_InternFromString("c_call");
  profiler_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&profiler_spec));
  return of_call && of_return && of_c_call && profiler_type &&
         PyModule_AddObjectRef(module, "Profiler", reinterpret_cast<PyObject*>(profiler_type)) == 0;
}

}  // namespace gd
