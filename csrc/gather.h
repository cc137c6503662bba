// Arguments of the gather kernel (gather.cu), shared between host and device code.
#pragma once

#include <stdint.h>

namespace hst {

enum { kGatherPlanes = 32, kGatherThreads = 256 };

struct GatherPlane {
  uint64_t address;
  uint64_t stride_bytes;
};

// The same rows of every plane.
struct GatherArguments {
  uint64_t target;        // where the first row of the first plane goes
  uint64_t target_plane;  // bytes from one plane to the next there
  uint64_t target_row;    // bytes from one row to the next there
  uint64_t row_bytes;
  uint32_t rows;
  uint32_t planes;
  GatherPlane plane[kGatherPlanes];  // address: of the first row that is wanted
};
static_assert(sizeof(GatherArguments) <= 4096, "a kernel takes 4 KiB of arguments");

}  // namespace hst
