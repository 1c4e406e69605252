// How captures begin, spread and end.
#include "rules.h"

namespace {

void put(cudaStream_t stream) {
  cudaLaunchHostFunc(stream, [](void*) {}, nullptr);
}

Status begin(cudaStream_t stream, Mode mode = cudaStreamCaptureModeThreadLocal) {
  return cudaStreamBeginCapture(stream, mode);
}

// One stream waits for all that is in another one so far.
Status join(Rig& rig, cudaStream_t waiting, cudaStream_t stream) {
  cudaEvent_t event = rig.event();
  Status recorded = cudaEventRecord(event, stream);
  return recorded ? recorded : cudaStreamWaitEvent(waiting, event, 0);
}

std::string ends(Rig& rig, cudaStream_t stream) {
  cudaGraph_t graph = rig.end(stream);
  return Line() << name(rig.ended) << ", " << made(graph);
}

// A call that may spoil the capture of one stream: its error, then what becomes of the capture.
std::string spoils(Rig& rig, cudaStream_t captured, Status error) {
  Line text;
  text << name(error) << "; capture " << status(captured);
  return text << "; end " << ends(rig, captured);
}

std::string end_on_another_thread(Mode mode) {
  Rig rig;
  cudaStream_t stream = rig.stream();
  begin(stream, mode);
  put(stream);
  Line text;
  on_thread(true, [&] { text << ends(rig, stream); });
  text << "; capture " << status(stream);
  return text << "; end here " << ends(rig, stream) << "; again " << rig.captures_again(stream, mode);
}

std::string nested(Mode outer, Mode inner, bool other) {
  Rig rig;
  cudaStream_t first = rig.stream(), second = rig.stream();
  begin(first, outer);
  put(first);
  Line text;
  on_thread(other, [&] {
    text << name(begin(second, inner));
    put(second);
    text << ", " << ends(rig, second);
  });
  return text << "; outer " << status(first) << ", " << ends(rig, first);
}

struct Two {
  Rig rig;
  cudaStream_t a = rig.stream(), b = rig.stream();
  cudaEvent_t event = rig.event();
};

const Cases ENDS = {
    {"end without begin",
     [] {
       Rig rig;
       cudaStream_t stream = rig.stream();
       Line text;
       text << ends(rig, stream);
       return text << "; last error " << name(cudaGetLastError()) << "; again "
                   << rig.captures_again(stream, cudaStreamCaptureModeGlobal);
     }},
    {"end of the legacy stream without begin",
     [] {
       Rig rig;
       return ends(rig, nullptr);
     }},
    {"begin behind work that waits",
     [] {
       Rig rig;
       cudaStream_t stream = rig.stream();
       Gate gate;
       gate.put(stream);
       return rig.captures_again(stream, cudaStreamCaptureModeGlobal);
     }},
    {"end of an empty capture",
     [] {
       Rig rig;
       cudaStream_t stream = rig.stream();
       begin(stream);
       return ends(rig, stream);
     }},
    {"work in an invalid capture",
     [] {
       Rig rig;
       cudaStream_t stream = rig.stream();
       cudaEvent_t event = rig.event();
       unsigned char* memory = rig.device();
       begin(stream);
       cudaStreamQuery(stream);
       return Line() << names({cudaMemsetAsync(memory, 1, 8, stream),
                               cudaLaunchHostFunc(
                                   stream, [](void*) {}, nullptr),
                               cudaEventRecord(event, stream), cudaStreamWaitEvent(stream, event, 0),
                               cudaStreamQuery(stream), cudaStreamSynchronize(stream), begin(stream)})
                     << "; end " << ends(rig, stream);
     }},
    {"cudaStreamDestroy of the captured stream",
     [] {
       Rig rig;
       cudaStream_t stream = rig.stream();
       begin(stream, cudaStreamCaptureModeGlobal);
       put(stream);
       Status error = cudaStreamDestroy(stream);
       if (error) return Line() << spoils(rig, stream, error);
       rig.drop(stream);
       void* memory = nullptr;
       Status after = cudaMalloc(&memory, BYTES);
       cudaFree(memory);
       return Line() << name(error) << "; cudaMalloc " << name(after);
     }},
    {"what a capture tells of itself",
     [] {
       Rig rig;
       cudaStream_t first = rig.stream(), second = rig.stream();
       unsigned long long one = 0, same = 0, next = 0;
       cudaStreamCaptureStatus found;
       auto ask = [&](cudaStream_t stream, unsigned long long* id) {
         return cudaStreamGetCaptureInfo(stream, &found, id, nullptr, nullptr, nullptr, nullptr);
       };
       begin(first);
       put(first);
       join(rig, second, first);
       Line text;
       text << names({ask(first, &one), ask(second, &same)});
       text << ", a fork has " << (one == same ? "the same" : "another") << " id";
       join(rig, first, second);
       rig.end(first);
       begin(first);
       ask(first, &next);
       return text << ", the next capture has " << (one == next ? "the same" : "another") << " one";
     }},
    {"how many dependencies a capture tells of",
     [] {
       Rig rig;
       cudaStream_t first = rig.stream(), second = rig.stream();
       auto ask = [](cudaStream_t stream) {
         cudaStreamCaptureStatus found = cudaStreamCaptureStatusNone;
         size_t count = 0;
         const cudaGraphNode_t* nodes;
         const cudaGraphEdgeData* edges;
         cudaGraph_t graph = nullptr;
         unsigned long long id;
         cudaStreamGetCaptureInfo(stream, &found, &id, &graph, &nodes, &edges, &count);
         return Line() << std::to_string(count) << " of " << made(graph) << ", ";
       };
       begin(first);
       Line text;
       text << ask(first);
       put(first);
       text << ask(first);
       join(rig, second, first);
       put(second);
       put(first);
       join(rig, first, second);
       return text << ask(first) << ask(second) << "end " << ends(rig, first);
     }},
};

const std::vector<std::pair<const char*, std::function<std::string(Two&)>>> FORKS = {
    {"a fork that is joined",
     [](Two& t) {
       begin(t.a);
       put(t.a);
       Line text;
       text << name(join(t.rig, t.b, t.a)) << ", capture " << status(t.b);
       put(t.b);
       text << "; " << name(join(t.rig, t.a, t.b)) << "; end " << ends(t.rig, t.a);
       return text << "; capture " << status(t.b);
     }},
    {"a fork that is not joined",
     [](Two& t) {
       begin(t.a);
       put(t.a);
       join(t.rig, t.b, t.a);
       put(t.b);
       Line text;
       text << "end " << ends(t.rig, t.a) << "; captures " << status(t.a) << " and " << status(t.b);
       return text << "; again " << t.rig.captures_again(t.a, cudaStreamCaptureModeGlobal);
     }},
    {"a fork that is not joined and has no work",
     [](Two& t) {
       begin(t.a);
       put(t.a);
       join(t.rig, t.b, t.a);
       return Line() << "end " << ends(t.rig, t.a) << "; captures " << status(t.a) << " and " << status(t.b);
     }},
    {"a fork from nothing that is not joined and has no work",
     [](Two& t) {
       begin(t.a);
       join(t.rig, t.b, t.a);
       return Line() << "end " << ends(t.rig, t.a) << "; captures " << status(t.a) << " and " << status(t.b);
     }},
    {"a fork that goes on after it was joined",
     [](Two& t) {
       begin(t.a);
       join(t.rig, t.b, t.a);
       put(t.b);
       join(t.rig, t.a, t.b);
       put(t.b);
       return Line() << "end " << ends(t.rig, t.a);
     }},
    {"an end on the fork",
     [](Two& t) {
       begin(t.a);
       put(t.a);
       join(t.rig, t.b, t.a);
       put(t.b);
       join(t.rig, t.a, t.b);
       Line text;
       text << ends(t.rig, t.b) << "; captures " << status(t.a) << " and " << status(t.b);
       return text << "; end " << ends(t.rig, t.a) << "; capture " << status(t.b);
     }},
    {"a begin on the fork",
     [](Two& t) {
       begin(t.a);
       put(t.a);
       join(t.rig, t.b, t.a);
       Line text;
       text << name(begin(t.b));
       join(t.rig, t.a, t.b);
       return text << "; capture " << status(t.a) << "; end " << ends(t.rig, t.a);
     }},
    {"a fork of a stream that captures another graph",
     [](Two& t) {
       begin(t.a);
       begin(t.b);
       put(t.a);
       put(t.b);
       Line text;
       text << name(join(t.rig, t.b, t.a)) << "; captures " << status(t.a) << " and " << status(t.b);
       text << "; end " << ends(t.rig, t.a);
       return text << " and " << ends(t.rig, t.b);
     }},
    {"a synchronized fork",
     [](Two& t) {
       begin(t.a);
       put(t.a);
       join(t.rig, t.b, t.a);
       return spoils(t.rig, t.a, cudaStreamSynchronize(t.b));
     }},
    {"a destroyed fork",
     [](Two& t) {
       begin(t.a);
       put(t.a);
       join(t.rig, t.b, t.a);
       join(t.rig, t.a, t.b);
       Status error = cudaStreamDestroy(t.b);
       if (error == cudaSuccess) t.rig.drop(t.b);
       return spoils(t.rig, t.a, error);
     }},
    {"a fork by another thread",
     [](Two& t) {
       begin(t.a, cudaStreamCaptureModeGlobal);
       put(t.a);
       cudaEventRecord(t.event, t.a);
       Status error = cudaSuccess;
       on_thread(true, [&] {
         error = cudaStreamWaitEvent(t.b, t.event, 0);
         put(t.b);
       });
       join(t.rig, t.a, t.b);
       return spoils(t.rig, t.a, error);
     }},
    {"a capture that waits for an event from outside",
     [](Two& t) {
       put(t.b);
       cudaEventRecord(t.event, t.b);
       cudaDeviceSynchronize();
       begin(t.a);
       put(t.a);
       return spoils(t.rig, t.a, cudaStreamWaitEvent(t.a, t.event, 0));
     }},
    {"a capture that waits for an event from outside that is not done",
     [](Two& t) {
       Gate gate;
       gate.put(t.b);
       cudaEventRecord(t.event, t.b);
       begin(t.a);
       put(t.a);
       return spoils(t.rig, t.a, cudaStreamWaitEvent(t.a, t.event, 0));
     }},
    {"a capture that waits for an event never recorded",
     [](Two& t) {
       begin(t.a);
       put(t.a);
       return spoils(t.rig, t.a, cudaStreamWaitEvent(t.a, t.event, 0));
     }},
    {"a capture that waits for its own stream's event from before",
     [](Two& t) {
       put(t.a);
       cudaEventRecord(t.event, t.a);
       begin(t.a);
       put(t.a);
       return spoils(t.rig, t.a, cudaStreamWaitEvent(t.a, t.event, 0));
     }},
    {"a capture that waits for an external event from outside",
     [](Two& t) {
       put(t.b);
       cudaEventRecord(t.event, t.b);
       begin(t.a);
       put(t.a);
       return spoils(t.rig, t.a, cudaStreamWaitEvent(t.a, t.event, cudaEventWaitExternal));
     }},
    {"an external record and an external wait outside of a capture",
     [](Two& t) {
       return names({cudaEventRecordWithFlags(t.event, t.a, cudaEventRecordExternal), cudaEventRecord(t.event, t.a),
                     cudaStreamWaitEvent(t.b, t.event, cudaEventWaitExternal)});
     }},
    {"a stream that waits for the event of a capture that ended",
     [](Two& t) {
       begin(t.a);
       put(t.a);
       cudaEventRecord(t.event, t.a);
       t.rig.end(t.a);
       Line text;
       text << name(cudaStreamWaitEvent(t.b, t.event, 0)) << ", capture " << status(t.b);
       return text << "; query " << name(cudaEventQuery(t.event)) << "; synchronize "
                   << name(cudaEventSynchronize(t.event));
     }},
    {"a capture that waits for the event of a capture that ended",
     [](Two& t) {
       begin(t.a);
       put(t.a);
       cudaEventRecord(t.event, t.a);
       t.rig.end(t.a);
       begin(t.b);
       put(t.b);
       return spoils(t.rig, t.b, cudaStreamWaitEvent(t.b, t.event, 0));
     }},
    {"a stream that waits for the event of an invalid capture",
     [](Two& t) {
       begin(t.a);
       put(t.a);
       cudaEventRecord(t.event, t.a);
       cudaStreamQuery(t.a);
       Line text;
       text << name(cudaStreamWaitEvent(t.b, t.event, 0)) << ", capture " << status(t.b);
       return text << "; end " << ends(t.rig, t.a);
     }},
    {"an event of a capture, recorded again outside",
     [](Two& t) {
       begin(t.a, cudaStreamCaptureModeRelaxed);
       put(t.a);
       cudaEventRecord(t.event, t.a);
       Status error = cudaEventRecord(t.event, t.b);
       Line text;
       text << names({error, cudaEventSynchronize(t.event), cudaEventQuery(t.event)});
       return text << "; " << spoils(t.rig, t.a, error);
     }},
    {"an event destroyed behind the fork",
     [](Two& t) {
       begin(t.a);
       put(t.a);
       cudaEvent_t event = t.rig.event();
       cudaEventRecord(event, t.a);
       Status waited = cudaStreamWaitEvent(t.b, event, 0);
       Status error = cudaEventDestroy(event);
       t.rig.drop(event);
       put(t.b);
       join(t.rig, t.a, t.b);
       return Line() << name(waited) << ", " << spoils(t.rig, t.a, error);
     }},
};

}  // namespace

void begin_and_end(Cases& cases) {
  for (const Named& mode : MODES) {
    Mode m = mode.mode;
    cases.push_back({std::string("end on another thread, ") + mode.name, [=] { return end_on_another_thread(m); }});
    cases.push_back({std::string("begin twice, ") + mode.name, [=] {
                       Rig rig;
                       cudaStream_t stream = rig.stream();
                       begin(stream, m);
                       put(stream);
                       return spoils(rig, stream, begin(stream, m));
                     }});
    cases.push_back({std::string("begin on the legacy stream, ") + mode.name,
                     [=] { return Line() << name(begin(nullptr, m)) << "; capture " << status(nullptr); }});
    for (const Named& inner : MODES)
      for (bool other : {false, true})
        cases.push_back({std::string("a ") + inner.name + " capture inside a " + mode.name + " one" +
                             (other ? ", by another thread" : ""),
                         [=] { return nested(m, inner.mode, other); }});
  }
  cases.insert(cases.end(), ENDS.begin(), ENDS.end());
}

void forks_and_events(Cases& cases) {
  for (const auto& [name, run] : FORKS)
    cases.push_back({name, [run = run] {
                       Two two;
                       return run(two);
                     }});
}
