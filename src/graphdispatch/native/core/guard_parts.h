// What a Guard holds. Owned references throughout.
#pragma once

#include <vector>

#include "guard.h"

namespace gd {

using Slots = std::vector<PyObject*>;

// Which slots hold what is expected of something.
struct Range {
  uint32_t first = 0, count = 0;
};

struct Dict {
  PyObject* dict;
  uint64_t version;  // when it last was as expected; 0: not known
};

// What is compared of a dict whose version is another.
struct Bindings {
  Range names;         // names, each followed by its value
  Range absent;        // names that are not there
  Range keys, values;  // all keys and all values, in order
  bool has_keys = false, has_values = false;
};

struct Sequence {
  PyObject* container;
  Range entries;
};

// A reference that an object keeps at one place, whatever happens to it: its class, the dict of its attributes, a slot.
struct Field {
  PyObject* object;
  PyObject** place;
  PyObject* empty;  // what Python reads there where nothing is kept
  PyObject* expected;
};

// What Python has to read: a weak reference, a context variable, or by a call.
enum class Kind { kCall, kReference, kContext };

struct Reader {
  Kind kind;
  PyObject* subject;
  PyObject* expected;
};

struct TensorPlace {
  PyObject *tensor, *kind;  // and its class
  bool is_used;  // else its address does not count
  bool is_loose;  // whether it belongs to no module, so that none says whether it trains
  int32_t dtype;
  uint64_t keys;  // of dispatch, which tell whether its numbers are conjugated or negated
  void* data;
  int64_t dim;
  size_t extents;  // where its shape, and behind it its strides, begin in ``Parts::extents``
};

struct Parts {
  std::vector<Dict> dicts;
  std::vector<Bindings> bindings;  // of each dict
  Slots slots;
  std::vector<Sequence> sequences;
  std::vector<Field> fields;
  std::vector<Reader> readers;
  std::vector<TensorPlace> tensors;
  std::vector<Imprint> imprints;  // of each tensor when it last was as expected
  std::vector<Form> forms;      // one for each tensor, to which that and later ones alike may refer
  std::vector<int64_t> extents;
  Slots hooks;  // tables of hooks by the ids of their handles
};

struct Guard {
  PyObject_HEAD bool is_dead;  // its references were cleared
  bool has_held;               // since it was made
  bool watches;                // all of its dicts
  uint64_t seen_changes;       // to watched dicts, when all of these were as expected; 0: not known
  int trains;                  // whether one of the modules is in training mode; -1: not known
  PyObject* absent;
  PyObject* handles;  // the variables of torch's class of hook handles
  PyObject* latest;   // the id of the next handle when no watched table had new hooks
  Parts parts;
};

extern bool uses_versions;  // whether dicts whose version is as it was are skipped
extern bool uses_changes;   // whether all are skipped while no watched dict is changed
extern PyObject* next_id;   // the name of the number in ``handles``

}  // namespace gd
