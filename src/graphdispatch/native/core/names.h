// What the hit path reads of the package: interned names, and the objects that it hands over once.
#pragma once

#include "object.h"

namespace gd {

// Names of attributes and methods that the core reads or calls.
// clang-format off
#define GD_NAMES(NAME) \
  NAME(acquire) NAME(release) NAME(state) NAME(graph) NAME(replay) NAME(written) \
  NAME(replay_count) NAME(verify_at) NAME(last_used) \
  NAME(fits_modes) NAME(holds) NAME(clash) NAME(run_in_python) \
  NAME(failed) NAME(copy_back) NAME(replaying_on) NAME(order_after_last_use) NAME(is_capturing) NAME(depth) \
  NAME(layout_for) NAME(load) NAME(pad) NAME(_clean_from) NAME(copy_) NAME(clone) NAME(hits) NAME(real_rows) \
  NAME(_rows_of_hits) NAME(open) NAME(forms) NAME(order) NAME(call) \
  NAME(flatten) NAME(signature) NAME(native) NAME(match) NAME(step) NAME(stats) NAME(local) NAME(decision) \
  NAME(observes) NAME(observed) NAME(may_need_gradients) NAME(replay_failed) NAME(trainable) NAME(__dict__) \
  NAME(_current_level) NAME(lock) NAME(pool) NAME(backend) NAME(watch) NAME(low) NAME(high) \
  NAME(spans) NAME(_is_done_by_core) NAME(tape) \
  NAME(_pool) NAME(generation) NAME(serve) NAME(_server) NAME(_route) NAME(__call__) \
  NAME(__getattribute__) NAME(is_flat) NAME(serve_in_range) NAME(serve_in_python) NAME(stay_eager) NAME(serve_unmatched) \
  NAME(copy_kernel) NAME(take) \
  NAME(device) NAME(paddings_on) NAME(_last_raw) NAME(outlet) NAME(addresses) NAME(wanted)
// clang-format on

struct Names {
#define GD_DECLARE(name) PyObject* name;
  GD_NAMES(GD_DECLARE)
#undef GD_DECLARE
};

// The keys of the dicts that runtime/replay.py and runtime/server.py give.
// clang-format off
#define GD_FACTS(FACT) \
  FACT(evicted) FACT(failed_state) FACT(windows) FACT(uses) FACT(foreach_copy) \
  FACT(counted_by_hits) FACT(forward_ad) FACT(replay_error)
// clang-format on

struct Facts {
#define GD_DECLARE(name) PyObject* name;
  GD_FACTS(GD_DECLARE)
#undef GD_DECLARE
};

extern Names names;
extern Facts facts;

bool make_names();

// The method of a definition, from (class, facts): the facts are kept. Null with an error.
PyObject* method_with_facts(PyObject* args, PyMethodDef* definition);

}  // namespace gd
