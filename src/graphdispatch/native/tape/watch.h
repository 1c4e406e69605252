// Watches a run that should only compute: see Note [a run that is hardly looked at] in capture/quiet.py.
#pragma once

#include <Python.h>

namespace graphdispatch {

// Add the type Watch to a module, unless torch refuses its key; -1 with an error.
int add_watch(PyObject* module);

}  // namespace graphdispatch
