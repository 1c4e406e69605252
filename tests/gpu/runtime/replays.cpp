// What replays do, what waits for what, and how errors are told.
#include <string.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "rules.h"

namespace {

void count(void* counter) { ++*static_cast<std::atomic<int>*>(counter); }

// How many results so far: "1, 2, 3".
std::string list(std::initializer_list<int> numbers) {
  std::string text;
  for (int number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return text;
}

std::string in_order() {
  Rig rig;
  cudaStream_t stream = rig.stream();
  unsigned char *x = rig.device(), *y = rig.device(), *z = rig.device();
  cudaGraphExec_t one = rig.record(stream, [&] { cudaMemsetAsync(x, 1, BYTES, stream); });
  cudaGraphExec_t copy = rig.record(stream, [&] { cudaMemcpyAsync(y, x, BYTES, cudaMemcpyDeviceToDevice, stream); });
  int untouched = byte_at(x);
  cudaMemsetAsync(x, 5, BYTES, stream);
  cudaGraphLaunch(copy, stream);
  cudaMemcpyAsync(z, y, BYTES, cudaMemcpyDeviceToDevice, stream);
  cudaGraphLaunch(one, stream);
  cudaGraphLaunch(copy, stream);
  int last = byte_at(y);
  return list({untouched, byte_at(z), last});
}

std::string two_streams() {
  Rig rig;
  cudaStream_t a = rig.stream(), b = rig.stream();
  cudaEvent_t event = rig.event();
  unsigned char *x = rig.device(MANY), *y = rig.device(MANY);
  cudaGraphExec_t first = rig.record(a, [&] { cudaMemsetAsync(x, 3, MANY, a); });
  cudaGraphExec_t second = rig.record(b, [&] { cudaMemcpyAsync(y, x, MANY, cudaMemcpyDeviceToDevice, b); });
  Gate gate;
  gate.put(a);
  Status launched = cudaGraphLaunch(first, a);
  cudaEventRecord(event, a);
  Status waited = cudaStreamWaitEvent(b, event, 0);
  Status then = cudaGraphLaunch(second, b);
  Status early = cudaStreamQuery(b);
  gate.open();
  return Line() << names({launched, waited, then, early}) << "; " << list({byte_at(y), byte_at(y + MANY - 1)});
}

std::string reads_memory(bool pinned) {
  Rig rig;
  cudaStream_t stream = rig.stream();
  unsigned char *from = pinned ? rig.pinned() : rig.device(), *to = rig.device();
  cudaGraphExec_t exec = rig.record(stream, [&] { cudaMemcpyAsync(to, from, 8, cudaMemcpyDefault, stream); });
  int seen[3];
  for (int i = 0; i < 3; i++) {
    if (pinned)
      memset(from, 10 + i, 8);
    else
      cudaMemset(from, 10 + i, 8);
    cudaDeviceSynchronize();
    cudaGraphLaunch(exec, stream);
    seen[i] = byte_at(to);
  }
  return list({seen[0], seen[1], seen[2]});
}

std::string reads_pageable() {
  Rig rig;
  cudaStream_t stream = rig.stream();
  unsigned char* to = rig.device();
  static unsigned char from[8];
  memset(from, 1, 8);
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  Status error = cudaMemcpyAsync(to, from, 8, cudaMemcpyDefault, stream);
  cudaGraph_t graph = rig.end(stream);
  Line text;
  text << name(error) << ", " << made(graph);
  if (graph == nullptr) return text;
  cudaGraphExec_t exec = rig.instantiate(graph);
  memset(from, 2, 8);
  cudaGraphLaunch(exec, stream);
  int first = byte_at(to);
  memset(from, 3, 8);
  cudaGraphLaunch(exec, stream);
  return text << "; " << list({first, byte_at(to)});
}

std::string host_function() {
  Rig rig;
  cudaStream_t stream = rig.stream();
  std::atomic<int> counter{0};
  cudaGraphExec_t exec = rig.record(stream, [&] { cudaLaunchHostFunc(stream, count, &counter); });
  int captured = counter;
  cudaGraphLaunch(exec, stream);
  cudaStreamSynchronize(stream);
  int once = counter;
  for (int i = 0; i < 3; i++) cudaGraphLaunch(exec, stream);
  cudaStreamSynchronize(stream);
  return list({captured, once, counter});
}

std::string forked_graph() {
  Rig rig;
  cudaStream_t a = rig.stream(), b = rig.stream();
  cudaEvent_t forked = rig.event(), joined = rig.event();
  unsigned char *x = rig.device(MANY), *y = rig.device(MANY), *z = rig.device(MANY);
  cudaGraphExec_t exec = rig.record(a, [&] {
    cudaMemsetAsync(x, 4, MANY, a);
    cudaEventRecord(forked, a);
    cudaStreamWaitEvent(b, forked, 0);
    cudaMemcpyAsync(y, x, MANY, cudaMemcpyDeviceToDevice, b);
    cudaEventRecord(joined, b);
    cudaStreamWaitEvent(a, joined, 0);
    cudaMemcpyAsync(z, y, MANY, cudaMemcpyDeviceToDevice, a);
  });
  cudaGraphLaunch(exec, a);
  cudaStreamSynchronize(a);
  return list({byte_at(y), byte_at(z), byte_at(z + MANY - 1)});
}

std::string graph_in_graph() {
  Rig rig;
  cudaStream_t stream = rig.stream();
  unsigned char* x = rig.device();
  cudaGraphExec_t inner = rig.record(stream, [&] { cudaMemsetAsync(x, 6, BYTES, stream); });
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  Status launched = cudaGraphLaunch(inner, stream);
  cudaGraph_t graph = rig.end(stream);
  Line text;
  text << names({launched, rig.ended}) << ", " << made(graph);
  if (graph == nullptr) return text;
  cudaGraphExec_t outer = rig.instantiate(graph);
  cudaGraphExecDestroy(inner);
  rig.drop(inner);
  int before = byte_at(x);
  cudaGraphLaunch(outer, stream);
  return text << "; " << list({before, byte_at(x)});
}

std::string empty_graph() {
  Rig rig;
  cudaStream_t stream = rig.stream();
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  cudaGraph_t graph = rig.end(stream);
  cudaGraphExec_t exec = nullptr;
  Status instantiated = cudaGraphInstantiateWithFlags(&exec, graph, 0);
  Status launched = cudaGraphLaunch(exec, stream);
  Status done = cudaStreamSynchronize(stream);
  return Line() << made(graph) << "; " << names({instantiated, launched, done, cudaGraphExecDestroy(exec)});
}

std::string nothing_to_do() {
  Rig rig;
  cudaStream_t stream = rig.stream();
  unsigned char *x = rig.device(), *y = rig.device();
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  Status set = cudaMemsetAsync(x, 1, 0, stream);
  Status copied = cudaMemcpyAsync(y, x, 0, cudaMemcpyDeviceToDevice, stream);
  return Line() << names({set, copied}) << "; " << made(rig.end(stream));
}

// The exec outlives its graph, and can be launched from a thread that did not make it.
std::string exec_alone() {
  Rig rig;
  cudaStream_t stream = rig.stream();
  unsigned char* x = rig.device();
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  cudaMemsetAsync(x, 8, BYTES, stream);
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream, &graph);
  cudaGraphExec_t exec = rig.instantiate(graph);
  Status destroyed = cudaGraphDestroy(graph), launched = cudaSuccess;
  on_thread(true, [&] { launched = cudaGraphLaunch(exec, stream); });
  return Line() << names({destroyed, launched}) << "; " << list({byte_at(x)});
}

std::string destroyed_in_flight() {
  Rig rig;
  cudaStream_t stream = rig.stream();
  unsigned char* x = rig.device();
  cudaGraphExec_t exec = rig.record(stream, [&] { cudaMemsetAsync(x, 9, BYTES, stream); });
  Gate gate;
  gate.put(stream);
  cudaGraphLaunch(exec, stream);
  Line text;
  text << waits(gate, [&] { return cudaGraphExecDestroy(exec); });
  rig.drop(exec);
  return text << "; " << list({byte_at(x)});
}

std::string timed_in_graph(unsigned flags) {
  Rig rig;
  cudaStream_t stream = rig.stream();
  cudaEvent_t begin = rig.event(cudaEventDefault), end = rig.event(cudaEventDefault);
  float passed = -1;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  Status first = cudaEventRecordWithFlags(begin, stream, flags);
  cudaLaunchHostFunc(stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }, nullptr);
  Status second = cudaEventRecordWithFlags(end, stream, flags);
  cudaGraph_t graph = rig.end(stream);
  Line text;
  text << names({first, second}) << ", " << made(graph);
  Status before = cudaEventElapsedTime(&passed, begin, end);
  cudaGraphExec_t exec = rig.instantiate(graph);
  cudaGraphLaunch(exec, stream);
  cudaStreamSynchronize(stream);
  text << "; before the replay " << name(before) << ", after it " << name(cudaEventElapsedTime(&passed, begin, end));
  return text << ", " << (passed >= 1 ? "more than 1 ms" : "no time");
}

