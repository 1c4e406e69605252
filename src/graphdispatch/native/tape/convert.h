// Python's arguments of an operator as the dispatcher takes them.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <Python.h>

namespace graphdispatch {

// Appends the operator's arguments to `stack`, in the order of its schema, with the defaults of those not given.
// False if one of them is left to Python: a subclass of Tensor, a number beyond 64 bits, an object not known here.
// Takes values exactly as torch's own conversion does (torch/csrc/jit/python/pybind_utils.cpp), and no others.
bool convert_arguments(const c10::FunctionSchema& schema, PyObject* args, PyObject* kwargs, torch::jit::Stack& stack);

// Whether all results of the operator are tensors, lists of tensors, or plain values, so that the tape can find them.
bool has_plain_results(const c10::FunctionSchema& schema);

}  // namespace graphdispatch
