// A shard's zstd frames back into bytes and bf16 rows: the inverse of pack.h. False for frames that
// are broken or not of our kind, which zstd is to judge; the destination then holds anything.
#pragma once

#include <cstddef>
#include <cstdint>

#include "frame_reader.h"

namespace hst {

bool unpack_frame(Span frame, uint8_t* dst, uint64_t size);
// Joins what the two frames of a plane hold, which is never written anywhere else. `stream` as of
// join_planes.
bool unpack_plane(Span exponents, Span mantissas, const uint8_t* bias, uint8_t* dst, size_t rows,
                  size_t hidden, size_t stride_bytes, bool stream = false);

}  // namespace hst
