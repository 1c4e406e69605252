// What CUDA's driver would be to the kernels that copy the inputs and outputs of a hit: their launches and their context.
#include "../emulator/kernels.h"
#include "runtime.h"

#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

API int queued_context(void** current) {
  static const std::thread::id first = std::this_thread::get_id();  // another thread has none
  *current = first == std::this_thread::get_id() ? const_cast<std::thread::id*>(&first) : nullptr;
  return 0;
}
API int queued_launch(void*, unsigned columns, unsigned rows, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                      void* stream, void** parameters, void**) {
  CopiedInputs inputs = *static_cast<CopiedInputs*>(parameters[0]);  // they are the caller's again after the launch
  for (unsigned i = 0; i < rows; ++i) {
    CopiedInput& input = inputs.each[i];
    if (!input.all) continue;
    input.source = queued::bytes_of(const_cast<void*>(input.source));
    input.target = queued::bytes_of(input.target);
  }
  if (inputs.wanted) inputs.wanted = reinterpret_cast<Place*>(queued::bytes_of(inputs.wanted));
  const int before = queued::exchange_stream(int(reinterpret_cast<intptr_t>(stream)));
  int refused = 0;
  try {
    queued::submit([=](const queued::Draws&) { run(copy_inputs, inputs, columns, rows, threads); });
  } catch (const std::runtime_error&) {
    refused = 1;
  }
  queued::exchange_stream(before);
  return refused;
}
API void queued_give(void* at, unsigned columns, unsigned rows) {
  queued::submit([=](const queued::Draws&) {
    Place places[2 * kMostOutputs];
    memcpy(places, queued::bytes_of(at), sizeof places);
    for (Place& place : places) {
      if (place.bytes) place.address = queued::bytes_of(place.address);
    }
    run(give_outputs, static_cast<const Place*>(places), columns, rows, 256);
  });
}
