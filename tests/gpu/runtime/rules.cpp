// What CUDA's runtime does about capture, replay, events and errors: one line for each case, the same on each card. The
// program runs on a real runtime, or on an emulated one that is loaded before it.
//
// The cases run in a child process, which makes CUDA's context. Should a case end the child, the next child goes on
// behind it. The parent never touches CUDA, so it may fork.
#include "rules.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <future>

constexpr int SECONDS = 10;  // for one case
constexpr int UNHEALTHY = 3;

std::string name(Status error) { return cudaGetErrorName(error); }

std::string names(std::initializer_list<Status> errors) {
  std::string text;
  for (Status error : errors) text += (text.empty() ? "" : ", ") + name(error);
  return text;
}

std::string status(cudaStream_t stream) {
  cudaStreamCaptureStatus found = cudaStreamCaptureStatusNone;
  if (Status error = cudaStreamIsCapturing(stream, &found)) return name(error);
  return found == cudaStreamCaptureStatusNone     ? "none"
         : found == cudaStreamCaptureStatusActive ? "active"
                                                  : "invalidated";
}

std::string made(cudaGraph_t graph) {
  size_t count = 0;
  if (graph == nullptr) return "no graph";
  if (Status error = cudaGraphGetNodes(graph, nullptr, &count)) return name(error);
  return "a graph of " + std::to_string(count);
}

void on_thread(bool other, const std::function<void()>& work) {
  if (other)
    std::thread(work).join();
  else
    work();
}

int byte_at(const void* memory) {
  unsigned char byte = 0;
  cudaDeviceSynchronize();
  return cudaMemcpy(&byte, memory, 1, cudaMemcpyDefault) == cudaSuccess ? byte : -1;
}

Rig::~Rig() {
  for (cudaStream_t stream : streams_) {
    cudaStreamCaptureStatus found = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(stream, &found);
    if (found != cudaStreamCaptureStatusNone) end(stream);
  }
  cudaDeviceSynchronize();
  for (cudaGraphExec_t exec : execs_) cudaGraphExecDestroy(exec);
  for (cudaGraph_t graph : graphs_) cudaGraphDestroy(graph);
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
  for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  for (void* memory : device_) cudaFree(memory);
  for (void* memory : pinned_) cudaFreeHost(memory);
}

cudaStream_t Rig::stream(unsigned flags) {
  cudaStream_t made = nullptr;
  if (cudaStreamCreateWithFlags(&made, flags) == cudaSuccess) streams_.push_back(made);
  return made;
}

cudaEvent_t Rig::event(unsigned flags) {
  cudaEvent_t made = nullptr;
  if (cudaEventCreateWithFlags(&made, flags) == cudaSuccess) events_.push_back(made);
  return made;
}

unsigned char* Rig::device(size_t bytes) {
  void* made = nullptr;
  if (cudaMalloc(&made, bytes) != cudaSuccess) return nullptr;
  device_.push_back(made);
  return static_cast<unsigned char*>(made);
}

unsigned char* Rig::pinned(size_t bytes) {
  void* made = nullptr;
  if (cudaHostAlloc(&made, bytes, cudaHostAllocDefault) != cudaSuccess) return nullptr;
  pinned_.push_back(made);
  return static_cast<unsigned char*>(made);
}

cudaGraph_t Rig::end(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  ended = cudaStreamEndCapture(stream, &graph);
  if (graph != nullptr) graphs_.push_back(graph);
  return graph;
}

cudaGraphExec_t Rig::instantiate(cudaGraph_t graph) {
  cudaGraphExec_t exec = nullptr;
  if (cudaGraphInstantiateWithFlags(&exec, graph, 0) == cudaSuccess) execs_.push_back(exec);
  return exec;
}

cudaGraphExec_t Rig::record(cudaStream_t stream, const std::function<void()>& work) {
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  work();
  return instantiate(end(stream));
}

std::string Rig::captures_again(cudaStream_t stream, Mode mode) {
  Status begun = cudaStreamBeginCapture(stream, mode);
  if (begun) return name(begun);
  Status put = cudaLaunchHostFunc(stream, [](void*) {}, nullptr);
  cudaGraph_t graph = end(stream);
  return put ? name(put) : ended ? name(ended) : made(graph);
}

