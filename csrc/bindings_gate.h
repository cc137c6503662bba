// The planes of one forward pass, as Python holds them.
#pragma once

#include <nanobind/nanobind.h>

#include "copier.h"

namespace hst {

inline constexpr int kHostMemory = -1;

struct Planes : DevicePlanes {
  int device = kHostMemory;  // else the ordinal of the CUDA device that all of them lie on
  nanobind::object owners;   // keep the memory alive
};

inline cuda::Stream as_stream(uintptr_t handle) { return reinterpret_cast<cuda::Stream>(handle); }

}  // namespace hst
