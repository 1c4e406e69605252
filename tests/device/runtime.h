// A device whose streams are threads: queues, events, captures and faults on demand. It knows nothing of torch.
//
// Its rules are CUDA's. Work that is given to a stream runs later, in order, on the stream's thread. A capture notes the
// work instead, and a replay runs the notes as one piece of work. What CUDA refuses in a capture is refused here in the
// same words. Work that fails on a stream loses the device: every later call says so.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace queued {

constexpr int STREAMS = 33;  // the default one and a pool of 32 that is handed out in turn, as CUDA's is

// Where a piece of work takes its random numbers from.
struct Draws {
  uint64_t seed = 0, offset = 0;
};
using Work = std::function<void(const Draws&)>;
using PoolId = std::pair<unsigned long long, unsigned long long>;

enum class Mode { global, thread_local_, relaxed };

// How much of each stream of a capture is known to have come before a point.
using Clock = std::map<int, long>;

// A recording, and then what was recorded.
struct Capture {
  std::vector<Work> nodes;
  uint64_t drawn = 0;  // how many pieces of work draw random numbers
  PoolId pool{0, 0};
  Mode mode = Mode::global;
  std::thread::id owner;
  int origin = -1;
  bool is_open = false, is_poisoned = false;
  std::map<int, Clock> clocks;  // of the streams that take part
};

struct Event {
  std::mutex mutex;
  std::condition_variable reached;
  unsigned long long recorded = 0, done = 0;
  double milliseconds = 0;
  std::weak_ptr<Capture> capture;  // that it was recorded in
  bool was_captured = false;
  Clock clock;
};
using EventRef = std::shared_ptr<Event>;

// Streams. The current one is the thread's.
int current_stream();
int exchange_stream(int stream);
int next_stream();
void submit(Work work);
bool stream_is_done(int stream);
void synchronize_stream(int stream);
void synchronize_device();
void wait_for_everything();  // for the allocator: no capture is asked, and no loss is reported

// Events.
void record(const EventRef& event, int stream);
void wait(const EventRef& event, int stream);
bool is_reached(const EventRef& event);
void synchronize(const EventRef& event);
double elapsed_ms(const EventRef& start, const EventRef& end);
EventRef mark(int stream);  // an event for the allocator, recorded past all captures

// Captures.
void begin_capture(const std::shared_ptr<Capture>& capture);
void end_capture(const std::shared_ptr<Capture>& capture);
void abandon_capture(const std::shared_ptr<Capture>& capture);
void replay(const std::shared_ptr<Capture>& capture, Draws from);
std::shared_ptr<Capture> capture_of(int stream);
bool anyone_captures();
void refuse_in_capture(const char* what);

// Faults and delays.
enum class Fault { allocation, launch, kernel };
void fail_after(Fault fault, long calls);  // the call after so many; negative: never
bool is_due(Fault fault);
void lose_device(const std::string& why);
void recover_device();
void refuse_if_lost();
void set_delays(uint64_t seed, int most_microseconds);
void hold();   // the current stream stops here,
void let_go();  // until this is called

// Memory. A null pointer says that there is none left. The host cannot read what a pointer names.
char* bytes_of(void* at);  // where kernels find them
void* allocate(size_t bytes, int stream);
void release(void* at);
void used_on(void* at, int stream);
void begin_pool(PoolId pool);
void release_pool(PoolId pool);
void empty_cache();
void limit_memory(size_t bytes);
struct MemoryUse {
  size_t allocated = 0, reserved = 0, limit = 0, segments = 0, blocks = 0;
  std::map<PoolId, size_t> pools;
};
MemoryUse memory_use();

// Host memory that the device may use while the host does not wait.
void* allocate_pinned(size_t bytes);
void release_pinned(void* at);
bool is_pinned(const void* at);
void pinned_used_on(void* at, int stream);

}  // namespace queued
