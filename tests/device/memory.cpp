// Device memory in stream order, and pinned memory of the host.
//
// Note [memory in stream order]
//   A block that is released may be handed out again at once, for work of the stream that it was allocated for: that
//   work comes later. Another stream's use has to be told (``used_on``); the block then stays out of reach until that
//   stream has come past it. Memory of a pool is handed out only for the captures into that pool, and lies idle
//   afterwards, until the last graph of the pool is gone and the cache is emptied.
//
// Note [memory that the host cannot read]
//   A pointer of the device lies in a range of addresses without memory: a read or a write by the host faults. The bytes
//   lie ``SPAN`` behind it, and only kernels look there (``bytes_of``). No address is given to two segments, so that a
//   kernel which uses a segment that is gone faults, too.

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <set>

#include "runtime.h"

namespace queued {
namespace {

constexpr size_t GRAIN = 512, SEGMENT = 1 << 20, SPAN = size_t(1) << 37;
constexpr int GARBAGE = 0xA5;  // what nobody has written, nobody may read: it is a huge or odd number in any type

struct Block;
struct Segment {
  char* base;
  size_t bytes;
  PoolId pool;
  int stream;
  Block* first;
};
struct Block {
  char* at;
  size_t bytes;
  Segment* segment;
  Block *before, *after;
  bool is_used;
  std::set<int> streams;  // that use it, besides its own
};
struct BySize {
  bool operator()(const Block* one, const Block* other) const {
    return std::make_pair(one->bytes, one->at) < std::make_pair(other->bytes, other->at);
  }
};
struct Waiting {
  Block* block;
  std::vector<EventRef> events;
};

// Addresses for all segments of the process.
struct Range {
  char *next = nullptr, *end = nullptr;
  Range() {
    void* at = mmap(nullptr, 2 * SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at != MAP_FAILED) end = (next = static_cast<char*>(at)) + SPAN;
  }
  char* take(size_t bytes) {
    if (size_t(end - next) < bytes || mprotect(next + SPAN, bytes, PROT_READ | PROT_WRITE)) return nullptr;
    return std::exchange(next, next + bytes);
  }
  void give_back(char* at, size_t bytes) {
    madvise(at + SPAN, bytes, MADV_DONTNEED);
    mprotect(at + SPAN, bytes, PROT_NONE);
  }
};

struct Memory {
  Range range;
  std::mutex mutex;
  std::map<void*, Block*> used;
  std::map<std::pair<PoolId, int>, std::set<Block*, BySize>> idle;
  std::set<Segment*> segments;
  std::vector<Waiting> waiting;  // released, but another stream may use it
  std::map<PoolId, int> graphs;
  size_t allocated = 0, reserved = 0, limit = size_t(1) << 30;

  auto& idle_of(const Block* block) { return idle[{block->segment->pool, block->segment->stream}]; }

  void make_idle(Block* block) {
    block->is_used = false;
    for (Block* next : {block->after, block->before}) {
      if (!next || next->is_used) continue;
      idle_of(next).erase(next);
      Block *low = std::min(block, next, [](auto* a, auto* b) { return a->at < b->at; }), *high = low == block ? next : block;
      low->bytes += high->bytes;
      low->after = high->after;
      if (high->after) high->after->before = low;
      delete high;
      block = low;
    }
    idle_of(block).insert(block);
  }

  // Blocks whose other streams have come past them. Nothing may be asked of a stream while anyone captures.
  void collect() {
    if (waiting.empty() || anyone_captures()) return;
    std::vector<Waiting> later;
    for (auto& one : waiting) {
      if (one.events.empty())
        for (int stream : one.block->streams) one.events.push_back(mark(stream));
      bool is_past = true;
      for (auto& event : one.events) {
        std::lock_guard lock(event->mutex);
        is_past &= event->done >= event->recorded;
      }
      if (is_past) {
        one.block->streams.clear();
        make_idle(one.block);
      } else {
        later.push_back(std::move(one));
      }
    }
    waiting.swap(later);
  }

  Block* take(size_t bytes, PoolId pool, int stream) {
    auto& blocks = idle[{pool, stream}];
    Block wanted{nullptr, bytes, nullptr, nullptr, nullptr, false, {}};
    auto found = blocks.lower_bound(&wanted);
    if (found == blocks.end()) return nullptr;
    Block* block = *found;
    blocks.erase(found);
    if (block->bytes > bytes) {
      auto* rest = new Block{block->at + bytes, block->bytes - bytes, block->segment, block, block->after, false, {}};
      if (rest->after) rest->after->before = rest;
      block->after = rest;
      block->bytes = bytes;
      blocks.insert(rest);
    }
    block->is_used = true;
    return block;
  }

  bool grow(size_t bytes, PoolId pool, int stream) {
    bytes = (bytes + SEGMENT - 1) / SEGMENT * SEGMENT;
    if (reserved + bytes > limit) return false;
    char* base = range.take(bytes);
    if (!base) return false;
    memset(bytes_of(base), GARBAGE, bytes);
    auto* segment = new Segment{base, bytes, pool, stream, nullptr};
    segment->first = new Block{segment->base, bytes, segment, nullptr, nullptr, false, {}};
    segments.insert(segment);
    idle_of(segment->first).insert(segment->first);
    reserved += bytes;
    return true;
  }

