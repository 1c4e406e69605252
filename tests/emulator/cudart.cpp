// A CUDA runtime without a GPU, for the tests of the CUDA backend: device memory is host memory, each stream is a thread,
// capture, replay, events and their errors follow the rules of CUDA's runtime API (its reference is the source). torch's
// own code above it (allocator, graphs, random generators, streams) is the real one. Kernels have no code here but for
// random numbers: emulated_cuda.py computes what operators would. It shows order, lifetime and errors, and no speed.
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#undef cudaStreamGetCaptureInfo
#undef cudaGetDeviceProperties
#define API extern "C" __attribute__((visibility("default")))
using Status = cudaError_t;
using Fn = std::function<void()>;
static double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
static int env(const char* n, int d) {
  const char* v = getenv(n);
  return v ? atoi(v) : d;
}
// Each piece of work begins up to so many microseconds late: to find what is in order by luck.
static int DELAY = env("EMULATOR_DELAY_US", 0);
static size_t TOTAL = (size_t)env("EMULATOR_MEMORY_MIB", 8192) << 20;
static std::recursive_mutex books;  // everything but the running of work
typedef std::lock_guard<std::recursive_mutex> Lock;
static thread_local Status last = cudaSuccess;
static std::atomic<int> lost{0};
static Status ret(Status e) {
  if (lost && e == cudaSuccess) e = (Status)(int)lost;
  if (e != cudaSuccess && e != cudaErrorNotReady) last = e;
  return e;
}

struct Mark {
  std::mutex m;
  std::condition_variable c;
  bool done = false;
  double t = 0;
  void set() {
    std::lock_guard<std::mutex> l(m);
    done = true;
    t = now();
    c.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> l(m);
    c.wait(l, [&] { return done; });
  }
};

struct Node {
  Fn run;
  std::vector<Node*> deps;
  const char* kind;
};
struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;
};
struct Exec {
  std::vector<Fn> work;
  size_t bytes;
  std::shared_ptr<Mark> last;  // the end of its last launch
};
struct Stream;
struct Capture {
  unsigned long long id;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  cudaStreamCaptureMode mode;
  std::thread::id owner;
  Stream* origin;
  bool bad = false, ended = false;
  std::set<Stream*> streams;
};
struct Stream {
  std::shared_ptr<Capture> cap;
  std::vector<Node*> tails;
  int priority = 0;
  bool legacy = false, blocking = false;
  std::mutex m;
  std::condition_variable c;
  std::deque<Fn> q;
  bool busy = false, started = false, destroyed = false;
  unsigned long long pushed = 0, finished = 0;
  void push(Fn f) {
    std::lock_guard<std::mutex> l(m);
    if (!started) {
      started = true;
      std::thread([this] { loop(); }).detach();
    }
    q.push_back(std::move(f));
    ++pushed;
    c.notify_all();
  }
  void loop() {
    std::unique_lock<std::mutex> l(m);
    for (;;) {
      c.wait(l, [&] { return !q.empty() || destroyed; });
      if (q.empty()) break;
      Fn f = std::move(q.front());
      q.pop_front();
      busy = true;
      l.unlock();
      if (DELAY) usleep(rand() % DELAY);
      f();
      f = nullptr;
      l.lock();
      busy = false;
      ++finished;
      c.notify_all();
    }
    started = false;
  }
  // The thread ends behind the work. The object stays, for whoever is about to wait for the device.
  void destroy() {
    std::lock_guard<std::mutex> l(m);
    destroyed = true;
    c.notify_all();
  }
  bool idle() {
    std::lock_guard<std::mutex> l(m);
    return q.empty() && !busy;
  }
  // Until what is in the stream now is done: if nothing comes behind it, the stream is idle then.
  void wait() {
    std::unique_lock<std::mutex> l(m);
    c.wait(l, [this, until = pushed] { return finished >= until; });
  }
};
struct Event {
  std::shared_ptr<Capture> cap;
  std::vector<Node*> tails;
  std::shared_ptr<Mark> mark;
  bool timing = true;
};

static std::set<Stream*>& streams() {
  static auto* s = new std::set<Stream*>();
  return *s;
}
static Stream* legacy() {
  static Stream* s = [] {
    auto* x = new Stream();
    x->legacy = true;
    streams().insert(x);
    return x;
  }();
  return s;
}
static Stream* S(cudaStream_t s) {
  return (s == nullptr || s == cudaStreamLegacy || s == cudaStreamPerThread) ? legacy() : (Stream*)s;
}
static std::set<Capture*>& captures() {
  static auto* s = new std::set<Capture*>();
  return *s;
}
static thread_local cudaStreamCaptureMode threadMode = cudaStreamCaptureModeGlobal;

