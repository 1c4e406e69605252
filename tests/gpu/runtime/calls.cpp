// Calls during a capture: on the thread that captures and on another one, in each mode.
#include <stdlib.h>

#include "rules.h"

namespace {

// What the calls use. All of it exists before the capture begins.
struct Scene {
  Rig rig;
  cudaStream_t capturing = rig.stream(), other = rig.stream(), idle = rig.stream();
  cudaEvent_t captured = rig.event(), outside = rig.event(), fresh = rig.event();
  cudaEvent_t begin = rig.event(cudaEventDefault), end = rig.event(cudaEventDefault);
  unsigned char *device = rig.device(), *second = rig.device(), *pinned = rig.pinned();
  unsigned char* pageable = static_cast<unsigned char*>(aligned_alloc(BYTES, BYTES));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  std::function<void()> undo = [] {};

  Scene() {
    cudaStreamBeginCapture(other, cudaStreamCaptureModeThreadLocal);
    cudaMemsetAsync(second, 7, BYTES, other);
    graph = rig.end(other);
    exec = rig.instantiate(graph);
    for (cudaEvent_t event : {outside, begin, end}) cudaEventRecord(event, other);
    cudaDeviceSynchronize();
  }
  ~Scene() { free(pageable); }
};

struct Call {
  const char* name;
  std::function<Status(Scene&)> run;
};

const std::vector<Call> MEMORY = {
    {"cudaMalloc",
     [](Scene& s) {
       void* made = nullptr;
       Status error = cudaMalloc(&made, BYTES);
       s.undo = [made] { cudaFree(made); };
       return error;
     }},
    {"cudaFree",
     [](Scene& s) {
       Status error = cudaFree(s.second);
       if (error == cudaSuccess) s.rig.drop(s.second);
       return error;
     }},
    {"cudaFree of null", [](Scene&) { return cudaFree(nullptr); }},
    {"cudaHostAlloc",
     [](Scene& s) {
       void* made = nullptr;
       Status error = cudaHostAlloc(&made, BYTES, cudaHostAllocDefault);
       s.undo = [made] { cudaFreeHost(made); };
       return error;
     }},
    {"cudaFreeHost",
     [](Scene& s) {
       Status error = cudaFreeHost(s.pinned);
       if (error == cudaSuccess) s.rig.drop(s.pinned);
       return error;
     }},
    {"cudaHostRegister",
     [](Scene& s) {
       Status error = cudaHostRegister(s.pageable, BYTES, cudaHostRegisterDefault);
       if (error == cudaSuccess) s.undo = [&s] { cudaHostUnregister(s.pageable); };
       return error;
     }},
    {"cudaMallocAsync in the captured stream",
     [](Scene& s) {
       void* made = nullptr;
       Status error = cudaMallocAsync(&made, BYTES, s.capturing);
       return error ? error : cudaFreeAsync(made, s.capturing);
     }},
    {"cudaMallocAsync in another stream",
     [](Scene& s) {
       void* made = nullptr;
       Status error = cudaMallocAsync(&made, BYTES, s.other);
       return error ? error : cudaFreeAsync(made, s.other);
     }},
    {"cudaMemGetInfo",
     [](Scene&) {
       size_t left, total;
       return cudaMemGetInfo(&left, &total);
     }},
    {"cudaPointerGetAttributes",
     [](Scene& s) {
       cudaPointerAttributes found;
       return cudaPointerGetAttributes(&found, s.device);
     }},
    {"cudaMemcpy from pageable", [](Scene& s) { return cudaMemcpy(s.second, s.pageable, 8, cudaMemcpyHostToDevice); }},
    {"cudaMemcpy from pinned", [](Scene& s) { return cudaMemcpy(s.second, s.pinned, 8, cudaMemcpyHostToDevice); }},
    {"cudaMemcpy to pageable", [](Scene& s) { return cudaMemcpy(s.pageable, s.second, 8, cudaMemcpyDeviceToHost); }},
    {"cudaMemcpy on the device", [](Scene& s) { return cudaMemcpy(s.second, s.device, 8, cudaMemcpyDeviceToDevice); }},
    {"cudaMemset", [](Scene& s) { return cudaMemset(s.second, 1, BYTES); }},
    {"cudaMemcpyAsync from pageable in the captured stream",
     [](Scene& s) { return cudaMemcpyAsync(s.second, s.pageable, 8, cudaMemcpyHostToDevice, s.capturing); }},
    {"cudaMemcpyAsync to pageable in the captured stream",
     [](Scene& s) { return cudaMemcpyAsync(s.pageable, s.second, 8, cudaMemcpyDeviceToHost, s.capturing); }},
    {"cudaMemcpyAsync from pinned in the captured stream",
     [](Scene& s) { return cudaMemcpyAsync(s.second, s.pinned, 8, cudaMemcpyHostToDevice, s.capturing); }},
    {"cudaMemcpyAsync from pageable in another stream",
     [](Scene& s) { return cudaMemcpyAsync(s.second, s.pageable, 8, cudaMemcpyHostToDevice, s.other); }},
    {"cudaMemsetAsync in the captured stream",
     [](Scene& s) { return cudaMemsetAsync(s.second, 1, BYTES, s.capturing); }},
    {"cudaMemsetAsync in another stream", [](Scene& s) { return cudaMemsetAsync(s.second, 1, BYTES, s.other); }},
    {"cudaMemsetAsync in the legacy stream", [](Scene& s) { return cudaMemsetAsync(s.second, 1, BYTES, nullptr); }},
};

const std::vector<Call> STREAMS = {
    {"cudaDeviceSynchronize", [](Scene&) { return cudaDeviceSynchronize(); }},
    {"cudaStreamSynchronize of the captured stream", [](Scene& s) { return cudaStreamSynchronize(s.capturing); }},
    {"cudaStreamSynchronize of another stream", [](Scene& s) { return cudaStreamSynchronize(s.other); }},
    {"cudaStreamSynchronize of the legacy stream", [](Scene&) { return cudaStreamSynchronize(nullptr); }},
    {"cudaStreamQuery of the captured stream", [](Scene& s) { return cudaStreamQuery(s.capturing); }},
    {"cudaStreamQuery of another stream", [](Scene& s) { return cudaStreamQuery(s.other); }},
    {"cudaStreamQuery of the legacy stream", [](Scene&) { return cudaStreamQuery(nullptr); }},
    {"cudaStreamIsCapturing of the legacy stream",
     [](Scene&) {
       cudaStreamCaptureStatus found;
       return cudaStreamIsCapturing(nullptr, &found);
     }},
    {"cudaStreamCreate", [](Scene& s) { return s.rig.stream() ? cudaPeekAtLastError() : cudaErrorUnknown; }},
    {"cudaStreamDestroy of another stream",
     [](Scene& s) {
       Status error = cudaStreamDestroy(s.idle);
       if (error == cudaSuccess) s.rig.drop(s.idle);
       return error;
     }},
    {"cudaLaunchHostFunc in the captured stream",
     [](Scene& s) { return cudaLaunchHostFunc(s.capturing, [](void*) {}, nullptr); }},
    {"cudaStreamAddCallback in the captured stream",
     [](Scene& s) { return cudaStreamAddCallback(s.capturing, [](cudaStream_t, Status, void*) {}, nullptr, 0); }},
    {"cudaEventCreate",
     [](Scene& s) {
       cudaEvent_t made = nullptr;
       Status error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
       if (error == cudaSuccess) s.undo = [made] { cudaEventDestroy(made); };
       return error;
     }},
    {"cudaEventDestroy of the captured event",
     [](Scene& s) {
       Status error = cudaEventDestroy(s.captured);
       if (error == cudaSuccess) s.rig.drop(s.captured);
       return error;
     }},
    {"cudaEventRecord in the captured stream", [](Scene& s) { return cudaEventRecord(s.fresh, s.capturing); }},
    {"cudaEventRecord in another stream", [](Scene& s) { return cudaEventRecord(s.fresh, s.other); }},
    {"cudaEventQuery of the captured event", [](Scene& s) { return cudaEventQuery(s.captured); }},
    {"cudaEventQuery of an event from outside", [](Scene& s) { return cudaEventQuery(s.outside); }},
    {"cudaEventQuery of an event never recorded", [](Scene& s) { return cudaEventQuery(s.fresh); }},
    {"cudaEventSynchronize of the captured event", [](Scene& s) { return cudaEventSynchronize(s.captured); }},
    {"cudaEventSynchronize of an event from outside", [](Scene& s) { return cudaEventSynchronize(s.outside); }},
    {"cudaEventSynchronize of an event never recorded", [](Scene& s) { return cudaEventSynchronize(s.fresh); }},
    {"cudaEventElapsedTime of events from outside",
     [](Scene& s) {
       float passed;
       return cudaEventElapsedTime(&passed, s.begin, s.end);
     }},
    {"cudaGraphInstantiate of another graph",
     [](Scene& s) { return s.rig.instantiate(s.graph) ? cudaSuccess : cudaPeekAtLastError(); }},
    {"cudaGraphLaunch in another stream", [](Scene& s) { return cudaGraphLaunch(s.exec, s.other); }},
    {"cudaGraphLaunch in the captured stream", [](Scene& s) { return cudaGraphLaunch(s.exec, s.capturing); }},
    {"cudaGraphExecDestroy of another graph",
     [](Scene& s) {
       Status error = cudaGraphExecDestroy(s.exec);
       if (error == cudaSuccess) s.rig.drop(s.exec);
       return error;
     }},
};

std::string during(Mode mode, const Call& call, bool other) {
  Scene scene;
  cudaStreamBeginCapture(scene.capturing, mode);
  cudaMemsetAsync(scene.device, 1, BYTES, scene.capturing);
  cudaEventRecord(scene.captured, scene.capturing);
  Status error, last, then;
  on_thread(other, [&] {
    error = call.run(scene);
    last = cudaGetLastError();
    then = cudaGetLastError();
  });
  Line text;
  text << name(error) << (last == error ? "" : ", last error " + name(last));
  if (then) text << ", last error stays " << name(then);
  text << "; capture " << status(scene.capturing);
  cudaGraph_t graph = scene.rig.end(scene.capturing);
  text << "; end " << name(scene.rig.ended) << ", " << made(graph);
  cudaGetLastError();
  text << "; again " << scene.rig.captures_again(scene.capturing, mode);
  scene.undo();
  return text;
}

// cudaMalloc by a thread in one mode, during a capture in another mode.
std::string exchanged(Mode captured, Mode thread, bool other) {
  Scene scene;
  cudaStreamBeginCapture(scene.capturing, captured);
  Status error;
  Mode before = thread, after = thread;
  on_thread(other, [&] {
    cudaThreadExchangeStreamCaptureMode(&before);
    error = MEMORY[0].run(scene);
    Mode mine = before;
    cudaThreadExchangeStreamCaptureMode(&mine);
    after = mine;
  });
  Line text;
  text << name(error) << "; capture " << status(scene.capturing);
  scene.rig.end(scene.capturing);
  scene.undo();
  text << "; end " << name(scene.rig.ended) << "; the mode was " << MODES[before].name << " and then "
       << MODES[after].name;
  return text;
}

}  // namespace

