// Graphed.__call__ of api/graphed.py.
#pragma once

#include "names.h"

namespace gd {

// The function ``take_calls(cls, compiler)`` of the module.
extern PyMethodDef served_call_methods[];

}  // namespace gd