std::string timed(unsigned flags, bool first, bool second) {
  Rig rig;
  cudaStream_t stream = rig.stream();
  cudaEvent_t begin = rig.event(flags), end = rig.event(flags);
  if (first) cudaEventRecord(begin, stream);
  if (second) cudaEventRecord(end, stream);
  cudaDeviceSynchronize();
  float passed = -1;
  return Line() << name(cudaEventElapsedTime(&passed, begin, end)) << (passed >= 0 ? ", a time" : ", no time");
}

std::string timed_too_early() {
  Rig rig;
  cudaStream_t stream = rig.stream();
  cudaEvent_t begin = rig.event(cudaEventDefault), end = rig.event(cudaEventDefault);
  Gate gate;
  cudaEventRecord(begin, stream);
  gate.put(stream);
  cudaEventRecord(end, stream);
  float passed = -1;
  Status error = cudaEventElapsedTime(&passed, begin, end);
  return Line() << names({error, cudaEventQuery(end), cudaStreamQuery(stream)})
                << (passed >= 0 ? ", a time" : ", no time");
}

struct Scene {
  Rig rig;
  cudaStream_t busy = rig.stream(), other = rig.stream(), blocking = rig.stream(cudaStreamDefault);
  cudaEvent_t event = rig.event();
  unsigned char *x = rig.device(), *y = rig.device(), *pinned = rig.pinned();
  std::vector<unsigned char> pageable = std::vector<unsigned char>(MANY);
  unsigned char* large = rig.device(MANY);
  cudaGraphExec_t exec = rig.record(other, [this] { cudaMemsetAsync(y, 1, BYTES, other); });
  Gate gate;
};

