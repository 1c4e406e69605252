// The kernels of copies.cu for the emulated driver.
#include "kernels.h"

#include <cstddef>

size_t sizeOfCopies() { return sizeof(CopiedInputs); }
void runCopies(const void* inputs, unsigned columns, unsigned rows, unsigned threads) {
  run(copy_inputs, *static_cast<const CopiedInputs*>(inputs), columns, rows, threads);
}
void runGives(const void* places, unsigned columns, unsigned rows, unsigned threads) {
  run(give_outputs, static_cast<const Place*>(places), columns, rows, threads);
}
