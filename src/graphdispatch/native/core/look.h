// What a call looks like, where that alone tells that no graph can take it: see RefusedCalls in serve/refused.py.
#pragma once

#include "object.h"

namespace gd {

// The look of a call: a tuple that tells calls apart at least as RefusedCalls does, and changes when torch
// comes to know another class. Null if it cannot be told, or with an error.
Ref look_of(PyObject* args, PyObject* kwargs);

// The function ``look_of(args, kwargs)`` of the module.
extern PyMethodDef look_methods[];

}  // namespace gd