void forbidden_calls(Cases& cases) {
  for (const auto* calls : {&MEMORY, &STREAMS})
    for (const Call& call : *calls)
      for (bool other : {false, true})
        for (const Named& mode : MODES)
          cases.push_back({std::string(call.name) + (other ? " by another thread, " : ", ") + mode.name + " capture",
                           [=] { return during(mode.mode, call, other); }});
  for (bool other : {false, true})
    for (const Named& mode : MODES)
      for (const Named& thread : MODES)
        cases.push_back({std::string("cudaMalloc in a ") + thread.name + " thread" +
                             (other ? " beside" : " that made") + " a " + mode.name + " capture",
                         [=] { return exchanged(mode.mode, thread.mode, other); }});
}

// The same for a stream that the legacy stream waits for.
void legacy_stream(Cases& cases) {
  static const std::vector<Call> calls = {
      {"cudaStreamIsCapturing",
       [](Scene&) {
         cudaStreamCaptureStatus found;
         return cudaStreamIsCapturing(nullptr, &found);
       }},
      {"cudaStreamGetCaptureInfo",
       [](Scene&) {
         cudaStreamCaptureStatus found;
         return cudaStreamGetCaptureInfo(nullptr, &found, nullptr, nullptr, nullptr, nullptr, nullptr);
       }},
      {"cudaMemsetAsync", [](Scene& s) { return cudaMemsetAsync(s.second, 1, BYTES, nullptr); }},
      {"cudaMemcpy", [](Scene& s) { return cudaMemcpy(s.second, s.pageable, 8, cudaMemcpyHostToDevice); }},
      {"cudaStreamQuery", [](Scene&) { return cudaStreamQuery(nullptr); }},
      {"cudaStreamSynchronize", [](Scene&) { return cudaStreamSynchronize(nullptr); }},
      {"cudaEventRecord", [](Scene& s) { return cudaEventRecord(s.fresh, nullptr); }},
      {"cudaStreamWaitEvent", [](Scene& s) { return cudaStreamWaitEvent(nullptr, s.outside, 0); }},
      {"cudaGraphLaunch", [](Scene& s) { return cudaGraphLaunch(s.exec, nullptr); }},
  };
  for (const Call& call : calls)
    for (bool other : {false, true})
      for (const Named& mode : MODES)
        cases.push_back({std::string(call.name) + " of the legacy stream" + (other ? " by another thread, " : ", ") +
                             mode.name + " capture of a blocking stream",
                         [=] {
                           Scene scene;
                           cudaStream_t blocking = scene.rig.stream(cudaStreamDefault);
                           cudaStreamBeginCapture(blocking, mode.mode);
                           cudaMemsetAsync(scene.device, 1, BYTES, blocking);
                           Status error, last;
                           on_thread(other, [&] {
                             error = call.run(scene);
                             last = cudaGetLastError();
                           });
                           Line text;
                           text << name(error) << (last == error ? "" : ", last error " + name(last));
                           text << "; capture " << status(blocking);
                           cudaGraph_t graph = scene.rig.end(blocking);
                           return text << "; end " << name(scene.rig.ended) << ", " << made(graph);
                         }});
}
