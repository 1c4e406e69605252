// The operators of the device: each runs the CPU's kernel on the same bytes, later, on the stream's thread.
//
// Note [how an operator becomes work]
//   Shapes and types come from torch's meta device, which also says at once what is wrong with the arguments. The outputs
//   are allocated, and the CPU's kernel is submitted with CPU tensors over the device's bytes. These own nothing: memory
//   that is released too early is read as somebody else's. Where the meta device cannot tell the shape, or the result
//   is no tensor, the host has to see values: it waits for the stream, which no capture can hold.
#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/as_strided_native.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include "device.h"

namespace queued {
namespace {

using torch::jit::Stack;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().is_privateuseone(); }

// A CPU tensor over the same bytes, which owns nothing.
at::Tensor host(const at::Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  char* base = static_cast<char*>(tensor.storage().mutable_data());
  if (!base) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(bytes_of(base) + tensor.storage_offset() * tensor.itemsize(), tensor.sizes(), tensor.strides(), options);
}

// A copy of a tensor of the host that stands for the same number in what its types promote to.
at::Tensor kept(const at::Tensor& tensor) {
  auto copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

at::Tensor for_kernel(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return is_here(tensor) ? host(tensor) : kept(tensor);
}

at::Tensor for_shapes(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!is_here(tensor) && !tensor.dim()) return kept(tensor);
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

at::Tensor new_like(const at::Tensor& meta) {
  return at::detail::empty_strided_generic(meta.sizes(), meta.strides(), allocator(), KEYS, meta.scalar_type());
}

// A view of ``base``, with the geometry that ``meta`` has relative to it.
at::Tensor view_like(const at::Tensor& base, const at::Tensor& meta) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set(), meta.dtype());
  auto offset = base.storage_offset() * int64_t(base.itemsize()) / int64_t(meta.itemsize()) + meta.storage_offset();
  made.unsafeGetTensorImpl()->set_storage_offset(offset);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
  return made;
}

