// Server.serve of runtime/server.py.
#pragma once

#include "plan.h"
#include "signature.h"

namespace gd {

// Serve one call; null with what the callable raised.
PyObject* serve(PyObject* server, PyObject* route, PyObject* args, PyObject* kwargs);

// Whether what a class of servers has as `serve` is the method above.
bool is_serve(PyObject* method);

// The function ``serve_method(cls, facts)`` of the module.
extern PyMethodDef hit_methods[];

}  // namespace gd
