#include "frame_reader.h"

#include <algorithm>
#include <cstring>

namespace hst {

namespace {

uint64_t get_number(const uint8_t* at, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value |= uint64_t{at[i]} << (8 * i);
  return value;
}

// Frame, block and literals have heads: more than the decoder may read before its input.
static_assert(HuffmanDecoder::kSlack <= 6 + 3 + 3);
// Behind it come the number of sequences and the checksum.
static_assert(HuffmanDecoder::kSlackBehind <= 1 + 4);

}  // namespace

bool FrameReader::open(const uint8_t* frame, size_t size, uint64_t content) {
  at_ = end_ = nullptr;
  left_ = content;
  last_ = true;
  if (size < 6 + 4 || get_number(frame, 4) != kFrameMagic) return false;
  const int descriptor = frame[4], flag = descriptor >> 6;
  const bool single = descriptor & kSingleSegment;
  // Neither a dictionary nor reserved bits; and a window as large as a block can be, or the
  // content.
  if ((descriptor & 31) != kChecksum) return false;
  if (!single && frame[5] < kBlockWindow) return false;
  const size_t digits = flag == 0 && !single ? 0 : size_t{1} << flag, head = 5 + !single + digits;
  if (digits == 0 || size < head + 4) return false;
  if (get_number(frame + head - digits, digits) + (flag == 1 ? 256 : 0) != content) return false;
  at_ = frame + head;
  end_ = frame + size - 4;
  last_ = false;
  hash_ = XxHash64();
  huffman_.forget();
  return true;
}

bool FrameReader::next(Span& span) {
  if (last_) return false;
  if (!read_block(span)) {
    last_ = true;
    at_ = nullptr;
    return false;
  }
  hash_.update(span.data, span.size);
  left_ -= span.size;
  return true;
}

bool FrameReader::well() const {
  return last_ && left_ == 0 && at_ != nullptr && at_ == end_ &&
         static_cast<uint32_t>(hash_.digest()) == get_number(end_, 4);
}

bool FrameReader::read_block(Span& span) {
  if (end_ - at_ < 3) return false;
  const uint64_t head = get_number(at_, 3);
  last_ = head & 1;
  at_ += 3;
  const int kind = head >> 1 & 3;
  const size_t size = head >> 3, stored = kind == kRepeated ? 1 : size;
  if (stored > static_cast<size_t>(end_ - at_)) return false;
  const Span block{at_, stored};
  at_ += stored;
  if (kind == kCompressed) {
    if (!decode(block, span)) return false;
  } else if (kind == kRaw) {
    span = block;
  } else if (kind == kRepeated && size <= kMaxBlock) {
    std::memset(buffer_.get(), block.data[0], size);
    span = {buffer_.get(), size};
  } else {
    return false;
  }
  return span.size <= std::min<uint64_t>(left_, kMaxBlock);
}

bool FrameReader::decode(Span block, Span& span) {
  if (block.size < 5) return false;
  const int kind = block.data[0] & 3, format = block.data[0] >> 2 & 3;
  const size_t head = format < 2 ? 3 : format + 2;
  const int digits = format < 2 ? 10 : 4 * format + 6;
  const uint64_t sizes = get_number(block.data, head) >> 4, mask = (uint64_t{1} << digits) - 1;
  const size_t size = sizes & mask, coded = sizes >> digits & mask;
  // Huffman-coded literals, and then a zero: no sequences.
  if (kind < 2 || head + coded + 1 != block.size || block.data[block.size - 1] != 0) return false;
  if (size > kMaxBlock) return false;
  const uint8_t* data = block.data + head;
  size_t described = 0;
  if (kind == 2) {
    described = huffman_.describe(data, coded);
    if (described == 0) return false;
  } else if (!huffman_.described()) {
    return false;
  }
  span = {buffer_.get(), size};
  return huffman_.decode(data + described, coded - described, format != 0, buffer_.get(), size);
}

}  // namespace hst
