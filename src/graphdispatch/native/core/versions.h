// What CPython tells of changes to a dict: a number that is another after each change of its bindings.
//
// CPython 3.11 to 3.13 keep one for every dict, 3.14 has none. From 3.12 on it tells of each change to a dict that is
// watched. Python tests both on live dicts before they are used (see native/bound.py), since some versions forget them
// where attributes of objects are stored.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace gd {

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000
constexpr bool kHasVersions = true;

inline uint64_t version_of(PyObject* dict) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
}
#else
constexpr bool kHasVersions = false;

inline uint64_t version_of(PyObject*) { return 0; }
#endif

extern uint64_t changes;  // to watched dicts, as far as CPython reports them

// Have the changes of a dict counted from now on, for good. False where that is not known to work.
bool watch(PyObject* dict);

}  // namespace gd