// A call that is unsafe while something is being captured: refused as the modes say.
static Status unsafe() {
  Lock l(books);
  if (threadMode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (auto* c : captures()) {
    bool mine = c->owner == std::this_thread::get_id();
    if ((c->mode == cudaStreamCaptureModeGlobal && threadMode == cudaStreamCaptureModeGlobal) ||
        (mine && c->mode != cudaStreamCaptureModeRelaxed)) {
      c->bad = true;
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  return cudaSuccess;
}
// The legacy stream waits for all blocking streams: while one of those is captured, it cannot be used.
static bool unusable(Stream* s) {
  if (s->legacy)
    for (auto* c : captures())
      for (auto* o : c->streams)
        if (o->blocking) return true;
  return false;
}
static Status implicit(Stream* s) {
  if (!unusable(s)) return cudaSuccess;
  for (auto* c : captures())
    for (auto* o : c->streams)
      if (o->blocking) c->bad = true;
  return cudaErrorStreamCaptureImplicit;
}
// What comes next in the legacy stream is behind all blocking streams, and the other way round.
static void order(Stream* s) {
  if (!s->legacy && !s->blocking) return;
  for (auto* o : streams())
    if (o != s && !o->cap && (s->legacy ? o->blocking : o->legacy) && !o->idle()) {
      auto k = std::make_shared<Mark>();
      o->push([k] { k->set(); });
      s->push([k] { k->wait(); });
    }
}
// Work that no capture takes: tried in a captured stream, it spoils the capture.
static Status uncapturable(Stream* s) {
  if (!s->cap) return cudaSuccess;
  s->cap->bad = true;
  return cudaErrorStreamCaptureUnsupported;
}
// A set or a copy of no bytes: no node in a graph.
static bool leavesNothing(Stream* s, size_t n) {
  Lock l(books);
  return !n && s->cap && !s->cap->bad;
}
static Status submit(Stream* s, const char* kind, Fn f) {
  if (lost) return (Status)(int)lost;
  std::unique_lock<std::recursive_mutex> l(books);
  if (Status e = implicit(s)) return e;
  if (s->cap) {
    if (s->cap->bad) return cudaErrorStreamCaptureInvalidated;
    auto n = std::make_shared<Node>();
    n->run = std::move(f);
    n->deps = s->tails;
    n->kind = kind;
    s->cap->graph->nodes.push_back(n);
    s->tails = {n.get()};
    return cudaSuccess;
  }
  order(s);
  s->push(std::move(f));
  return cudaSuccess;
}

// ---- memory
struct Alloc {
  size_t size;
  bool host;
};
static std::map<char*, Alloc>& allocs() {
  static auto* m = new std::map<char*, Alloc>();
  return *m;
}
static size_t used = 0, driverUsed = (size_t)300 << 20;
static Status take(void** p, size_t n, bool host) {
  Lock l(books);
  size_t size = (n + 4095) / 4096 * 4096;
  if (!size) size = 4096;
  if (!host && used + driverUsed + size > TOTAL) return cudaErrorMemoryAllocation;
  char* a = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (a == MAP_FAILED) return cudaErrorMemoryAllocation;
  allocs()[a] = {size, host};
  if (!host) used += size;
  *p = a;
  return cudaSuccess;
}
static void syncAll() {
  std::vector<Stream*> all;
  {
    Lock l(books);
    all.assign(streams().begin(), streams().end());
  }
  for (auto* s : all) s->wait();
}
static Status release(void* p) {
  Lock l(books);
  auto it = allocs().find((char*)p);
  if (it == allocs().end()) return cudaErrorInvalidValue;
  if (!it->second.host) used -= it->second.size;
  // Nothing else may ever lie there: whoever still uses the memory faults.
  mmap(p, it->second.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  allocs().erase(it);
  return cudaSuccess;
}
static Status give(void* p) {
  if (!p) return cudaSuccess;
  syncAll();
  return release(p);
}
static Alloc* owner(const void* p) {
  auto& m = allocs();
  auto it = m.upper_bound((char*)p);
  if (it == m.begin()) return nullptr;
  --it;
  return (char*)p < it->first + it->second.size ? &it->second : nullptr;
}

API Status cudaMalloc(void** p, size_t n) {
  if (Status e = unsafe()) return ret(e);
  return ret(take(p, n, false));
}
API Status cudaFree(void* p) {
  if (Status e = unsafe()) return ret(e);
  return ret(give(p));
}
API Status cudaMallocAsync(void** p, size_t n, cudaStream_t s) {
  Lock l(books);
  if (!S(s)->cap)
    if (Status e = unsafe()) return ret(e);
  if (Status e = take(p, n, false)) return ret(e);
  Status e = submit(S(s), "allocate", [] {});
  if (e) release(*p);
  return ret(e);
}
// What was allocated in a capture is the graph's, which may be replayed: it is never given back.
API Status cudaFreeAsync(void* p, cudaStream_t s) {
  Lock l(books);
  if (!p) return ret(cudaSuccess);
  if (!allocs().count((char*)p)) return ret(cudaErrorInvalidValue);
  bool captured = S(s)->cap != nullptr;
  return ret(submit(S(s), "free", [p, captured] {
    if (!captured) release(p);
  }));
}
API Status cudaHostAlloc(void** p, size_t n, unsigned) {
  if (Status e = unsafe()) return ret(e);
  return ret(take(p, n, true));
}
API Status cudaFreeHost(void* p) {
  if (Status e = unsafe()) return ret(e);
  return ret(give(p));
}
API Status cudaHostRegister(void*, size_t, unsigned) { return ret(unsafe()); }
API Status cudaHostUnregister(void*) { return ret(cudaSuccess); }
API Status cudaMemGetInfo(size_t* f, size_t* t) {
  Lock l(books);
  *t = TOTAL;
  *f = TOTAL - used - driverUsed;
  return ret(cudaSuccess);
}
API Status cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Lock l(books);
  memset(a, 0, sizeof *a);
  auto* o = owner(p);
  a->type = !o ? cudaMemoryTypeUnregistered : o->host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = 0;
  a->devicePointer = o ? (void*)p : nullptr;
  a->hostPointer = (!o || o->host) ? (void*)p : nullptr;
  return ret(cudaSuccess);
}
static bool pageable(const void* p) {
  Lock l(books);
  return owner(p) == nullptr;
}
// So much of pageable memory is copied at once, to memory of the driver's that the device reads later.
constexpr size_t STAGED = 64 << 10;
API Status cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  Stream* x = S(st);
  if (leavesNothing(x, n)) return ret(cudaSuccess);
  if (!x->cap && n <= STAGED && pageable(s) && !pageable(d)) {
    auto staged = std::make_shared<std::vector<char>>((const char*)s, (const char*)s + n);
    return ret(submit(x, "memcpy", [=] { memcpy(d, staged->data(), n); }));
  }
  bool slow = pageable(d) || pageable(s);
  Status e = submit(x, "memcpy", [=] { memmove(d, s, n); });
  if (!e && slow && !x->cap) x->wait();
  return ret(e);
}
API Status cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind k) {
  Status e = cudaMemcpyAsync(d, s, n, k, nullptr);
  legacy()->wait();
  return ret(e);
}
API Status cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
  return cudaMemcpyAsync(d, s, n, cudaMemcpyDefault, st);
}
API Status cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind,
                             cudaStream_t st) {
  return ret(submit(S(st), "memcpy2d", [=] {
    for (size_t i = 0; i < h; i++) memmove((char*)d + i * dp, (char*)s + i * sp, w);
  }));
}
API Status cudaMemset(void* p, int v, size_t n) {
  Status e = submit(legacy(), "memset", [=] { memset(p, v, n); });
  legacy()->wait();
  return ret(e);
}
API Status cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t s) {
  if (leavesNothing(S(s), n)) return ret(cudaSuccess);
  return ret(submit(S(s), "memset", [=] { memset(p, v, n); }));
}
API Status cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return ret(cudaSuccess); }
API Status cudaGetSymbolAddress(void** p, const void*) {
  static char z[1 << 16];
  *p = z;
  return ret(cudaSuccess);
}

