// What the cases share: named results, objects that are cleaned up after a case, and a piece of work that waits.
#pragma once
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

using Status = cudaError_t;
using Mode = cudaStreamCaptureMode;
constexpr size_t BYTES = 4096, MANY = 4 << 20;

struct Named {
  Mode mode;
  const char* name;
};
constexpr Named MODES[] = {{cudaStreamCaptureModeGlobal, "global"},
                           {cudaStreamCaptureModeThreadLocal, "thread_local"},
                           {cudaStreamCaptureModeRelaxed, "relaxed"}};

// A case is a name and what says what happened.
struct Case {
  std::string name;
  std::function<std::string()> run;
};
using Cases = std::vector<Case>;
void forbidden_calls(Cases& cases);
void legacy_stream(Cases& cases);
void begin_and_end(Cases& cases);
void forks_and_events(Cases& cases);
void replays(Cases& cases);
void who_waits(Cases& cases);
void errors(Cases& cases);

// What happened, piece by piece. Unlike those of +, the operands of << are evaluated from left to right.
class Line {
 public:
  Line& operator<<(const std::string& more) {
    text_ += more;
    return *this;
  }
  operator std::string() const { return text_; }

 private:
  std::string text_;
};

// The name of an error; that of what the stream's capture is at; "a graph of so many nodes".
std::string name(Status error);
std::string status(cudaStream_t stream);
std::string made(cudaGraph_t graph);
// The names of several errors, in order.
std::string names(std::initializer_list<Status> errors);
// Do it on this thread, or on another one that is gone afterwards.
void on_thread(bool other, const std::function<void()>& work);

// Streams, events, memory and graphs of one case. Each stream is non-blocking, as torch's are, unless told otherwise.
class Rig {
 public:
  ~Rig();
  cudaStream_t stream(unsigned flags = cudaStreamNonBlocking);
  cudaEvent_t event(unsigned flags = cudaEventDisableTiming);
  unsigned char* device(size_t bytes = BYTES);
  unsigned char* pinned(size_t bytes = BYTES);
  // Ends the capture; the graph, or null, lives as long as the rig. The error of the end stays in `ended`.
  cudaGraph_t end(cudaStream_t stream);
  cudaGraphExec_t instantiate(cudaGraph_t graph);
  // What `work` puts into `stream`, as an executable graph.
  cudaGraphExec_t record(cudaStream_t stream, const std::function<void()>& work);
  // Begins, records a node, ends: what came of it.
  std::string captures_again(cudaStream_t stream, Mode mode);
  void drop(cudaStream_t stream);
  void drop(cudaEvent_t event);
  void drop(cudaGraphExec_t exec);
  void drop(void* memory);
  Status ended = cudaSuccess;

 private:
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
  std::vector<void*> device_, pinned_;
  std::vector<cudaGraph_t> graphs_;
  std::vector<cudaGraphExec_t> execs_;
};

// A host function in a stream that does not return before the gate is open. It opens at the end of its scope.
class Gate {
 public:
  ~Gate();
  void put(cudaStream_t stream);
  void open();

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_open = false;
  };
  static void wait(void* state);
  State* state_ = new State();  // never freed: the stream may still be about to look at it
};

// Whether a call returns while a gate is closed: it has a second. The gate is open afterwards.
std::string waits(Gate& gate, const std::function<Status()>& call);
// The byte there, once the device is idle.
int byte_at(const void* memory);
