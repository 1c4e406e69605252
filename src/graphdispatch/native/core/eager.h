// EagerPath.refuse of serve/eager.py, for the usual case; whatever is unusual calls Python.
#pragma once

#include "plan.h"

namespace gd {

// Run a call eagerly of which a standing refusal is known; null with an error.
PyObject* refuse(PyObject* server, PyObject* standing, PyObject* args, PyObject* kwargs);

// The type ``Refused``: what a Standing has to be served by.
bool add_eager(PyObject* module);

}  // namespace gd
