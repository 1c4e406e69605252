// The device as torch sees it: what the operators (operators.cpp) need of its registration (device.cpp).
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "runtime.h"

namespace queued {

c10::DeviceAllocator* allocator();
const at::Generator& default_generator();

// Submit work that draws random numbers of ``generator``, or of the default one.
void submit_drawing(const std::optional<at::Generator>& generator, Work work);

// Give a storage room for so many bytes, and keep what it holds.
void resize_storage(c10::StorageImpl* storage, size_t bytes);

}  // namespace queued
