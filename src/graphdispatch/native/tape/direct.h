// Calls of operators by their C++ signatures: the same way through the dispatcher without packing the arguments.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>

namespace graphdispatch {

class DirectCall {
 public:
  virtual ~DirectCall() = default;
  virtual void run() = 0;
};

// A call with these arguments, or null if the operator has none of the signatures known here.
// The dispatcher itself checks the signature against the kernels that are registered.
std::unique_ptr<DirectCall> make_direct_call(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

}  // namespace graphdispatch
