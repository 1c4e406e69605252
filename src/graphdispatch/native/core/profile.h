// Which events of a traced run Python is told of.
#pragma once

#include "object.h"

namespace gd {

// Add the class Profiler to the module; false with an error.
bool add_profiler(PyObject* module);

}  // namespace gd
