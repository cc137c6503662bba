#include "frames.h"

#include <algorithm>
#include <cstring>

namespace hst {

namespace {

enum BlockKind { kRaw = 0, kRepeated = 1, kCompressed = 2 };
constexpr int kChecksum = 4, kSingleSegment = 32;  // of a frame's descriptor

uint8_t* put_number(uint8_t* out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) *out++ = static_cast<uint8_t>(value >> (8 * i));
  return out;
}

uint8_t* put_head(uint8_t* out, uint64_t size) {
  out = put_number(out, 0xFD2FB528, 4);
  // Nothing refers back, so a decoder needs room for no more than a block.
  const bool single = size <= Huffman::kMaxBlock;
  const int flag = size >> 32 ? 3 : size >= 65536 + 256 ? 2 : size >= 256 || !single ? 1 : 0;
  *out++ = static_cast<uint8_t>(flag << 6 | (single ? kSingleSegment : 0) | kChecksum);
  if (!single) *out++ = (17 - 10) << 3;  // a window of kMaxBlock
  return put_number(out, flag == 1 ? size - 256 : size, 1 << flag);
}

uint64_t get_number(const uint8_t* at, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= uint64_t{at[i]} << (8 * i);
  return value;
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

bool parse_raw_frame(const uint8_t* frame, size_t size, uint64_t content,
                     std::vector<Block>& blocks, uint32_t& checksum) {
  // The head is the same for all frames of so many bytes but for the window, which says nothing
  // about raw blocks; libzstd writes others than we do.
  if (size < 6 || get_number(frame, 4) != 0xFD2FB528) return false;
  const int descriptor = frame[4], flag = descriptor >> 6;
  const bool single = descriptor & 32;
  const int digits = flag == 0 && !single ? 0 : 1 << flag;
  const size_t head = 5 + !single + digits;
  if ((descriptor & 31) != kChecksum || digits == 0 || size < head) return false;
  const uint64_t said = get_number(frame + head - digits, digits) + (flag == 1 ? 256 : 0);
  if (said != content) return false;
  blocks.clear();
  size_t at = head;
  for (bool last = false; !last;) {
    if (size - at < 3) return false;
    const uint64_t block = get_number(frame + at, 3);
    last = block & 1;
    const size_t n = block >> 3;
    at += 3;
    if ((block >> 1 & 3) != kRaw || n > size - at || n > content) return false;
    blocks.push_back({frame + at, n});
    content -= n;
    at += n;
  }
  if (content != 0 || size - at != 4) return false;
  checksum = static_cast<uint32_t>(get_number(frame + at, 4));
  return true;
}

}  // namespace hst