struct Wait {
  const char* name;
  std::function<Status(Scene&)> call;
  bool blocking = false;  // the stream that waits
};

Status legacy_work(Scene& s) {
  cudaMemsetAsync(s.x, 1, 8, nullptr);
  return cudaStreamSynchronize(nullptr);
}

const std::vector<Wait> WAITS = {
    {"cudaMalloc", [](Scene& s) { return s.rig.device(8) ? cudaSuccess : cudaErrorUnknown; }},
    {"cudaFree",
     [](Scene& s) {
       s.rig.drop(s.x);
       return cudaFree(s.x);
     }},
    {"cudaHostAlloc", [](Scene& s) { return s.rig.pinned() ? cudaSuccess : cudaErrorUnknown; }},
    {"cudaFreeHost",
     [](Scene& s) {
       s.rig.drop(s.pinned);
       return cudaFreeHost(s.pinned);
     }},
    {"cudaMemcpy from pageable",
     [](Scene& s) { return cudaMemcpy(s.x, s.pageable.data(), 8, cudaMemcpyHostToDevice); }},
    {"cudaMemcpyAsync from pinned in it",
     [](Scene& s) { return cudaMemcpyAsync(s.x, s.pinned, 8, cudaMemcpyDefault, s.busy); }},
    {"cudaMemcpyAsync from little pageable in it",
     [](Scene& s) { return cudaMemcpyAsync(s.x, s.pageable.data(), 8, cudaMemcpyDefault, s.busy); }},
    {"cudaMemcpyAsync from much pageable in it",
     [](Scene& s) { return cudaMemcpyAsync(s.large, s.pageable.data(), MANY, cudaMemcpyDefault, s.busy); }},
    {"cudaMemcpyAsync to pageable in it",
     [](Scene& s) { return cudaMemcpyAsync(s.pageable.data(), s.x, 8, cudaMemcpyDefault, s.busy); }},
    {"cudaMallocAsync and cudaFreeAsync in another",
     [](Scene& s) {
       void* made = nullptr;
       Status error = cudaMallocAsync(&made, BYTES, s.other);
       return error ? error : cudaFreeAsync(made, s.other);
     }},
    {"cudaMallocAsync and cudaFreeAsync in it",
     [](Scene& s) {
       void* made = nullptr;
       Status error = cudaMallocAsync(&made, BYTES, s.busy);
       return error ? error : cudaFreeAsync(made, s.busy);
     }},
    {"cudaMemGetInfo",
     [](Scene&) {
       size_t left, total;
       return cudaMemGetInfo(&left, &total);
     }},
    {"cudaDeviceSynchronize", [](Scene&) { return cudaDeviceSynchronize(); }},
    {"cudaStreamSynchronize of it", [](Scene& s) { return cudaStreamSynchronize(s.busy); }},
    {"cudaStreamSynchronize of another", [](Scene& s) { return cudaStreamSynchronize(s.other); }},
    {"cudaStreamQuery", [](Scene& s) { return cudaStreamQuery(s.busy); }},
    {"cudaEventQuery", [](Scene& s) { return cudaEventQuery(s.event); }},
    {"cudaEventSynchronize", [](Scene& s) { return cudaEventSynchronize(s.event); }},
    {"cudaEventDestroy",
     [](Scene& s) {
       s.rig.drop(s.event);
       return cudaEventDestroy(s.event);
     }},
    {"cudaStreamCreate", [](Scene& s) { return s.rig.stream() ? cudaSuccess : cudaErrorUnknown; }},
    {"cudaStreamDestroy of it",
     [](Scene& s) {
       s.rig.drop(s.busy);
       return cudaStreamDestroy(s.busy);
     }},
    {"a whole capture with its graph",
     [](Scene& s) {
       return s.rig.record(s.other, [&] { cudaMemsetAsync(s.y, 2, BYTES, s.other); }) ? cudaSuccess : cudaErrorUnknown;
     }},
    {"a launch in it", [](Scene& s) { return cudaGraphLaunch(s.exec, s.busy); }},
    {"a launch in it, then in another, which is synchronized",
     [](Scene& s) {
       cudaGraphLaunch(s.exec, s.busy);
       cudaGraphLaunch(s.exec, s.other);
       return cudaStreamSynchronize(s.other);
     }},
    {"a graph that waits for it by an external event",
     [](Scene& s) {
       auto wait = [&s] { cudaStreamWaitEvent(s.other, s.event, cudaEventWaitExternal); };
       Status launched = cudaGraphLaunch(s.rig.record(s.other, wait), s.other);
       return launched ? launched : cudaStreamSynchronize(s.other);
     }},
    {"cudaGraphExecDestroy of another graph",
     [](Scene& s) {
       s.rig.drop(s.exec);
       return cudaGraphExecDestroy(s.exec);
     }},
    {"work of the legacy stream", legacy_work},
    {"work of the legacy stream", legacy_work, true},
    {"work of a blocking stream behind the legacy stream",
     [](Scene& s) {
       cudaStream_t next = s.rig.stream(cudaStreamDefault);
       cudaMemsetAsync(s.x, 1, 8, nullptr);
       cudaMemsetAsync(s.y, 1, 8, next);
       return cudaStreamSynchronize(next);
     },
     true},
};

}  // namespace

