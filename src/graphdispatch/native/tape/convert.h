// Python's arguments of an operator as the dispatcher takes them. For tape.cpp alone: most of the time that the compiler
// takes goes into torch's headers, so there is one file to compile.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>

namespace graphdispatch {
namespace {

using c10::IValue;
using c10::TypeKind;
using c10::TypePtr;

bool convert(PyObject* value, const TypePtr& type, IValue& made);

bool to_integer(PyObject* value, int64_t& made) {
  int overflow = 0;
  made = PyLong_CheckExact(value) ? PyLong_AsLongLongAndOverflow(value, &overflow) : 0;
  return PyLong_CheckExact(value) && !overflow;
}

bool to_scalar(PyObject* value, at::Scalar& made) {
  int64_t integer = 0;
  if (PyBool_Check(value)) {
    made = at::Scalar(value == Py_True);
  } else if (to_integer(value, integer)) {
    made = at::Scalar(integer);
  } else if (PyFloat_CheckExact(value)) {
    made = at::Scalar(PyFloat_AS_DOUBLE(value));
  } else if (PyComplex_CheckExact(value)) {
    const Py_complex parts = PyComplex_AsCComplex(value);
    made = at::Scalar(c10::complex<double>(parts.real, parts.imag));
  } else {
    return false;
  }
  return true;
}

bool to_tensor(PyObject* value, IValue& made) {
  if (value == Py_None) {
    made = IValue(at::Tensor());
    return true;
  }
  if (THPVariable_CheckExact(value)) {
    made = IValue(THPVariable_Unpack(value));
    return true;
  }
  at::Scalar number;
  if (!to_scalar(value, number)) return false;
  at::Tensor tensor = at::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  made = IValue(std::move(tensor));
  return true;
}

// Integers of the schema are also what stands for a dtype, a layout or a memory format.
bool to_enumerated(PyObject* value, IValue& made) {
  int64_t number = 0;
  if (THPDtype_Check(value)) {
    number = static_cast<int64_t>(reinterpret_cast<THPDtype*>(value)->scalar_type);
  } else if (THPLayout_Check(value)) {
    number = static_cast<int64_t>(reinterpret_cast<THPLayout*>(value)->layout);
  } else if (THPMemoryFormat_Check(value)) {
    number = static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(value)->memory_format);
  } else if (!to_integer(value, number)) {
    return false;
  }
  made = IValue(number);
  return true;
}

bool to_list(PyObject* value, const TypePtr& of, IValue& made) {
  if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value) && Py_TYPE(value)->tp_base != &PyTuple_Type) return false;
  const TypePtr element = of->kind() == TypeKind::SymIntType ? TypePtr(c10::IntType::get()) : of;
  c10::impl::GenericList list(element);
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
  list.reserve(size);
  for (Py_ssize_t index = 0; index < size; ++index) {
    IValue item;
    if (!convert(PySequence_Fast_GET_ITEM(value, index), element, item)) return false;
    list.push_back(std::move(item));
  }
  made = IValue(std::move(list));
  return true;
}

bool convert(PyObject* value, const TypePtr& type, IValue& made) {
  switch (type->kind()) {
    case TypeKind::OptionalType:
      if (value != Py_None) return convert(value, type->expectRef<c10::OptionalType>().getElementType(), made);
      made = IValue();
      return true;
    case TypeKind::TensorType:
      return to_tensor(value, made);
    case TypeKind::IntType:
    case TypeKind::SymIntType:
    case TypeKind::ScalarTypeType:
    case TypeKind::LayoutType:
    case TypeKind::MemoryFormatType:
      return to_enumerated(value, made);
    case TypeKind::FloatType:
      made = PyFloat_CheckExact(value) || PyLong_CheckExact(value) ? IValue(PyFloat_AsDouble(value)) : IValue();
      return !made.isNone() && !PyErr_Occurred();
    case TypeKind::BoolType:
      made = IValue(value == Py_True);
      return PyBool_Check(value);
    case TypeKind::NumberType: {
      at::Scalar number;
      if (!to_scalar(value, number)) return false;
      made = IValue(number);
      return true;
    }
    case TypeKind::StringType: {
      const char* text = PyUnicode_CheckExact(value) ? PyUnicode_AsUTF8(value) : nullptr;
      made = text ? IValue(std::string(text)) : IValue();
      return text != nullptr;
    }
    case TypeKind::DeviceObjType:
      if (!THPDevice_Check(value)) return false;
      made = IValue(reinterpret_cast<THPDevice*>(value)->device);
      return true;
    case TypeKind::ListType:
      return to_list(value, type->expectRef<c10::ListType>().getElementType(), made);
    default:
      return false;
  }
}

bool is_plain(const TypePtr& type) {
  switch (type->kind()) {
    case TypeKind::OptionalType:
      return is_plain(type->expectRef<c10::OptionalType>().getElementType());
    case TypeKind::ListType:
      return is_plain(type->expectRef<c10::ListType>().getElementType());
    case TypeKind::TensorType:
    case TypeKind::IntType:
    case TypeKind::SymIntType:
    case TypeKind::FloatType:
    case TypeKind::BoolType:
    case TypeKind::NumberType:
      return true;
    default:
      return false;
  }
}

// Appends the operator's arguments to `stack`, in the order of its schema, with the defaults of those not given.
// False if one of them is left to Python: a subclass of Tensor, a number beyond 64 bits, an object not known here.
// Takes values exactly as torch's own conversion does (torch/csrc/jit/python/pybind_utils.cpp), and no others.
bool convert_arguments(const c10::FunctionSchema& schema, PyObject* args, PyObject* kwargs, torch::jit::Stack& stack) {
  const auto& formals = schema.arguments();
  const size_t positional = PyTuple_GET_SIZE(args);
  Py_ssize_t named = 0;
  for (size_t index = 0; index < formals.size(); ++index) {
    const c10::Argument& formal = formals[index];
    PyObject* value = index < positional ? PyTuple_GET_ITEM(args, index) : nullptr;
    if (!value && (value = PyDict_GetItemString(kwargs, formal.name().c_str()))) ++named;
    IValue made;
    if (value) {
      if (!convert(value, formal.real_type(), made)) {
        PyErr_Clear();
        return false;
      }
    } else if (formal.default_value()) {
      made = *formal.default_value();
    } else {
      return false;
    }
    stack.push_back(std::move(made));
  }
  return positional <= formals.size() && named == PyDict_Size(kwargs);
}

// Whether all results of the operator are tensors, lists of tensors, or plain values, so that the tape can find them.
bool has_plain_results(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    if (!is_plain(result.real_type())) return false;
  }
  return true;
}

}  // namespace
}  // namespace graphdispatch
