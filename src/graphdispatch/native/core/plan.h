// ReplayPlan.run of runtime/replay.py, for the usual case; whatever is unusual calls Python.
#pragma once

#include <vector>

#include "ambient.h"
#include "output_copies.h"
#include "slot.h"

namespace gd {

// The values of a call: borrowed from the caller's arguments, and a list of them where Python is called.
class Values {
 public:
  Values(PyObject* const* items, Py_ssize_t count) : items_(items), count_(count) {}
  explicit Values(Ref list)
      : items_(PySequence_Fast_ITEMS(list.get())), count_(PyList_GET_SIZE(list.get())), list_(std::move(list)) {}
  PyObject* operator[](Py_ssize_t place) const { return items_[place]; }
  PyObject* const* items() const { return items_; }
  Py_ssize_t count() const { return count_; }
  PyObject* list();  // borrowed; null with an error

 private:
  PyObject* const* items_;
  Py_ssize_t count_;
  Ref list_;
};

// One input of the graph: where its rows go, if they may be copied as bytes.
struct Copy {
  Py_ssize_t position;
  int64_t kind, numel;
  uint64_t keys;  // the dispatch keys of a dense tensor there
  size_t nbytes;
  void* data;
  Look seen;  // of the latest source that could be
};

class CopyKernel;

// What a hit adds to one of the counters that facts.counted_by_hits names.
struct Amount {
  Py_ssize_t counter;
  int64_t more;
};

struct PlanObject {
  PyObject_HEAD PyObject* plan;  // the ReplayPlan that owns this one, borrowed: both end with its last reference
  PyObject *entry, *pool, *inputs, *rows_object;
  PyObject *acquire, *release, *backend;
  PyObject* watch;   // the thread-local that says how many blocks the thread is in where nothing may replay
  PyObject* ident;   // threading.get_ident() of the thread that replayed last; null before
  unsigned long thread;       // its number
  Local of_watch, of_server;  // what that thread-local holds, and the server's with its latest decision
  bool reads_watch;           // whether it says, too, whether the thread is recorded; else the backend is called
  bool is_inline;             // whether replays run at once, so that none has to be ordered after another
  bool uses_rng, is_mutated, has_written, has_device;  // of the entry, which never changes them
  PyObject* targets;       // for each dtype a list of tensors and their places; null until the first run, and where Python loads
  PyObject* parts;         // the outputs as they lie in the graph's memory, where callers get clones; else null
  PyObject* is_own;        // of each, whether it is the graph's memory; a caller gets another one as it is
  PyObject* watched;       // the places of arguments that may share memory with what the graph writes
  bool knows_graph;        // whether the core can tell what replay() does of a graph of the class met last
  unsigned graph_version;  // of that class, as in Slot
  int64_t rows, size;
  int64_t cells;  // by which statistics count the batch
  bool is_prepared, is_tuple, follows_data, copies_bytes;
  std::vector<Copy>* copies;
  CopyKernel* kernel;  // null where torch copies what the core does not
  std::vector<Amount>* amounts;
  std::vector<OutputCopies>* output_copies;  // of each output
};

extern PyTypeObject* plan_type;

// The bytes of a tensor that a copy may read; null if torch has to copy it.
void* bytes_of(Copy& copy, PyObject* tensor);

// Whether nothing stands against a hit but the guard and gradients: 1, 0, or -1 with an error. ``per_call`` is what the
// hit must look at in each call, or None.
int may_run(PlanObject* plan, Values& values, PyObject* per_call);

// The outputs; null with an error.
PyObject* run(PlanObject* plan, Values& values, PyObject* stats);

// Whether a method of an object's class has the mark ``done_by_core``, and no override: then the core does its usual
// case itself. -1 with an error.
int is_done_by_core(PyObject* object, PyObject* method);

// The function ``run_method(cls, facts)`` of the module.
extern PyMethodDef plan_methods[];

bool add_plan(PyObject* module);

}  // namespace gd
