// HitPath.serve of serve/hit.py.
#pragma once

#include "plan.h"
#include "signature.h"

namespace gd {

// The function ``serve_method(cls, facts)`` of the module.
extern PyMethodDef hit_methods[];

}  // namespace gd
