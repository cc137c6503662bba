// zstd frames (RFC 8878, 3.1.1) with content size and checksum, as a shard has them. A frame of
// bytes that nothing shrinks is written piece by piece, and each piece where it is to lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "huffman.h"
#include "xxhash64.h"

namespace hst {

constexpr uint32_t kFrameMagic = 0xFD2FB528;
constexpr int kChecksum = 4, kSingleSegment = 32;  // of a frame's descriptor
constexpr uint8_t kBlockWindow = (17 - 10) << 3;   // a window of Huffman::kMaxBlock
enum BlockKind { kRaw = 0, kRepeated = 1, kCompressed = 2 };

// A frame of `size` bytes takes no more, and while it is written kSlack more.
size_t frame_bound(uint64_t size);

class RawFrame {
 public:
  static constexpr size_t kMaxBlock = Huffman::kMaxBlock;

  RawFrame(uint64_t size, uint8_t* out);
  // Where the next `size` bytes of the content go, 1 <= size <= kMaxBlock; `put` takes them in.
  uint8_t* room() { return end_ + 3; }
  void put(size_t size);
  // Bytes of the frame; all of its content has been put.
  size_t close();

 private:
  uint8_t* begin_;
  uint8_t* end_;
  uint64_t left_;
  XxHash64 hash_;
};

// `huffman` is the caller's to keep, since it is large.
size_t write_huffman_frame(const uint8_t* data, uint64_t size, const Counts& counts, uint64_t hash,
                           Huffman& huffman, uint8_t* out);

}  // namespace hst