// ---- device
API Status cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
API Status cudaGetDevice(int* d) {
  *d = 0;
  return cudaSuccess;
}
API Status cudaSetDevice(int d) { return d == 0 ? cudaSuccess : ret(cudaErrorInvalidDevice); }
API Status cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "No GPU (emulated)");
  p->totalGlobalMem = TOTAL;
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerMultiprocessor = 233472;
  p->sharedMemPerBlockOptin = 232448;
  p->regsPerBlock = 65536;
  p->regsPerMultiprocessor = 65536;
  p->maxThreadsDim[0] = 1024;
  p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->l2CacheSize = 50 << 20;
  p->memoryPoolsSupported = 1;
  p->textureAlignment = 512;
  p->unifiedAddressing = 1;
  return ret(cudaSuccess);
}
API Status cudaDeviceGetAttribute(int* v, enum cudaDeviceAttr a, int) {
  *v = a == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
  return ret(cudaSuccess);
}
API Status cudaDeviceGetPCIBusId(char* b, int n, int) {
  snprintf(b, n, "0000:00:00.0");
  return ret(cudaSuccess);
}
API Status cudaDeviceGetStreamPriorityRange(int* lo, int* hi) {
  *lo = 0;
  *hi = -5;
  return ret(cudaSuccess);
}
API Status cudaDeviceCanAccessPeer(int* v, int, int) {
  *v = 0;
  return ret(cudaSuccess);
}
API Status cudaDeviceEnablePeerAccess(int, unsigned) { return ret(cudaSuccess); }
API Status cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int) {
  *p = (cudaMemPool_t)1;
  return ret(cudaSuccess);
}
API Status cudaMemPoolGetAttribute(cudaMemPool_t, enum cudaMemPoolAttr, void* v) {
  *(uint64_t*)v = 0;
  return ret(cudaSuccess);
}
API Status cudaMemPoolSetAttribute(cudaMemPool_t, enum cudaMemPoolAttr, void*) { return ret(cudaSuccess); }
API Status cudaMemPoolSetAccess(cudaMemPool_t, const struct cudaMemAccessDesc*, size_t) { return ret(cudaSuccess); }
API Status cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return ret(cudaSuccess); }
API Status cudaDriverGetVersion(int* v) {
  *v = 13000;
  return ret(cudaSuccess);
}
API Status cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return ret(cudaSuccess);
}
// The device encompasses each stream that is being captured, by whichever thread and in whichever mode.
API Status cudaDeviceSynchronize() {
  {
    Lock l(books);
    for (auto* c : captures()) c->bad = true;
    if (!captures().empty()) return ret(cudaErrorStreamCaptureUnsupported);
  }
  syncAll();
  return ret(cudaSuccess);
}
API Status cudaGetLastError() {
  Status e = lost ? (Status)(int)lost : last;
  last = cudaSuccess;
  return e;
}
API Status cudaPeekAtLastError() { return lost ? (Status)(int)lost : last; }
API Status cudaProfilerStart() { return cudaSuccess; }
API Status cudaProfilerStop() { return cudaSuccess; }
struct Text {
  int code;
  const char *name, *text;
};
static Text texts[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {401, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {902, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {903, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {906, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"}};
API const char* cudaGetErrorName(Status e) {
  for (auto& t : texts)
    if (t.code == e) return t.name;
  return "cudaErrorUnknown";
}
API const char* cudaGetErrorString(Status e) {
  for (auto& t : texts)
    if (t.code == e) return t.text;
  return "unknown error";
}

// ---- streams
static void finish(std::shared_ptr<Capture> c) {
  for (auto* o : c->streams) {
    o->cap = nullptr;
    o->tails = {};
  }
  c->ended = true;
  captures().erase(c.get());
}
API Status cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int p) {
  Lock l(books);
  auto* x = new Stream();
  x->blocking = !(flags & cudaStreamNonBlocking);
  x->priority = p;
  streams().insert(x);
  *s = (cudaStream_t)x;
  return ret(cudaSuccess);
}
API Status cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API Status cudaStreamDestroy(cudaStream_t s) {
  Lock l(books);
  auto* x = S(s);
  if (x->legacy || !streams().erase(x)) return ret(cudaErrorInvalidResourceHandle);
  if (x->cap && x->cap->origin == x) finish(x->cap);
  x->destroy();
  return ret(cudaSuccess);
}
API Status cudaStreamGetPriority(cudaStream_t s, int* p) {
  *p = S(s)->priority;
  return ret(cudaSuccess);
}
API Status cudaStreamQuery(cudaStream_t s) {
  Lock l(books);
  auto* x = S(s);
  if (Status e = uncapturable(x)) return ret(e);
  if (Status e = implicit(x)) return ret(e);
  if (Status e = unsafe()) return ret(e);
  order(x);
  return ret(x->idle() ? cudaSuccess : cudaErrorNotReady);
}
API Status cudaStreamSynchronize(cudaStream_t s) {
  auto* x = S(s);
  {
    Lock l(books);
    if (Status e = uncapturable(x)) return ret(e);
    if (Status e = implicit(x)) return ret(e);
    if (Status e = unsafe()) return ret(e);
    order(x);
  }
  x->wait();
  return ret(cudaSuccess);
}
API Status cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* u, unsigned) {
  Lock l(books);
  if (Status e = uncapturable(S(s))) return ret(e);
  return ret(submit(S(s), "callback", [=] { f(s, cudaSuccess, u); }));
}
API Status cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* u) {
  return ret(submit(S(s), "host", [=] { f(u); }));
}

// ---- events
API Status cudaEventCreateWithFlags(cudaEvent_t* e, unsigned f) {
  auto* x = new Event();
  x->timing = !(f & cudaEventDisableTiming);
  *e = (cudaEvent_t)x;
  return ret(cudaSuccess);
}
API Status cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API Status cudaEventDestroy(cudaEvent_t e) {
  delete (Event*)e;
  return ret(cudaSuccess);
}
API Status cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
  auto* v = (Event*)e;
  auto* x = S(s);
  Lock l(books);
  if (Status e = implicit(x)) return ret(e);
  if (x->cap) {
    if (x->cap->bad) return ret(cudaErrorStreamCaptureInvalidated);
    if (flags & cudaEventRecordExternal) {
      return ret(submit(x, "event", [v] {
        auto m = std::make_shared<Mark>();
        m->set();
        Lock l(books);
        v->mark = m;
      }));
    }
    v->cap = x->cap;
    v->tails = x->tails;
    v->mark = nullptr;
    return ret(cudaSuccess);
  }
  if (flags & cudaEventRecordExternal) return ret(cudaErrorIllegalState);
  v->cap = nullptr;
  auto m = std::make_shared<Mark>();
  v->mark = m;
  if (lost) return ret((Status)(int)lost);
  order(x);
  x->push([m] { m->set(); });
  return ret(cudaSuccess);
}
API Status cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
// The host can tell nothing of an event that was last recorded in a capture, and spoils the capture if it asks.
static Status untold(Event* v) {
  if (!v->cap) return cudaSuccess;
  if (v->cap->bad || v->cap->ended) return cudaErrorInvalidValue;
  v->cap->bad = true;
  return cudaErrorCapturedEvent;
}
API Status cudaEventQuery(cudaEvent_t e) {
  auto* v = (Event*)e;
  Lock l(books);
  if (Status r = untold(v)) return ret(r);
  if (Status r = unsafe()) return ret(r);
  if (!v->mark) return ret(cudaSuccess);
  std::lock_guard<std::mutex> k(v->mark->m);
  return ret(v->mark->done ? cudaSuccess : cudaErrorNotReady);
}
API Status cudaEventSynchronize(cudaEvent_t e) {
  auto* v = (Event*)e;
  std::shared_ptr<Mark> m;
  {
    Lock l(books);
    if (Status r = untold(v)) return ret(r);
    if (Status r = unsafe()) return ret(r);
    m = v->mark;
  }
  if (m) m->wait();
  return ret(cudaSuccess);
}
API Status cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  auto *x = (Event*)a, *y = (Event*)b;
  Lock l(books);
  for (auto* v : {x, y})
    if (Status r = untold(v)) return ret(r);
  if (!x->mark || !y->mark || !x->timing || !y->timing) return ret(cudaErrorInvalidResourceHandle);
  if (!x->mark->done || !y->mark->done) return ret(cudaErrorNotReady);
  *ms = (float)(y->mark->t - x->mark->t);
  return ret(cudaSuccess);
}
API Status cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
  auto* x = S(s);
  auto* v = (Event*)e;
  Lock l(books);
  if (Status r = implicit(x)) return ret(r);
  if (x->cap && x->cap->bad) return ret(cudaErrorStreamCaptureInvalidated);
  if (x->cap && (flags & cudaEventWaitExternal))
    return ret(submit(x, "wait", [v] {
      std::shared_ptr<Mark> m;
      {
        Lock l(books);
        m = v->mark;
      }
      if (m) m->wait();
    }));
  if (flags & cudaEventWaitExternal) return ret(cudaErrorIllegalState);
  if (v->cap) {
    if (v->cap->bad || v->cap->ended) {
      if (x->cap) x->cap->bad = true;
      return ret(cudaErrorInvalidValue);
    }
    if (x->cap && x->cap != v->cap) {
      x->cap->bad = v->cap->bad = true;
      return ret(cudaErrorStreamCaptureMerge);
    }
    if (!x->cap) {
      x->cap = v->cap;
      x->cap->streams.insert(x);
      x->tails = {};
    }
    for (auto* n : v->tails) {
      bool has = false;
      for (auto* o : x->tails) has |= o == n;
      if (!has) x->tails.push_back(n);
    }
    return ret(cudaSuccess);
  }
  if (x->cap) {
    if (!v->mark) return ret(cudaSuccess);
    x->cap->bad = true;
    return ret(cudaErrorStreamCaptureIsolation);
  }
  if (auto m = v->mark) x->push([m] { m->wait(); });
  return ret(cudaSuccess);
}

