// Reads a zstd frame (RFC 8878, 3.1.1) as a shard has them, block by block: raw ones where they
// lie, the others from a buffer. Takes any bytes, and refuses what a shard's writer has no use for,
// such as matches: that may still be right, and is for zstd to judge.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "frames.h"
#include "huffman_decoder.h"
#include "xxhash64.h"

namespace hst {

struct Span {
  const uint8_t* data;
  size_t size;
};

class FrameReader {
 public:
  static constexpr size_t kMaxBlock = RawFrame::kMaxBlock;

  // False unless the frame has a checksum and says that it holds `content` bytes.
  bool open(const uint8_t* frame, size_t size, uint64_t content);
  // The next bytes of the content, which stay until the next call; false when there are no more.
  bool next(Span& span);
  // Then: whether that was all of the content, with nothing behind it and the right checksum.
  bool well() const;

 private:
  bool read_block(Span& span);
  bool decode(Span block, Span& span);

  const uint8_t* at_ = nullptr;
  const uint8_t* end_ = nullptr;  // where the checksum is
  uint64_t left_ = 0;
  bool last_ = true;
  XxHash64 hash_;
  HuffmanDecoder huffman_;
  std::unique_ptr<uint8_t[]> buffer_{new uint8_t[kMaxBlock]};
};

}  // namespace hst
