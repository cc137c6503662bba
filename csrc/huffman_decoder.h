// Reads the Huffman-coded literals of zstd blocks (RFC 8878, 4.2), several bytes at a step. Takes
// any input: what it refuses may still be right, and is for zstd to judge.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hst {

class HuffmanDecoder {
 public:
  static constexpr int kMaxBits = 11;  // of a code
  // For the next kMaxBits bits: the bytes that they begin with, up to six from the lowest on, how
  // many those are, and how many bits they take.
  struct Steps {
    uint64_t bytes[1 << kMaxBits];
    uint8_t count[1 << kMaxBits];
    uint8_t bits[1 << kMaxBits];
  };

  // `decode` may read so many bytes before its input, and behind it.
  static constexpr size_t kSlack = 8, kSlackBehind = 3;

  // Takes in the description of a code, which lies at the beginning of `data`, and returns its
  // length; 0 if it is none.
  size_t describe(const uint8_t* data, size_t size);
  bool described() const { return described_; }
  void forget() { described_ = false; }

  // Decodes one stream, or four with the table of their sizes, into exactly `size` bytes.
  bool decode(const uint8_t* data, size_t data_size, bool four, uint8_t* out, size_t size) const;

 private:
  bool build(const uint8_t* weights, int count);

  Steps steps_;
  uint8_t bits_[256];  // of each byte's code
  bool described_ = false;
};

}  // namespace hst