void replays(Cases& cases) {
  cases.insert(
      cases.end(),
      {{"replays are in the order of their stream", in_order},
       {"two graphs on two streams, by an event", two_streams},
       {"a replay copies what device memory holds then", [] { return reads_memory(false); }},
       {"a replay copies what pinned memory holds then", [] { return reads_memory(true); }},
       {"a replay copies what pageable memory holds then", reads_pageable},
       {"a host function runs in each replay", host_function},
       {"a forked graph is in the order of its events", forked_graph},
       {"a launch during a capture", graph_in_graph},
       {"an empty graph", empty_graph},
       {"a capture of nothing to set and nothing to copy", nothing_to_do},
       {"an executable graph without its graph, on another thread", exec_alone},
       {"an executable graph destroyed before its launch runs", destroyed_in_flight},
       {"events recorded in a capture, timed", [] { return timed_in_graph(cudaEventRecordDefault); }},
       {"external events recorded in a capture, timed", [] { return timed_in_graph(cudaEventRecordExternal); }},
       {"events, timed", [] { return timed(cudaEventDefault, true, true); }},
       {"events never recorded, timed", [] { return timed(cudaEventDefault, false, false); }},
       {"an event never recorded, timed from one that was", [] { return timed(cudaEventDefault, true, false); }},
       {"events without timing, timed", [] { return timed(cudaEventDisableTiming, true, true); }},
       {"events that are not done, timed", timed_too_early}});
}

