// Copies of outputs that callers got, whose memory takes later ones.
#pragma once

#include "ambient.h"
#include "object.h"

namespace gd {

// What tells of a tensor what it is and who holds its memory: the counts of its references are among it.
struct Holding {
  static constexpr int kImpl = 22, kStorage = 12;  // words: no known TensorImpl has fewer, and no StorageImpl
  uint64_t impl[kImpl], storage[kStorage];

  static Holding of(PyObject* tensor);
  bool is_of(PyObject* tensor) const;
};

// The latest two copies of one output. To make a tensor costs more than to fill a small one: a copy that its caller has
// dropped takes the next values, if nobody else holds any of its memory and it is as it was made. Wants the GIL.
class OutputCopies {
 public:
  OutputCopies() = default;
  OutputCopies(const OutputCopies&) = delete;
  OutputCopies& operator=(const OutputCopies&) = delete;
  ~OutputCopies() { clear(); }

  // What tensor.clone() gives, with gradients off: a new reference. Null where torch has to do it, as with clone().
  // The tensor is the same at each call.
  PyObject* copy_of(PyObject* tensor);

  // Drop a copy that can take no values. This may run Python, for whoever holds a weak reference.
  void drop_spent() {
    if (spent_) Ref dropped = std::move(spent_);
  }

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  struct Made {
    Ref tensor;
    void* data;
    Holding holding;
  };
  bool learn(PyObject* tensor);
  void keep(PyObject* copy);

  static size_t all_bytes;  // of all copies in the process

  bool is_learnt_ = false, is_kept_ = false;  // whether it was looked at if copies are kept, and are they
  Imprint source_;                           // of the output
  Form form_;
  const void* from_;
  size_t nbytes_;
  bool is_inference_;  // whether copies are made in inference mode
  Made made_[2];
  int oldest_ = 0;
  Ref spent_;
};

}  // namespace gd
