// What a hit copies: a kernel puts all its inputs into the graph's buffers and pads them there, and another one, the last
// of the graph, puts the outputs where the hit wants them.
//
// The device's compiler makes the kernels when they are first wanted (backends/cuda.py); the core (native/core/plan.cpp)
// reads the types alone, and launches the first one. They need no headers.

// One input: the bytes of a batch, and what is put behind them.
struct alignas(16) CopiedInput {
  unsigned char fill[16];        // what padding holds where ``row`` is 0: these bytes again and again, from ``target`` on
  const void* source;
  void* target;
  unsigned long long real, all;  // bytes of the batch, and of the batch with its padding
  unsigned long long row;        // bytes of the last row, which padding repeats; else 0
};

// Some bytes on the device: an output, or where a hit wants it.
struct Place {
  void* address;
  unsigned long long bytes;
};

constexpr unsigned kMostInputs = 16, kMostOutputs = 8;  // a parameter of a kernel takes at most 4 KiB

struct CopiedInputs {
  CopiedInput each[kMostInputs];
  Place outputs[kMostOutputs];
  Place* wanted;  // of the graph, where those are noted; null: none is wanted
};

#if defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__global__)

template <class Unit>
__device__ void copy_units(const CopiedInput& input) {
  const Unit* source = static_cast<const Unit*>(input.source);
  Unit* target = static_cast<Unit*>(input.target);
  const unsigned long long real = input.real / sizeof(Unit), row = input.row / sizeof(Unit);
  const Unit* fill = reinterpret_cast<const Unit*>(input.fill);  // a unit may be a part of an element
  const unsigned long long step = gridDim.x * blockDim.x;
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < input.all / sizeof(Unit); i += step) {
    target[i] = i < real ? source[i] : row ? source[real - row + (i - real) % row] : fill[i % (16 / sizeof(Unit))];
  }
}

// The blocks of a column copy one input, in the largest units that fit its addresses and lengths.
__device__ void copy_input(const CopiedInput& input) {
  const auto address = [](const void* at) { return reinterpret_cast<unsigned long long>(at); };
  const unsigned long long bits = address(input.source) | address(input.target) | input.real | input.all | input.row;
  if (bits % 16 == 0) {
    copy_units<uint4>(input);
  } else if (bits % 8 == 0) {
    copy_units<unsigned long long>(input);
  } else if (bits % 4 == 0) {
    copy_units<unsigned int>(input);
  } else if (bits % 2 == 0) {
    copy_units<unsigned short>(input);
  } else {
    copy_units<unsigned char>(input);
  }
}

extern "C" __global__ void copy_inputs(const __grid_constant__ CopiedInputs inputs) {
  if (inputs.wanted && !blockIdx.x && !blockIdx.y && threadIdx.x < kMostOutputs) {
    inputs.wanted[threadIdx.x] = inputs.outputs[threadIdx.x];
  }
  copy_input(inputs.each[blockIdx.y]);
}

// ``places``: what the graph has written, for each column, and behind that where it is wanted.
extern "C" __global__ void give_outputs(const Place* places) {
  const Place source = places[blockIdx.y], wanted = places[kMostOutputs + blockIdx.y];
  const unsigned long long bytes = wanted.bytes < source.bytes ? wanted.bytes : source.bytes;
  copy_input(CopiedInput{{}, source.address, wanted.address, bytes, bytes, 0});
}

#endif
