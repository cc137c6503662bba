// Gathers rows of several planes into one contiguous place of device memory. One block moves one
// row at a time; a row is a few KiB, so that a block's loads are long and coalesced.
#include "gather.h"

namespace hst {

template <class Unit>
__device__ void gather(const GatherArguments& a) {
  const uint32_t units = a.row_bytes / sizeof(Unit);
  for (uint32_t item = blockIdx.x; item < a.planes * a.rows; item += gridDim.x) {
    const uint32_t plane = item / a.rows;
    const uint64_t row = item - plane * a.rows;
    const GatherPlane source = a.plane[plane];
    const Unit* const __restrict__ from =
        reinterpret_cast<const Unit*>(source.address + row * source.stride_bytes);
    Unit* const __restrict__ to =
        reinterpret_cast<Unit*>(a.target + plane * a.target_plane + row * a.target_row);
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < units; i += kGatherThreads) to[i] = from[i];
  }
}

extern "C" __global__ void __launch_bounds__(kGatherThreads)
    gather16(const __grid_constant__ GatherArguments a) {
  gather<uint4>(a);
}

// For rows whose addresses or lengths are no multiples of 16 bytes.
extern "C" __global__ void __launch_bounds__(kGatherThreads)
    gather2(const __grid_constant__ GatherArguments a) {
  gather<uint16_t>(a);
}

}  // namespace hst
