// What copies the inputs of a hit by one kernel of the backend, which also notes where the graph is to put its outputs.
#pragma once

#include "../../backends/copies.cu"
#include "plan.h"

namespace gd {

// The first kernel of copies.cu for one plan, which holds its pool's lock in each call.
class CopyKernel {
 public:
  // Take the kernel of the plan's backend, if it has one and that can pad all inputs; false with an error.
  static bool take(PlanObject* plan);

  // Copy and pad all inputs, on the pool's stream: 1, 0 where torch has to do it, -1 with an error. Rows from
  // ``clean_from`` on hold padding.
  int load(PlanObject* plan, const Values& values, int64_t clean_from);

  // The tensor that the graph fills with an output: a new reference; null where torch has to clone it.
  PyObject* output(Py_ssize_t i) { return i < kMostOutputs ? outputs_[i].release() : nullptr; }

  // Drop such tensors. Those that are still noted on the device, where a later replay may find them, are kept for ever.
  void forget_outputs(bool are_noted);

 private:
  bool take_addresses(PyObject* kernel);
  bool take_inputs(PlanObject* plan, PyObject* paddings);
  bool take_outlet(PlanObject* plan);
  bool make_outputs(PlanObject* plan);

  int (*launch_)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream,
                 void** parameters, void** extra);
  int (*current_)(void** context);
  void *function_, *context_;
  CopiedInputs inputs_{};
  size_t rows_[kMostInputs];    // of each input, bytes of a row of padding; 0: none is put there
  Place* wanted_ = nullptr;     // of the graph; null where it puts no outputs anywhere
  Ref outputs_[kMostOutputs];   // of the replay under way
};

}  // namespace gd
