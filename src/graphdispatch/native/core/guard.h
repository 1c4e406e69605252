// The native half of a StateGuard: one pass over everything that it compares.
//
// A Guard is a fast positive check. If it says yes, StateGuard.holds() is true. If it says no, Python's comparison
// decides, and makes a new Guard if it says yes. So it may be stricter than Python, and never laxer.
#pragma once

#include "tensor.h"

namespace gd {

// Add the class Guard and its switches to the module. False with a Python error.
bool add_guard(PyObject* module);

bool is_guard(PyObject* object);

// Whether a Guard holds. Wants the GIL and a reference to the guard; leaves no Python error. Only a reader of
// the guard may run Python code.
bool guard_holds(PyObject* guard);

// Whether a call may have to be differentiated by a Guard that has just been found to hold: 1 or 0; -1 says that only
// StateGuard.trainable can tell. Whether tensors require gradients is read anew.
int guard_trainable(PyObject* guard);

}  // namespace gd
