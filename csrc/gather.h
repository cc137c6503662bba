// Arguments of the gather kernel (gather.cu), shared between host and device code.
#pragma once

#include <stdint.h>

namespace hst {

enum { kGatherPlanes = 32, kGatherRuns = 128, kGatherThreads = 256 };

// Rows source_row, source_row + 1, … of every plane, to rows target_row, target_row + step, …
struct GatherRun {
  uint32_t source_row;
  uint32_t rows;
  uint32_t target_row;
  uint32_t target_step;
};

struct GatherPlane {
  uint64_t address;
  uint64_t stride_bytes;
};

struct GatherArguments {
  uint64_t target;       // row 0 of plane 0
  uint64_t plane_bytes;  // distance of planes in the target
  uint64_t row_bytes;    // also the distance of rows in the target
  uint32_t planes;
  uint32_t runs;
  uint32_t rows;  // of all runs
  uint32_t zero;
  GatherPlane plane[kGatherPlanes];
  GatherRun run[kGatherRuns];
};
static_assert(sizeof(GatherArguments) <= 4096, "a kernel takes 4 KiB of arguments");

}  // namespace hst
