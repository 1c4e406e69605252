#include "runtime.h"

#include <Python.h>

#include <algorithm>
#include <chrono>

namespace queued {
namespace {

// The thread gives Python's lock away while it waits: a stream's work may need it.
struct WithoutPython {
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutPython() {
    if (state) PyEval_RestoreThread(state);
  }
};

struct Stream {
  struct Item {
    std::function<void()> run;
    bool is_work;  // and no mark, which a lost device reaches too
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> queue;
  bool is_busy = false, has_thread = false;
  std::minstd_rand delays;
  uint64_t delays_of = 0;
  std::shared_ptr<Capture> capture;  // guarded by ``books``

  void push(std::function<void()> run, bool is_work);
  void serve();
  void delay();
  void finish() {
    WithoutPython released;
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return queue.empty() && !is_busy; });
  }
  bool is_done() {
    std::lock_guard lock(mutex);
    return queue.empty() && !is_busy;
  }
};

// Everything here lives as long as the process, since streams' threads never end.
Stream* const streams = new Stream[STREAMS];
std::mutex& books = *new std::mutex;  // guards captures
std::mutex& loss = *new std::mutex;
std::string& lost_by = *new std::string;
std::atomic<bool> is_lost{false};
std::atomic<int> handed_out{0};
std::atomic<long> due[3] = {-1, -1, -1};
std::atomic<uint64_t> delay_seed{0};
std::atomic<int> delay_most{0};
thread_local int current = 0;

struct Gate {
  std::mutex mutex;
  std::condition_variable opened;
  long times = 0;
};
Gate& gate = *new Gate;

void Stream::push(std::function<void()> run, bool is_work) {
  std::lock_guard lock(mutex);
  if (!has_thread) {
    has_thread = true;
    std::thread([this] { serve(); }).detach();
  }
  queue.push_back({std::move(run), is_work});
  changed.notify_all();
}

void Stream::serve() {
  std::unique_lock lock(mutex);
  for (;;) {
    changed.wait(lock, [&] { return !queue.empty(); });
    Item item = std::move(queue.front());
    queue.pop_front();
    is_busy = true;
    lock.unlock();
    delay();
    if (!item.is_work || !is_lost) try {
        item.run();
      } catch (const std::exception& error) {
        lose_device(error.what());
      }
    item.run = nullptr;  // before anyone is told that it is done
    lock.lock();
    is_busy = false;
    changed.notify_all();
  }
}

void Stream::delay() {
  int most = delay_most;
  if (!most) return;
  if (delays_of != delay_seed) {
    delays_of = delay_seed;
    delays.seed(delays_of + 7919 * (this - streams));
  }
  std::this_thread::sleep_for(std::chrono::microseconds(delays() % most));
}

void run(const Work& work, const Draws& draws) {
  if (is_due(Fault::kernel)) throw std::runtime_error("unspecified launch failure (injected)");
  try {
    work(draws);
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string("device-side assert triggered: ") + error.what());
  }
}

[[noreturn]] void refuse(const std::string& text) { throw std::runtime_error("device error: " + text); }

[[noreturn]] void refuse_capturing(const char* what) {
  refuse(std::string("operation not permitted when stream is capturing: ") + what);
}

// Whether the running thread may make a call that no capture can hold. Call it with ``books``.
std::shared_ptr<Capture> forbids_unsafe_calls() {
  for (int i = 0; i < STREAMS; i++) {
    const auto& capture = streams[i].capture;
    bool mine = capture && capture->owner == std::this_thread::get_id();
    if (capture && (capture->mode == Mode::global || (capture->mode == Mode::thread_local_ && mine))) return capture;
  }
  return nullptr;
}

void refuse_unsafe(const char* what) {
  std::lock_guard lock(books);
  if (auto capture = forbids_unsafe_calls()) {
    capture->is_poisoned = true;
    refuse_capturing(what);
  }
}

// Refuse to wait on the host for an event of a capture. Call it with ``event.mutex``.
void refuse_captured(const Event& event) {
  if (event.was_captured) refuse("operation not permitted on an event last recorded in a capturing stream");
}

