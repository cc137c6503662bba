#include "pack.h"

#include <algorithm>

#include "codec.h"
#include "frames.h"

namespace hst {

size_t packed_bound(size_t planes, uint64_t size) {
  return planes * 2 * frame_bound(size) + Huffman::kSlack;
}

namespace {

// So many bytes of each kind stay in the nearest cache for all that is done with them.
constexpr size_t kTile = 32 << 10;
static_assert(kTile <= RawFrame::kMaxBlock);
// To count every exponent would take as long as to code it. A part of each tile tells as much.
constexpr size_t kSampled = 8, kLeastSampled = 128 << 10;
// A code for an exponent that was not counted and may have occurred costs 1/2048 of the room.
constexpr int kMostUnseen = 32;

// Both kinds of bytes of one plane, tile by tile.
class PlanePacker {
 public:
  PlanePacker(uint64_t size, size_t hidden, const uint8_t* bias, uint8_t* exponents, uint8_t* out)
      : size_(size),
        hidden_(hidden),
        bias_(bias),
        sampled_(size >= kLeastSampled ? kSampled : 1),
        at_(exponents),
        begin_(exponents),
        out_(out),
        raw_(size, out) {}

  void add(const Piece& p, size_t plane) {
    const size_t width = std::min(hidden_, kTile), tile_rows = kTile / width;
    for (uint64_t row = 0; row < p.rows;) {
      const size_t n = std::min<uint64_t>(p.rows - row, tile_rows - held_ / width);
      const uint8_t* src = p.data + plane * p.plane_bytes + row * p.row_bytes;
      // Whole rows, or parts of one that is longer than a tile.
      for (size_t first = 0; first < hidden_; first += width) {
        const size_t columns = std::min(width, hidden_ - first);
        range_.add(split_planes(src + 2 * first, n, columns, p.row_bytes, bias_ + first,
                                at_ + held_, raw_.room() + held_));
        held_ += n * columns;
        if (width < hidden_) close_tile();
      }
      row += n;
      if (held_ == tile_rows * width) close_tile();
    }
  }

  std::pair<size_t, size_t> close() {
    close_tile();
    static thread_local Huffman huffman;
    if (sampled_ > 1) complete_counts();
    const size_t raw = raw_.close();
    uint8_t* const frame = out_ + raw;
    return {raw, write_huffman_frame(begin_, size_, counts_, hash_.digest(), huffman, frame)};
  }

 private:
  void close_tile() {
    if (held_ == 0) return;
    raw_.put(held_);
    hash_.update(at_, held_);
    const size_t part = held_ / sampled_;
    counts_.add(at_ + tiles_++ % sampled_ * part, part);
    at_ += held_;
    held_ = 0;
  }

  void complete_counts() {
    bool possible[256] = {};
    for (int e = range_.lowest; e <= range_.highest; ++e)
      possible[static_cast<uint8_t>(e - 128)] = true;
    for (size_t c = 0; range_.zeros && c < hidden_; ++c)
      possible[static_cast<uint8_t>(-bias_[c])] = true;
    if (!counts_.cover(possible, kMostUnseen)) {
      counts_ = {};
      counts_.add(begin_, size_);
    }
  }

  const uint64_t size_;
  const size_t hidden_;
  const uint8_t* const bias_;
  const size_t sampled_;
  uint8_t* at_;
  uint8_t* const begin_;
  size_t held_ = 0;  // in the tile
  size_t tiles_ = 0;
  uint8_t* const out_;
  RawFrame raw_;
  XxHash64 hash_;
  Counts counts_;
  ExponentRange range_;
};

}  // namespace

std::pair<size_t, size_t> pack_plane(const std::vector<Piece>& pieces, size_t plane, size_t hidden,
                                     const uint8_t* bias, uint8_t* out) {
  static thread_local std::vector<uint8_t> bytes;
  uint64_t rows = 0;
  for (const Piece& p : pieces) rows += p.rows;
  if (bytes.size() < rows * hidden) bytes.resize(rows * hidden);
  PlanePacker packer(rows * hidden, hidden, bias, bytes.data(), out);
  for (const Piece& p : pieces) packer.add(p, plane);
  return packer.close();
}

}  // namespace hst
