// A Huffman coder that writes the literals of zstd blocks (RFC 8878, 3.1.1.3.1 and 4.2): any zstd
// decoder reads them. For bytes without matches, which the exponents of hidden states are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace hst {

struct Counts {
  uint32_t of[256] = {};
  void add(const uint8_t* data, size_t size);
  // Counts as seen once each byte that is possible; false, and the counts are of no use, when more
  // than `most` of them were not seen.
  bool cover(const bool possible[256], int most);
  int distinct() const;
};

class Huffman {
 public:
  static constexpr size_t kMaxBlock = 128 << 10;
  // What `encode` may write beyond the bytes that it was given.
  static constexpr size_t kSlack = kMaxBlock / 2 + 256;

  // Makes the code of these counts. False when there is none that would be of use: fewer than two
  // bytes occur, or the description of the code is too long for zstd.
  bool build(const Counts& counts);

  // A block's content for `size` bytes, 1 <= size <= kMaxBlock, all of which the counts have; with
  // the description of the code, or for a decoder that has it from a block before. Returns its
  // length, which may be more than `size`.
  size_t encode(const uint8_t* data, size_t size, bool with_code, uint8_t* out) const;

 private:
  uint8_t bits_[256];
  // For two bytes that follow one another: code << 8 | length. Only those that occur are filled in.
  std::unique_ptr<uint32_t[]> pairs_{new uint32_t[1 << 16]};
  uint32_t single_[256];
  uint8_t description_[128];
  size_t description_size_ = 0;
};

}  // namespace hst