double now() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

void push_mark(const EventRef& event, int stream) {
  unsigned long long number;
  {
    std::lock_guard lock(event->mutex);
    event->was_captured = false;
    number = ++event->recorded;
  }
  streams[stream].push(
      [event, number] {
        std::lock_guard lock(event->mutex);
        event->done = std::max(event->done, number);
        event->milliseconds = now();
        event->reached.notify_all();
      },
      false);
}

}  // namespace

// ---- faults and delays

void fail_after(Fault fault, long calls) { due[int(fault)] = calls; }

bool is_due(Fault fault) {
  auto& left = due[int(fault)];
  return left >= 0 && left-- == 0;
}

void lose_device(const std::string& why) {
  std::lock_guard lock(loss);
  if (!is_lost) lost_by = why;
  is_lost = true;
}

void recover_device() {
  let_go();
  wait_for_everything();
  std::lock_guard lock(loss);
  is_lost = false;
}

void refuse_if_lost() {
  if (!is_lost) return;
  std::lock_guard lock(loss);
  refuse(lost_by);
}

void set_delays(uint64_t seed, int most_microseconds) {
  delay_seed = seed;
  delay_most = most_microseconds;
}

void hold() {
  std::lock_guard lock(gate.mutex);
  streams[current].push(
      [until = gate.times + 1] {
        std::unique_lock lock(gate.mutex);
        gate.opened.wait(lock, [&] { return gate.times >= until; });
      },
      false);
}

void let_go() {
  std::lock_guard lock(gate.mutex);
  gate.times++;
  gate.opened.notify_all();
}

// ---- streams

int current_stream() { return current; }

int exchange_stream(int stream) { return std::exchange(current, stream); }

int next_stream() { return 1 + handed_out++ % (STREAMS - 1); }

void submit(Work work) {
  refuse_if_lost();
  if (is_due(Fault::launch)) refuse("invalid configuration argument (injected)");
  {
    std::lock_guard lock(books);
    if (auto capture = streams[current].capture) {
      capture->nodes.push_back(std::move(work));
      capture->clocks[current][current]++;
      return;
    }
  }
  streams[current].push([work = std::move(work)] { run(work, {}); }, true);
}

bool stream_is_done(int stream) {
  refuse_if_lost();
  refuse_unsafe("the host asks whether a stream is done");
  return streams[stream].is_done();
}

void synchronize_stream(int stream) {
  refuse_if_lost();
  refuse_in_capture("the host waits for the stream");
  {
    std::lock_guard lock(books);
    if (auto capture = streams[stream].capture) {
      capture->is_poisoned = true;
      refuse_capturing("the host waits for the stream");
    }
  }
  streams[stream].finish();
  refuse_if_lost();
}

void synchronize_device() {
  refuse_if_lost();
  refuse_unsafe("the host waits for the device");
  wait_for_everything();
  refuse_if_lost();
}

void wait_for_everything() {
  for (int i = 0; i < STREAMS; i++) streams[i].finish();
}

// ---- events

void record(const EventRef& event, int stream) {
  refuse_if_lost();
  {
    std::lock_guard lock(books);
    if (auto capture = streams[stream].capture) {
      std::lock_guard both(event->mutex);
      event->capture = capture;
      event->clock = capture->clocks[stream];
      event->was_captured = true;
      return;
    }
  }
  push_mark(event, stream);
}

EventRef mark(int stream) {
  auto event = std::make_shared<Event>();
  push_mark(event, stream);
  return event;
}