// Each call is made while a stream waits for the host.
void who_waits(Cases& cases) {
  for (const Wait& one : WAITS)
    cases.push_back({std::string("while a ") + (one.blocking ? "blocking " : "") + "stream waits, " + one.name, [one] {
                       Scene scene;
                       cudaStream_t busy = one.blocking ? scene.blocking : scene.busy;
                       scene.gate.put(busy);
                       cudaEventRecord(scene.event, busy);
                       return waits(scene.gate, [&] { return one.call(scene); });
                     }});
}

void errors(Cases& cases) {
  cases.push_back({"the last error", [] {
                     Status call = cudaSetDevice(99);
                     Status peek = cudaPeekAtLastError();
                     int device;
                     Status good = cudaGetDevice(&device);
                     Status kept = cudaGetLastError();
                     return names({call, peek, good, kept, cudaGetLastError()});
                   }});
  cases.push_back({"the last error of another thread", [] {
                     Status there = cudaSuccess;
                     Status call = cudaSetDevice(99);
                     on_thread(true, [&] { there = cudaGetLastError(); });
                     return names({call, there, cudaGetLastError()});
                   }});
  cases.push_back({"the last error of what is not ready", [] {
                     Rig rig;
                     cudaStream_t stream = rig.stream();
                     Gate gate;
                     gate.put(stream);
                     Status query = cudaStreamQuery(stream);
                     return names({query, cudaPeekAtLastError(), cudaGetLastError(), cudaGetLastError()});
                   }});
  cases.push_back({"the last error of an invalid capture", [] {
                     Rig rig;
                     cudaStream_t stream = rig.stream();
                     cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
                     Status query = cudaStreamQuery(stream);
                     Status kept = cudaGetLastError();
                     rig.end(stream);
                     return names({query, kept, rig.ended, cudaGetLastError(), cudaGetLastError()});
                   }});
  cases.push_back({"more memory than there is", [] {
                     void* memory = nullptr;
                     Status error = cudaMalloc(&memory, size_t(1) << 50);
                     return names({error, cudaGetLastError(), cudaGetLastError()});
                   }});
  cases.push_back({"freed twice", [] {
                     void* memory = nullptr;
                     cudaMalloc(&memory, BYTES);
                     Status first = cudaFree(memory);
                     return names({first, cudaFree(memory), cudaGetLastError(), cudaGetLastError()});
                   }});
  for (int code : {0, 1, 2, 100, 101, 400, 401, 600, 700, 710, 719, 900, 901, 902, 903, 904, 905, 906, 907, 908, 999})
    cases.push_back({"error " + std::to_string(code), [code] {
                       auto error = static_cast<Status>(code);
                       return Line() << cudaGetErrorName(error) << ", " << cudaGetErrorString(error);
                     }});
}
