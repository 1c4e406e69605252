// Freed objects as traps: whoever gives back a reference too many, or writes to a freed object, ends the process there.
//
// Takes the place of Python's allocator for small objects. A freed block is filled with references to a class whose
// destructor ends the process, and is used again only when all memory has been in use.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr size_t kGrain = 16, kMost = 512, kBytes = size_t(24) << 20;  // of blocks, of a block, of each size's memory

// Where a reference to an object may point to: its count, and its class. A block of the collector's has its object
// behind a head of the same size.
struct Head {
  Py_ssize_t count;
  PyTypeObject* type;
};

struct Size {
  size_t block, used = 0;
  std::vector<char*> freed{};  // the first in is the first out
  size_t taken = 0;
};

PyMemAllocatorEx plain;
PyTypeObject trap = {PyVarObject_HEAD_INIT(nullptr, 0)};
char* memory;
std::vector<Size>* sizes;

int standard_error;  // as it is before pytest captures it

// The end: Python's faulthandler tells where.
void end(const char* what) {
  dprintf(standard_error, "%s\n", what);
  std::abort();
}

void spring(PyObject*) { end("a reference to a freed object was given back"); }

bool is_ours(void* block) { return memory <= block && block < memory + kBytes * sizes->size(); }

Size& size_of(void* block) { return (*sizes)[(static_cast<char*>(block) - memory) / kBytes]; }

char* take(Size& size) {
  if (size.used + size.block <= kBytes) {
    char* block = memory + (&size - sizes->data()) * kBytes + size.used;
    size.used += size.block;
    return block;
  }
  if (size.taken == size.freed.size()) return nullptr;
  char* block = size.freed[size.taken++];
  const Head* heads = reinterpret_cast<Head*>(block);
  for (size_t i = 0; i < size.block / kGrain; ++i) {
    if (heads[i].count != 1 || heads[i].type != &trap) end("a freed object was written to");
  }
  if (size.taken > size.freed.size() / 2) {
    size.freed.erase(size.freed.begin(), size.freed.begin() + size.taken);
    size.taken = 0;
  }
  return block;
}

void* allocate(void*, size_t count) {
  char* block = count && count <= kMost ? take((*sizes)[(count - 1) / kGrain]) : nullptr;
  return block ? block : plain.malloc(plain.ctx, count);
}

void* allocate_zeros(void* self, size_t count, size_t each) {
  if (!count || !each || count > kMost || each > kMost || count * each > kMost) {
    return plain.calloc(plain.ctx, count, each);
  }
  void* block = allocate(self, count * each);
  return block ? std::memset(block, 0, count * each) : nullptr;
}

void release(void*, void* block) {
  if (!is_ours(block)) return plain.free(plain.ctx, block);
  Size& size = size_of(block);
  Head* heads = static_cast<Head*>(block);
  for (size_t i = 0; i < size.block / kGrain; ++i) heads[i] = {1, &trap};
  size.freed.push_back(static_cast<char*>(block));
}

void* reallocate(void* self, void* block, size_t count) {
  if (!block) return allocate(self, count);
  if (!is_ours(block)) return plain.realloc(plain.ctx, block, count);
  const size_t had = size_of(block).block;
  if (count && count <= had) return block;
  void* made = allocate(self, count);
  if (!made) return nullptr;
  std::memcpy(made, block, count < had ? count : had);
  release(self, block);
  return made;
}

PyObject* set(PyObject*, PyObject*) {
  sizes = new std::vector<Size>();
  for (size_t block = kGrain; block <= kMost; block += kGrain) sizes->push_back({block});
  constexpr int kKind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = mmap(nullptr, kBytes * sizes->size(), PROT_READ | PROT_WRITE, kKind, -1, 0);
  if (mapped == MAP_FAILED) return PyErr_NoMemory();
  memory = static_cast<char*>(mapped);
  standard_error = dup(STDERR_FILENO);
  trap.tp_name = "freed";
  trap.tp_dealloc = spring;
  PyMem_GetAllocator(PYMEM_DOMAIN_OBJ, &plain);
  PyMemAllocatorEx ours = {nullptr, allocate, allocate_zeros, reallocate, release};
  PyMem_SetAllocator(PYMEM_DOMAIN_OBJ, &ours);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"set", set, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_traps", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__traps() { return PyModule_Create(&definition); }