void wait(const EventRef& event, int stream) {
  refuse_if_lost();
  unsigned long long number;
  {
    std::lock_guard lock(books);
    std::lock_guard both(event->mutex);
    auto& waiting = streams[stream].capture;
    if (event->was_captured) {
      auto capture = event->capture.lock();
      if (!capture || !capture->is_open) refuse_captured(*event);
      if (waiting && waiting != capture) {
        waiting->is_poisoned = capture->is_poisoned = true;
        refuse("dependency created between two captures would merge them");
      }
      waiting = capture;
      for (auto& [one, count] : event->clock) {
        auto& known = capture->clocks[stream][one];
        known = std::max(known, count);
      }
      capture->clocks[stream][stream]++;  // it has come here, and somebody has to wait for it
      return;
    }
    if (waiting && event->recorded) {
      waiting->is_poisoned = true;
      refuse("dependency created on uncaptured work in another stream");
    }
    number = event->recorded;
    if (!number) return;
  }
  streams[stream].push(
      [event, number] {
        std::unique_lock lock(event->mutex);
        event->reached.wait(lock, [&] { return event->done >= number; });
      },
      false);
}

bool is_reached(const EventRef& event) {
  refuse_if_lost();
  refuse_unsafe("the host asks for an event");
  std::lock_guard lock(event->mutex);
  refuse_captured(*event);
  return event->done >= event->recorded;
}

void synchronize(const EventRef& event) {
  refuse_if_lost();
  refuse_unsafe("the host waits for an event");
  {
    WithoutPython released;
    std::unique_lock lock(event->mutex);
    refuse_captured(*event);
    event->reached.wait(lock, [&] { return event->done >= event->recorded; });
  }
  refuse_if_lost();
}

double elapsed_ms(const EventRef& start, const EventRef& end) {
  for (auto& event : {start, end}) {
    std::lock_guard lock(event->mutex);
    if (!event->recorded || event->done < event->recorded) refuse("the event is not reached: device not ready");
  }
  return end->milliseconds - start->milliseconds;
}

// ---- captures

std::shared_ptr<Capture> capture_of(int stream) {
  std::lock_guard lock(books);
  return streams[stream].capture;
}

bool anyone_captures() {
  std::lock_guard lock(books);
  return std::any_of(streams, streams + STREAMS, [](const Stream& stream) { return bool(stream.capture); });
}

void refuse_in_capture(const char* what) {
  std::lock_guard lock(books);
  if (auto capture = streams[current].capture) {
    capture->is_poisoned = true;
    refuse_capturing(what);
  }
}

void begin_capture(const std::shared_ptr<Capture>& capture) {
  refuse_if_lost();
  std::lock_guard lock(books);
  if (!current) refuse("graphs must be captured on a non-default stream");
  if (streams[current].capture) refuse_capturing("another capture begins");
  capture->nodes.clear();
  capture->drawn = 0;
  capture->is_poisoned = false;
  capture->is_open = true;
  capture->owner = std::this_thread::get_id();
  capture->origin = current;
  capture->clocks = {{current, {}}};
  streams[current].capture = capture;
}

// Let the streams go. Call it with ``books``.
static void leave(const std::shared_ptr<Capture>& capture) {
  capture->is_open = false;
  for (int i = 0; i < STREAMS; i++)
    if (streams[i].capture == capture) streams[i].capture = nullptr;
}

void end_capture(const std::shared_ptr<Capture>& capture) {
  std::lock_guard lock(books);
  if (!capture->is_open) refuse("invalid stream capture status: nothing is being captured");
  if (capture->origin != current) {
    capture->is_poisoned = true;
    refuse("a capture must end on the stream that it began on");
  }
  auto joined = capture->clocks[capture->origin];
  bool is_joined = true;
  for (auto& [stream, clock] : capture->clocks)
    is_joined &= stream == capture->origin || joined[stream] >= clock[stream];
  leave(capture);
  refuse_if_lost();
  if (capture->is_poisoned) refuse("operation failed due to a previous error during capture");
  if (!is_joined) refuse("capturing stream has unjoined work");
}

void abandon_capture(const std::shared_ptr<Capture>& capture) {
  std::lock_guard lock(books);
  leave(capture);
}

void replay(const std::shared_ptr<Capture>& capture, Draws from) {
  refuse_if_lost();
  if (is_due(Fault::launch)) refuse("invalid configuration argument (injected)");
  refuse_in_capture("a graph is replayed");
  streams[current].push(
      [capture, from] {
        for (const auto& node : capture->nodes) run(node, from);
      },
      true);
}

}  // namespace queued
