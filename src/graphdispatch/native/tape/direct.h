// Calls of operators by their C++ signatures: the same way through the dispatcher without packing the arguments.
//
// Note [a shorter way]
//   A call that writes only to tensors that nothing outside of the program sees may leave out more: finding the
//   dispatch keys of its arguments, asking for a profiler, and counting versions. The dispatcher still looks the kernel
//   up, so that one that is registered later is seen.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>

namespace graphdispatch {

class DirectCall {
 public:
  virtual ~DirectCall() = default;
  // `is_short`: whether nothing on this thread asks for the whole way through the dispatcher.
  virtual void run(bool is_short) = 0;
};

// A call with these arguments, or null if the operator has none of the signatures known here.
// The dispatcher itself checks the signature against the kernels that are registered. `is_hidden`: whether nothing
// outside of the program sees what the call writes.
std::unique_ptr<DirectCall> make_direct_call(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                             bool is_hidden);

}  // namespace graphdispatch