// ---- capture
static unsigned long long ids = 0;
API Status cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  Lock l(books);
  auto* x = S(s);
  if (lost) return ret((Status)(int)lost);
  if (x->legacy) return ret(cudaErrorStreamCaptureUnsupported);
  if (x->cap) return ret(cudaErrorIllegalState);
  auto c = std::make_shared<Capture>();
  c->id = ++ids;
  c->mode = mode;
  c->owner = std::this_thread::get_id();
  c->origin = x;
  c->streams.insert(x);
  x->cap = c;
  x->tails = {};
  captures().insert(c.get());
  return ret(cudaSuccess);
}
API Status cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
  Lock l(books);
  auto* x = S(s);
  auto c = x->cap;
  bool elsewhere = c && c->mode != cudaStreamCaptureModeRelaxed && c->owner != std::this_thread::get_id();
  if (g) *g = nullptr;
  if (!c) return ret(cudaErrorIllegalState);
  if (c->origin != x) {
    c->bad = true;
    return ret(cudaErrorStreamCaptureUnmatched);
  }
  std::set<Node*> reach;
  std::vector<Node*> todo = x->tails;
  while (!todo.empty()) {
    Node* n = todo.back();
    todo.pop_back();
    if (reach.insert(n).second)
      for (auto* d : n->deps) todo.push_back(d);
  }
  bool unjoined = false;
  for (auto* o : c->streams) {
    for (auto* n : o->tails) unjoined |= !reach.count(n);
  }
  finish(c);
  if (elsewhere) return ret(cudaErrorStreamCaptureWrongThread);
  if (c->bad) return ret(cudaErrorStreamCaptureInvalidated);
  if (unjoined) return ret(cudaErrorStreamCaptureUnjoined);
  *g = (cudaGraph_t) new std::shared_ptr<Graph>(c->graph);
  return ret(cudaSuccess);
}
API Status cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* st) {
  Lock l(books);
  auto* x = S(s);
  if (unusable(x)) return ret(cudaErrorStreamCaptureImplicit);
  *st = !x->cap       ? cudaStreamCaptureStatusNone
        : x->cap->bad ? cudaStreamCaptureStatusInvalidated
                      : cudaStreamCaptureStatusActive;
  return ret(cudaSuccess);
}
API Status cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* st, unsigned long long* id, cudaGraph_t* g,
                                    const cudaGraphNode_t** deps, const cudaGraphEdgeData** edges, size_t* n) {
  Lock l(books);
  auto* x = S(s);
  if (Status e = cudaStreamIsCapturing(s, st)) return e;
  if (x->cap) {
    if (id) *id = x->cap->id;
    if (g) *g = (cudaGraph_t)&x->cap->graph;
    if (deps) *deps = (const cudaGraphNode_t*)x->tails.data();
    if (n) *n = x->tails.size();
  }
  if (edges) *edges = nullptr;
  return ret(cudaSuccess);
}
API Status cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
  std::swap(*m, threadMode);
  return ret(cudaSuccess);
}
static std::shared_ptr<Graph>& GI(cudaGraph_t g) { return *(std::shared_ptr<Graph>*)g; }
API Status cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* out, size_t* n) {
  Lock l(books);
  auto& v = GI(g)->nodes;
  if (out)
    for (size_t i = 0; i < *n && i < v.size(); i++) out[i] = (cudaGraphNode_t)v[i].get();
  *n = v.size();
  return ret(cudaSuccess);
}
API Status cudaGraphNodeGetDependencies(cudaGraphNode_t x, cudaGraphNode_t* out, cudaGraphEdgeData*, size_t* n) {
  auto& d = ((Node*)x)->deps;
  if (out)
    for (size_t i = 0; i < *n && i < d.size(); i++) out[i] = (cudaGraphNode_t)d[i];
  *n = d.size();
  return ret(cudaSuccess);
}
API Status cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) {
  Lock l(books);
  if (Status r = unsafe()) return ret(r);
  auto* x = new Exec();
  for (auto& n : GI(g)->nodes) x->work.push_back(n->run);
  x->bytes = 65536 + 4096 * x->work.size();
  driverUsed += x->bytes;
  *e = (cudaGraphExec_t)x;
  return ret(cudaSuccess);
}
API Status cudaGraphDestroy(cudaGraph_t g) {
  delete &GI(g);
  return ret(cudaSuccess);
}
API Status cudaGraphExecDestroy(cudaGraphExec_t e) {
  Lock l(books);
  if (Status r = unsafe()) return ret(r);
  auto* x = (Exec*)e;
  driverUsed -= x->bytes;
  delete x;
  return ret(cudaSuccess);
}
API Status cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
  auto* x = (Exec*)e;
  auto work = x->work;
  Lock l(books);
  if (Status r = uncapturable(S(s))) return ret(r);
  // Each launch is behind the launch before it, in whichever stream that was.
  auto before = x->last, done = std::make_shared<Mark>();
  Status launched = submit(S(s), "graph", [work, before, done] {
    if (before) before->wait();
    for (auto& f : work) f();
    done->set();
  });
  if (!launched) x->last = done;
  return ret(launched);
}
API Status cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return ret(cudaSuccess); }

