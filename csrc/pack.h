// Chunks of bf16 rows into zstd frames, as FORMAT.md says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace hst {

// A part of a chunk: `rows` rows of each plane.
struct Piece {
  const uint8_t* data;  // of the first plane
  uint64_t plane_bytes;
  uint64_t row_bytes;
  uint64_t rows;
};
// Bytes that may be touched when so many planes of `size` words are packed one behind another.
size_t packed_bound(size_t planes, uint64_t size);
// One plane of `pieces` into two zstd frames, one behind the other: mantissas as they are, and
// exponents, Huffman-coded. (In this order both are written where they stay: how long the first
// will be is certain.) Returns the bytes of each. Keeps memory of the size of a plane for the
// thread's next call.
std::pair<size_t, size_t> pack_plane(const std::vector<Piece>& pieces, size_t plane, size_t hidden,
                                     const uint8_t* bias, uint8_t* out);

}  // namespace hst