  // Give back whole segments that nobody uses; those of a pool only when it has no graph left. No work may be under way.
  void shrink() {
    for (auto it = segments.begin(); it != segments.end();) {
      Segment* segment = *it;
      bool is_kept = segment->first->is_used || segment->first->after || graphs.count(segment->pool);
      if (is_kept) {
        ++it;
        continue;
      }
      idle_of(segment->first).erase(segment->first);
      reserved -= segment->bytes;
      range.give_back(segment->base, segment->bytes);
      delete segment->first;
      delete segment;
      it = segments.erase(it);
    }
  }
};

struct Pinned {
  size_t bytes;
  std::set<int> streams;
  bool is_in_graph = false;  // then its address is in a recording, and nobody else gets it
};

Memory& memory = *new Memory;
std::mutex& pinned_mutex = *new std::mutex;
std::map<char*, Pinned>& pinned = *new std::map<char*, Pinned>;
std::vector<std::pair<char*, std::vector<EventRef>>>& pinned_waiting = *new std::vector<std::pair<char*, std::vector<EventRef>>>;

}  // namespace

char* bytes_of(void* at) { return static_cast<char*>(at) + SPAN; }

void* allocate(size_t bytes, int stream) {
  refuse_if_lost();
  if (is_due(Fault::allocation)) return nullptr;
  bytes = (bytes + GRAIN - 1) / GRAIN * GRAIN;
  auto capture = capture_of(stream);
  PoolId pool = capture ? capture->pool : PoolId{0, 0};
  for (bool again : {false, true}) {
    {
      std::lock_guard lock(memory.mutex);
      memory.collect();
      Block* block = memory.take(bytes, pool, stream);
      if (!block && memory.grow(bytes, pool, stream)) block = memory.take(bytes, pool, stream);
      if (block) {
        memory.allocated += block->bytes;
        memory.used[block->at] = block;
        return block->at;
      }
    }
    if (again || anyone_captures()) break;
    empty_cache();
  }
  return nullptr;
}

void release(void* at) {
  std::lock_guard lock(memory.mutex);
  auto found = memory.used.find(at);
  if (found == memory.used.end()) return;
  Block* block = found->second;
  memory.used.erase(found);
  memory.allocated -= block->bytes;
  block->streams.erase(block->segment->stream);
  if (block->streams.empty()) return memory.make_idle(block);
  std::vector<EventRef> events;
  if (!anyone_captures())
    for (int stream : block->streams) events.push_back(mark(stream));
  memory.waiting.push_back({block, std::move(events)});
}

void used_on(void* at, int stream) {
  std::lock_guard lock(memory.mutex);
  auto found = memory.used.find(at);
  if (found != memory.used.end()) found->second->streams.insert(stream);
}

void begin_pool(PoolId pool) {
  std::lock_guard lock(memory.mutex);
  memory.graphs[pool]++;
}

void release_pool(PoolId pool) {
  std::lock_guard lock(memory.mutex);
  if (!--memory.graphs[pool]) memory.graphs.erase(pool);
}

void empty_cache() {
  if (anyone_captures()) return;  // nothing can be waited for now
  wait_for_everything();
  std::lock_guard lock(memory.mutex);
  memory.collect();
  memory.shrink();
}

void limit_memory(size_t bytes) {
  std::lock_guard lock(memory.mutex);
  memory.limit = bytes;
}

MemoryUse memory_use() {
  std::lock_guard lock(memory.mutex);
  MemoryUse use{memory.allocated, memory.reserved, memory.limit, memory.segments.size(), memory.used.size(), {}};
  for (auto* segment : memory.segments) use.pools[segment->pool] += segment->bytes;
  return use;
}

// ---- pinned memory

static void free_pinned() {  // call it with ``pinned_mutex``
  std::vector<std::pair<char*, std::vector<EventRef>>> later;
  for (auto& [at, events] : pinned_waiting) {
    bool is_past = true;
    for (auto& event : events) {
      std::lock_guard lock(event->mutex);
      is_past &= event->done >= event->recorded;
    }
    if (is_past)
      free(at);
    else
      later.emplace_back(at, std::move(events));
  }
  pinned_waiting.swap(later);
}

void* allocate_pinned(size_t bytes) {
  std::lock_guard lock(pinned_mutex);
  free_pinned();
  void* at = nullptr;
  if (posix_memalign(&at, GRAIN, bytes ? bytes : 1)) return nullptr;
  pinned[static_cast<char*>(at)] = {bytes ? bytes : 1, {}};
  return at;
}

void release_pinned(void* at) {
  std::lock_guard lock(pinned_mutex);
  auto found = pinned.find(static_cast<char*>(at));
  if (found == pinned.end()) return;
  std::vector<EventRef> events;
  for (int stream : found->second.streams) events.push_back(mark(stream));
  if (!found->second.is_in_graph) pinned_waiting.emplace_back(found->first, std::move(events));
  pinned.erase(found);
}

bool is_pinned(const void* at) {
  std::lock_guard lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<char*>(const_cast<void*>(at)));
  if (after == pinned.begin()) return false;
  auto& [base, block] = *--after;
  return static_cast<const char*>(at) < base + block.bytes;
}

void pinned_used_on(void* at, int stream) {
  bool is_captured = bool(capture_of(stream));
  std::lock_guard lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<char*>(at));
  if (after == pinned.begin()) return;
  auto& block = (--after)->second;
  block.streams.insert(stream);
  block.is_in_graph |= is_captured;
}

}  // namespace queued
