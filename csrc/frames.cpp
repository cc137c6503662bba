#include "frames.h"

#include <algorithm>
#include <cstring>

namespace hst {

namespace {

uint8_t* put_number(uint8_t* out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) *out++ = static_cast<uint8_t>(value >> (8 * i));
  return out;
}

uint8_t* put_head(uint8_t* out, uint64_t size) {
  out = put_number(out, kFrameMagic, 4);
  // Nothing refers back, so a decoder needs room for no more than a block.
  const bool single = size <= Huffman::kMaxBlock;
  const int flag = size >> 32 ? 3 : size >= 65536 + 256 ? 2 : size >= 256 || !single ? 1 : 0;
  *out++ = static_cast<uint8_t>(flag << 6 | (single ? kSingleSegment : 0) | kChecksum);
  if (!single) *out++ = kBlockWindow;
  return put_number(out, flag == 1 ? size - 256 : size, 1 << flag);
}

void put_block(uint8_t* at, BlockKind kind, uint64_t size, bool last) {
  put_number(at, last | kind << 1 | size << 3, 3);
}

}  // namespace

size_t frame_bound(uint64_t size) { return size + 3 * (size / 4096 + 1) + 18; }

RawFrame::RawFrame(uint64_t size, uint8_t* out)
    : begin_(out), end_(put_head(out, size)), left_(size) {
  if (size == 0) {
    put_block(end_, kRaw, 0, true);
    end_ += 3;
  }
}

void RawFrame::put(size_t size) {
  left_ -= size;
  put_block(end_, kRaw, size, left_ == 0);
  hash_.update(end_ + 3, size);
  end_ += 3 + size;
}

size_t RawFrame::close() {
  end_ = put_number(end_, hash_.digest(), 4);
  return end_ - begin_;
}

size_t write_huffman_frame(const uint8_t* data, uint64_t size, const Counts& counts, uint64_t hash,
                           Huffman& huffman, uint8_t* out) {
  uint8_t* end = put_head(out, size);
  const bool coded = huffman.build(counts);
  const bool repeated = counts.distinct() == 1;
  bool described = false;
  uint64_t at = 0;
  do {
    const size_t n = std::min<uint64_t>(size - at, Huffman::kMaxBlock);
    const bool last = at + n == size;
    size_t packed = coded && n != 0 ? huffman.encode(data + at, n, !described, end + 3) : n;
    if (repeated) {
      put_block(end, kRepeated, n, last);
      end[3] = data[0];
      packed = 1;
    } else if (packed < n) {
      put_block(end, kCompressed, packed, last);
      described = true;
    } else {
      put_block(end, kRaw, n, last);
      std::memcpy(end + 3, data + at, n);
      packed = n;
    }
    end += 3 + packed;
    at += n;
  } while (at < size);
  end = put_number(end, hash, 4);
  return end - out;
}

}  // namespace hst