// ---- kernels
static std::unordered_map<const void*, std::string>& names() {
  static auto* m = new std::unordered_map<const void*, std::string>();
  return *m;
}
static std::string nameOf(const void* f) {
  auto it = names().find(f);
  if (it == names().end()) return "?";
  int st;
  char* d = abi::__cxa_demangle(it->second.c_str(), nullptr, nullptr, &st);
  std::string r = d ? d : it->second;
  free(d);
  return r;
}
static std::set<std::string>& unknown() {
  static auto* m = new std::set<std::string>();
  return *m;
}
struct Philox {
  union {
    uint64_t val;
    int64_t* ptr;
  } seed, offset;
  uint64_t intra;
  bool captured;
};
static uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}
static double unit(const Philox& p, uint64_t i) {
  uint64_t seed = p.captured ? *p.seed.ptr : p.seed.val, off = p.captured ? *p.offset.ptr + p.intra : p.offset.val;
  return (mix(mix(seed + 0x9e3779b97f4a7c15ULL * (off + 1)) + 0x9e3779b97f4a7c15ULL * (i + 1)) >> 11) *
         (1.0 / 9007199254740992.0);
}
static bool has(const std::string& n, const char* s) { return n.find(s) != std::string::npos; }
static Status random(const std::string& n, void** args, Stream* s) {
  int64_t count = *(int64_t*)args[0];
  Philox p = *(Philox*)args[1];
  char* out = nullptr;
  {
    Lock l(books);
    for (int i = 0; i < 16 && !out; i++) {
      char* c = ((char**)args[3])[i];
      auto* o = owner(c);
      if (o && !o->host) out = c;
    }
  }
  int kind = has(n, "normal")        ? 1
             : has(n, "uniform")     ? 0
             : has(n, "exponential") ? 2
             : has(n, "random")      ? 3
             : has(n, "bernoulli")   ? 4
                                     : -1;
  size_t width = has(n, "<double")                                  ? 8
                 : has(n, "random_from_to<long") || has(n, "<long") ? 8
                 : has(n, "Half") || has(n, "BFloat16")             ? 2
                                                                    : 4;
  bool half = has(n, "Half");
  if (!out || kind < 0) {
    fprintf(stderr, "[emulator] random kernel without code: %s\n", n.c_str());
    return submit(s, "kernel", [] {});
  }
  return submit(s, "random", [=] {
    for (int64_t i = 0; i < count; i++) {
      double u = unit(p, i), v = u;
      if (kind == 1) {
        double w = unit(p, i + (1ull << 40));
        v = sqrt(-2 * log(1 - u)) * cos(6.283185307179586 * w);
      }
      if (kind == 2) v = -log(1 - u);
      if (kind == 3) {
        ((int64_t*)out)[i] = (int64_t)(u * 4096);
        continue;
      }
      if (width == 2 && !half) {
        float f = (float)v;
        uint32_t b;
        memcpy(&b, &f, 4);
        ((uint16_t*)out)[i] = (uint16_t)((b + 0x8000) >> 16);
        continue;
      }
      if (width == 2) {
        ((_Float16*)out)[i] = (_Float16)v;
        continue;
      }
      if (width == 8) ((double*)out)[i] = v;
      else ((float*)out)[i] = (float)v;
    }
  });
}
static Status dropout(const std::string& n, void** args, Stream* s) {
  const float* in = *(const float**)args[0];
  float* out = *(float**)args[1];
  uint8_t* mask = *(uint8_t**)args[2];
  unsigned count = *(unsigned*)args[3];
  float keep = *(float*)args[4];
  Philox p = *(Philox*)args[5];
  return submit(s, "dropout", [=] {
    for (unsigned i = 0; i < count; i++) {
      bool k = unit(p, i) < keep;
      mask[i] = k;
      out[i] = k ? in[i] / keep : 0;
    }
  });
}
static Status launch(const void* f, dim3 grid, dim3 block, void** args, size_t, cudaStream_t s) {
  std::string n;
  {
    Lock l(books);
    n = nameOf(f);
  }
  if (n.find("spin_kernel") != std::string::npos) {
    int64_t c = *(int64_t*)args[0];
    return submit(S(s), "spin", [c] { usleep(c / 1000); });
  }
  if (n.find("distribution_elementwise_grid_stride_kernel") != std::string::npos) return random(n, args, S(s));
  if (n.find("fused_dropout_kernel") != std::string::npos) return dropout(n, args, S(s));
  {
    Lock l(books);
    if (unknown().insert(n).second) fprintf(stderr, "[emulator] kernel without code: %s\n", n.substr(0, 300).c_str());
  }
  return submit(S(s), "kernel", [] {});
}
API Status __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) {
  return ret(launch((const void*)k, g, b, a, m, s));
}
API Status cudaLaunchKernel(const void* k, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) {
  return ret(launch(k, g, b, a, m, s));
}
API Status cudaLaunchCooperativeKernel(const void* k, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) {
  return ret(launch(k, g, b, a, m, s));
}
API Status cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* k, void** a) {
  return ret(launch(k, c->gridDim, c->blockDim, a, 0, c->stream));
}
API Status __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
API char __cudaInitModule(void**) { return 1; }
API void** __cudaRegisterFatBinary(void*) {
  static void* h[4];
  return h;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char* h, char*, const char* name, int, void*, void*, void*, void*, int*) {
  Lock l(books);
  names()[h] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
struct Config {
  dim3 g, b;
  size_t m;
  void* s;
};
static thread_local std::vector<Config> configs;
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, void* s) {
  configs.push_back({g, b, m, s});
  return 0;
}
API Status __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* m, void* s) {
  Config c = configs.back();
  configs.pop_back();
  *g = c.g;
  *b = c.b;
  *m = c.m;
  *(void**)s = c.s;
  return cudaSuccess;
}
API Status cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  return ret(cudaSuccess);
}
API Status cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return ret(cudaSuccess); }
API Status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return ret(cudaSuccess);
}
API Status cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return ret(cudaSuccess);
}
API Status cudaIpcCloseMemHandle(void*) { return ret(cudaErrorInvalidValue); }
API Status cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return ret(cudaErrorInvalidValue); }
API Status cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return ret(cudaErrorInvalidValue); }
API Status cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { return ret(cudaErrorInvalidValue); }
API Status cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return ret(cudaErrorInvalidValue); }
static int stub() { return 0; }
static int primaryState(int, unsigned* f, int* a) {
  if (f) *f = 0;
  if (a) *a = 1;
  return 0;
}
static int errorString(int, const char** s) {
  *s = "driver error";
  return 0;
}
API Status cudaGetDriverEntryPointByVersion(const char* n, void** p, unsigned, unsigned long long,
                                            enum cudaDriverEntryPointQueryResult* r) {
  *p = !strcmp(n, "cuDevicePrimaryCtxGetState") ? (void*)primaryState
       : !strcmp(n, "cuGetErrorString")         ? (void*)errorString
                                                : (void*)stub;
  if (r) *r = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- what else torch looks up, and does not use in what is emulated
#define UNUSED(name)                \
  API int name##_() __asm__(#name); \
  int name##_() { return 801; }  // cudaErrorNotSupported
UNUSED(cudaGraphAddNode)
UNUSED(cudaGraphRetainUserObject)
UNUSED(cudaKernelSetAttributeForDevice)
UNUSED(cudaLibraryUnload)
UNUSED(cudaStreamUpdateCaptureDependencies)
UNUSED(cudaUserObjectCreate)
UNUSED(cudaUserObjectRelease)
UNUSED(cudaGraphConditionalHandleCreate)
UNUSED(cudaLibraryGetGlobal)
UNUSED(cudaLibraryGetKernel)
UNUSED(cudaLibraryGetKernelCount)
UNUSED(cudaLibraryGetManaged)
UNUSED(cudaLibraryGetUnifiedFunction)
UNUSED(cudaLibraryLoadData)
UNUSED(cudaLibraryLoadFromFile)
UNUSED(cudaStreamBeginCaptureToGraph)
UNUSED(cuDeviceGetAttribute)
UNUSED(cuDevicePrimaryCtxRetain)
UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncSetAttribute)
UNUSED(cuFuncSetCacheConfig)
UNUSED(cuLaunchCooperativeKernel)
UNUSED(cuLinkAddData_v2)
UNUSED(cuLinkComplete)
UNUSED(cuLinkCreate_v2)
UNUSED(cuModuleLoad)
UNUSED(cuModuleLoadDataEx)
UNUSED(cuModuleUnload)
UNUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNUSED(cuPointerGetAttribute)
UNUSED(cuTensorMapEncodeTiled)