// The value with each of its tensors changed.
template <class Change>
c10::IValue changed(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec())
      list.push_back(tensor ? std::make_optional(change(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

Stack arguments_on(const Stack& arguments, c10::Device device, at::Tensor (*change)(const at::Tensor&)) {
  Stack made;
  for (const auto& argument : arguments)
    made.push_back(argument.isDevice() ? c10::IValue(device) : changed(argument, change));
  return made;
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }
bool is_view(const c10::Argument& result) { return result.alias_info() && !result.alias_info()->isWrite(); }

void resize(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes, strides);
  auto bytes = at::detail::computeStorageNbytes(sizes, strides, tensor.itemsize(), tensor.storage_offset());
  if (impl->numel() && bytes > tensor.storage().nbytes()) resize_storage(tensor.storage().unsafeGetStorageImpl(), bytes);
}

// The operator's kernel with numbers of a generator of the CPU: the same numbers from the same place.
void call(const c10::OperatorHandle& op, Stack& stack, int generator, const Draws& from) {
  c10::InferenceMode inference;
  if (generator >= 0) stack[generator] = at::make_generator<at::CPUGeneratorImpl>(from.seed + 0x9E3779B97F4A7C15 * (from.offset + 1));
  op.callBoxed(stack);
}

// While it lives, a profiler of Python sees nothing: some kernels of the meta device are written in Python, and a device's
// kernels are not.
struct Unprofiled {
  PyGILState_STATE lock = PyGILState_Ensure();
  PyThreadState* thread = PyThreadState_Get();
  Py_tracefunc function = thread->c_profilefunc;
  PyObject* object = thread->c_profileobj;
  Unprofiled() {
    Py_XINCREF(object);
    if (function) PyEval_SetProfile(nullptr, nullptr);
  }
  ~Unprofiled() {
    if (function) PyEval_SetProfile(function, object);
    Py_XDECREF(object);
    PyGILState_Release(lock);
  }
};

// Shapes and types of the results, and what is wrong with the arguments; false if only the values can tell.
bool rehearse(const c10::OperatorHandle& op, Stack& stack) {
  Unprofiled unseen;
  try {
    c10::InferenceMode inference;
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    return false;
  } catch (const std::exception& error) {
    // The meta kernels that are written in Python say so in their own words.
    std::string text = error.what();
    if (text.find("NotImplementedError") == text.npos && text.find("unimplemented") == text.npos) throw;
    return false;
  }
  return true;
}

// Wait, and compute on the host.
void compute_now(const c10::OperatorHandle& op, Stack& kernel, Stack* stack) {
  refuse_in_capture(op.schema().name().c_str());
  synchronize_stream(current_stream());
  call(op, kernel, -1, {});
  for (auto& value : kernel)
    stack->push_back(changed(value, [](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      auto made = new_like(tensor);
      if (tensor.numel()) host(made).copy_(tensor);
      return made;
    }));
}

// Refuse tensors of the host beside the device's, as devices do: but numbers, and what an index may be made of.
void refuse_two_devices(const c10::OperatorHandle& op, const Stack& arguments) {
  if (op.schema().name().find("index") != std::string::npos) return;
  for (const auto& argument : arguments)
    changed(argument, [](const at::Tensor& tensor) {
      TORCH_CHECK(!tensor.defined() || !tensor.is_cpu() || !tensor.dim(),
                  "Expected all tensors to be on the same device, but found at least two devices, queued:0 and cpu!");
      return tensor;
    });
}

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  Stack arguments(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());

  refuse_two_devices(op, arguments);
  std::vector<at::Tensor> written;
  int generator = -1;
  bool draws = false;
  for (size_t i = 0; i < count; i++) {
    const auto& argument = schema.arguments()[i];
    if (is_written(argument) && arguments[i].isTensor()) written.push_back(arguments[i].toTensor());
    if (is_written(argument) && arguments[i].isTensorList())
      for (const at::Tensor& tensor : arguments[i].toTensorVector()) written.push_back(tensor);
    if (argument.name() == "generator") generator = int(i), draws = true;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(draws || !op.hasTag(at::Tag::nondeterministic_seeded), "the test device does not draw by ",
                              schema.name());
  bool drawn_here = draws && arguments[generator].isGenerator();
  auto given = drawn_here ? std::make_optional(arguments[generator].toGenerator()) : std::nullopt;
  if (draws) arguments[generator] = c10::IValue();

  Stack shapes = arguments_on(arguments, at::kMeta, for_shapes);
  bool is_known = rehearse(op, shapes), gives_tensors = true, only_writes = true;
  for (size_t i = 0; i < schema.returns().size(); i++) {
    gives_tensors &= is_known && (shapes[i].isTensor() || shapes[i].isTensorList());
    only_writes &= is_written(schema.returns()[i]);
  }
  Stack kernel = arguments_on(arguments, at::kCPU, for_kernel);
  if (!only_writes && !gives_tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(!draws, "the test device does not draw by ", schema.name());
    return compute_now(op, kernel, stack);
  }
  if (!schema.returns().empty() && is_view(schema.returns()[0])) {
    auto base = arguments[0].toTensor();
    for (auto& value : shapes) stack->push_back(changed(value, [&](const at::Tensor& meta) { return view_like(base, meta); }));
    return;
  }
  std::vector<at::Tensor> targets;  // what the results are copied to
  size_t next = 0;
  Stack results;
  for (size_t i = 0; i < schema.returns().size(); i++) {
    if (!is_written(schema.returns()[i])) {
      results.push_back(changed(shapes[i], [&](const at::Tensor& meta) {
        if (!meta.defined()) return targets.emplace_back();
        auto made = new_like(meta);
        targets.push_back(host(made));
        return made;
      }));
      continue;
    }
    auto& tensor = written.at(next++);
    if (is_known && shapes[i].isTensor() && shapes[i].toTensor().sizes() != tensor.sizes())
      resize(tensor, shapes[i].toTensor().sizes(), shapes[i].toTensor().strides());
    results.push_back(tensor);
  }
  if (next) kernel = arguments_on(arguments, at::kCPU, for_kernel);  // after all have their size
  auto work = [op, kernel, targets, generator, draws, only_writes](const Draws& from) {
    Stack values = kernel;
    call(op, values, draws ? generator : -1, from);
    size_t at = 0;
    c10::InferenceMode inference;
    if (!only_writes)
      for (size_t i = 0; i < values.size(); i++)
        if (!is_written(op.schema().returns()[i]))
          changed(values[i], [&](const at::Tensor& value) {
            auto target = targets[at++];
            // The CPU leaves out what it does not need, as the saved mean of a batch norm that learns nothing.
            if (target.defined() && target.numel() && value.numel()) target.copy_(value);
            return value;
          });
  };
  draws ? submit_drawing(given, work) : submit(work);
  for (auto& value : results) stack->push_back(value);
}

// ---- what has no kernel of the CPU's, or another meaning

at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, allocator(), KEYS, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
  auto place = offset ? std::make_optional(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), place);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::assert_no_internal_overlap(to);
  if (!to.numel()) return to;
  auto source = is_here(from) ? host(from) : from.detach(), target = is_here(to) ? host(to) : to.detach();
  bool crosses = is_here(from) != is_here(to), is_pinned = true;
  if (crosses) {
    const auto& other = is_here(from) ? to : from;
    is_pinned = queued::is_pinned(other.const_data_ptr());
    TORCH_CHECK(is_pinned || !capture_of(current_stream()),
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.");
    if (is_pinned)
      pinned_used_on(const_cast<void*>(other.const_data_ptr()), current_stream());
    else if (is_here(to))
      source = source.clone();  // it may change as soon as the call is back
  }
  submit([source, target](const Draws&) {
    c10::InferenceMode inference;
    const_cast<at::Tensor&>(target).copy_(source);
  });
  if (crosses && !(non_blocking && is_pinned) && !(is_here(to) && !is_pinned)) synchronize_stream(current_stream());
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  synchronize_stream(current_stream());
  return host(tensor).item();
}

const at::Tensor& resize_tensor(const at::Tensor& tensor, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  auto shape = at::empty(sizes, at::TensorOptions().device(at::kMeta).dtype(tensor.scalar_type()).memory_format(format));
  resize(tensor, shape.sizes(), shape.strides());
  return tensor;
}

void place(const at::Tensor& tensor, const c10::Storage& storage, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
}

at::Tensor& set_storage_part(at::Tensor& tensor, c10::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                             c10::IntArrayRef strides) {
  auto shape = strides.empty() && !sizes.empty() ? at::empty(sizes, at::kMeta) : at::empty_strided(sizes, strides, at::kMeta);
  place(tensor, storage, offset, sizes, shape.strides());
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, c10::Storage storage) {
  auto rows = int64_t(storage.nbytes() / tensor.itemsize());
  place(tensor, storage, 0, {rows}, {1});
  return tensor;
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  place(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  return tensor;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  allocator()->recordStream(tensor.storage().data_ptr(), stream);
}

// What torch calls for the convolutions of devices that it does not know.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  auto shaped = [&](auto change) {
    auto added = bias && bias->defined() ? std::make_optional(change(*bias)) : std::nullopt;
    return [x = change(input), w = change(weight), added, stride = stride.vec(), padding = padding.vec(),
            dilation = dilation.vec(), output_padding = output_padding.vec(), transposed, groups] {
      c10::InferenceMode inference;
      return at::convolution(x, w, added, stride, padding, dilation, transposed, output_padding, groups);
    };
  };
  auto made = new_like(shaped(for_shapes)());
  submit([target = host(made), run = shaped(host)](const Draws&) {
    c10::InferenceMode inference;
    const_cast<at::Tensor&>(target).copy_(run());
  });
  return made;
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0 : 1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_tensor);
  m.impl("set_.source_Storage_storage_offset", set_storage_part);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("native_dropout", native_dropout);
}

}  // namespace
}  // namespace queued