template <class T>
static void erase(std::vector<T>& from, T what) {
  for (size_t i = 0; i < from.size(); i++)
    if (from[i] == what) from.erase(from.begin() + i--);
}
void Rig::drop(cudaStream_t stream) { erase(streams_, stream); }
void Rig::drop(cudaEvent_t event) { erase(events_, event); }
void Rig::drop(cudaGraphExec_t exec) { erase(execs_, exec); }
void Rig::drop(void* memory) {
  erase(device_, memory);
  erase(pinned_, memory);
}

void Gate::wait(void* state) {
  auto* gate = static_cast<State*>(state);
  std::unique_lock<std::mutex> lock(gate->mutex);
  gate->changed.wait(lock, [gate] { return gate->is_open; });
}

void Gate::put(cudaStream_t stream) { cudaLaunchHostFunc(stream, wait, state_); }

void Gate::open() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->is_open = true;
  state_->changed.notify_all();
}

Gate::~Gate() { open(); }

std::string waits(Gate& gate, const std::function<Status()>& call) {
  std::future<Status> result = std::async(std::launch::async, call);
  bool at_once = result.wait_for(std::chrono::seconds(1)) == std::future_status::ready;
  gate.open();
  return (at_once ? "returns at once, " : "waits, ") + name(result.get());
}

// What is wrong with the device after a case, or nothing.
static std::string harm() {
  cudaGetLastError();
  void* memory = nullptr;
  for (Status error : {cudaDeviceSynchronize(), cudaMalloc(&memory, BYTES), cudaFree(memory), cudaGetLastError()})
    if (error) return name(error);
  return "";
}

// Who prints the rules: a comment before the first of them.
static void print_header() {
  cudaDeviceProp card;
  int driver = 0, runtime = 0;
  if (Status error = cudaGetDeviceProperties(&card, 0))
    printf("# no device: %s\n", name(error).c_str());
  else if (cudaDriverGetVersion(&driver) == cudaSuccess && cudaRuntimeGetVersion(&runtime) == cudaSuccess)
    printf("# %s, driver for CUDA %d.%d, runtime %d.%d\n", card.name, driver / 1000, driver % 1000 / 10, runtime / 1000,
           runtime % 1000 / 10);
  fflush(stdout);
}

static int run_from(const Cases& cases, size_t first, volatile size_t* at) {
  if (first == 0) print_header();
  for (size_t i = first; i < cases.size(); i++) {
    *at = i;
    alarm(SECONDS);
    printf("%s: %s\n", cases[i].name.c_str(), cases[i].run().c_str());
    fflush(stdout);
    std::string after = harm();
    if (!after.empty()) {
      printf("%s: left %s behind\n", cases[i].name.c_str(), after.c_str());
      fflush(stdout);
      _exit(UNHEALTHY);
    }
  }
  _exit(0);
}

// `rules`: all cases. `rules TEXT`: those with that text in their names.
int main(int count, char** arguments) {
  Cases all, cases;
  for (auto add : {forbidden_calls, legacy_stream, begin_and_end, forks_and_events, replays, who_waits, errors})
    add(all);
  for (const Case& one : all)
    if (count < 2 || one.name.find(arguments[1]) != std::string::npos) cases.push_back(one);
  auto* at = static_cast<volatile size_t*>(
      mmap(nullptr, sizeof(size_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  for (size_t first = 0; first < cases.size(); first = *at + 1) {
    *at = first;
    pid_t child = fork();
    if (child == 0) run_from(cases, first, at);
    int result = 0;
    waitpid(child, &result, 0);
    if (WIFEXITED(result) && WEXITSTATUS(result) == 0) return 0;
    if (WIFSIGNALED(result) && WTERMSIG(result) == SIGALRM)
      printf("%s: did not end in %d seconds\n", cases[*at].name.c_str(), SECONDS);
    else if (WIFSIGNALED(result))
      printf("%s: ended the process, %s\n", cases[*at].name.c_str(), strsignal(WTERMSIG(result)));
    else if (WEXITSTATUS(result) != UNHEALTHY)
      printf("%s: ended the process, %d\n", cases[*at].name.c_str(), WEXITSTATUS(result));
    fflush(stdout);
  }
  return 0;
}