API int cuCtxGetCurrent(void** context) {
  *context = nullptr;
  return 0;
}
API int cuCtxSetCurrent(void*) { return 0; }
API int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { return primaryState(0, flags, active); }
API int cuGetErrorString(int code, const char** text) { return errorString(code, text); }
// Of kernels that are loaded as modules two have code here: kernels.cpp.
size_t sizeOfCopies();
void runCopies(const void* inputs, unsigned columns, unsigned rows, unsigned threads);
void runGives(const void* places, unsigned columns, unsigned rows, unsigned threads);
API int cuModuleLoadData(void** module, const void*) {
  *module = module;
  return 0;
}
API int cuModuleGetFunction(void** function, void* module, const char* name) {
  const bool isFirst = !strcmp(name, "copy_inputs");
  *function = isFirst ? module : (void*)runGives;
  return isFirst || !strcmp(name, "give_outputs") ? 0 : 500;
}
API int cuLaunchKernel(void* function, unsigned columns, unsigned rows, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                       void* stream, void** parameters, void**) {
  if (function == (void*)runGives) {
    void* places = *static_cast<void**>(parameters[0]);
    return ret(submit(S((cudaStream_t)stream), "kernel", [=] { runGives(places, columns, rows, threads); }));
  }
  const char* first = static_cast<const char*>(parameters[0]);
  const std::vector<char> inputs(first, first + sizeOfCopies());
  return ret(submit(S((cudaStream_t)stream), "kernel", [=] { runCopies(inputs.data(), columns, rows, threads); }));
}

// ---- the same, where newer versions of torch do use it
API Status cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaSuccess; }
API Status cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  *(uint64_t*)value = 0;
  return cudaSuccess;
}
API Status cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, graph, flags);
}
API Status cudaMallocHost(void** memory, size_t size) { return cudaHostAlloc(memory, size, 0); }
API Status cudaMallocManaged(void** memory, size_t size, unsigned) { return cudaMalloc(memory, size); }
API Status cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
  return cudaStreamCreateWithPriority(made, flags, 0);
}

// ---- for whoever drives the emulator
API void emulator_lose_device(int code) {
  lost = code;
  if (!code) last = cudaSuccess;
}
API void emulator_set_memory(size_t bytes) {
  Lock l(books);
  TOTAL = bytes;
}
API size_t emulator_used_memory() {
  Lock l(books);
  return used + driverUsed;
}
API int emulator_is_capturing(void* stream) {
  cudaStreamCaptureStatus status;
  cudaStreamIsCapturing((cudaStream_t)stream, &status);
  return status;
}