// ---- what Python asks for, by ctypes

#define API extern "C" __attribute__((visibility("default")))

API bool queued_seed(uint64_t seed, uint64_t offset) {
  if (queued::capture_of(queued::current_stream())) return false;
  auto random = queued::default_generator();
  random.set_current_seed(seed);
  random.set_offset(offset);
  return true;
}
API uint64_t queued_seed_now() { return queued::default_generator().current_seed(); }
API uint64_t queued_offset_now() { return queued::default_generator().get_offset(); }
API void queued_fail_after(int fault, long calls) { queued::fail_after(queued::Fault(fault), calls); }
API void queued_lose() { queued::lose_device("unspecified launch failure (injected)"); }
API void queued_recover() { queued::recover_device(); }
API void queued_delay(uint64_t seed, int most) { queued::set_delays(seed, most); }
API void queued_hold() { queued::hold(); }
API void queued_let_go() { queued::let_go(); }
API void queued_limit(size_t bytes) { queued::limit_memory(bytes); }
// Fills ``numbers`` with three numbers for each pool that has memory, the pool's two and its bytes; at most so many pools.
API size_t queued_pools(uint64_t* numbers, size_t most) {
  size_t count = 0;
  for (auto& [pool, bytes] : queued::memory_use().pools) {
    if (count == most) break;
    uint64_t* at = numbers + 3 * count++;
    at[0] = pool.first, at[1] = pool.second, at[2] = bytes;
  }
  return count;
}
