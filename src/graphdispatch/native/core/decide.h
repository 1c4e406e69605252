#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace gd {

// Add the type Decide to the module; -1 with an error.
int add_decide(PyObject* module);

}  // namespace gd
