// bf16 words apart into planes of bytes, and together again. Pure functions on memory.
//
//   word          s eeeeeeee mmmmmmm
//   exponent      eeeeeeee - bias[column]   (mod 256)
//   mantissa      s mmmmmmm
//
// Source and destination are rows of `hidden` words, `stride_bytes` apart; planes are contiguous.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hst {

// Exponent bytes of words other than 0.0, as signed numbers plus 128; and whether there was a 0.0.
struct ExponentRange {
  uint8_t lowest = 255, highest = 0, zeros = 0;
  void add(ExponentRange other) {
    lowest = other.lowest < lowest ? other.lowest : lowest;
    highest = other.highest > highest ? other.highest : highest;
    zeros |= other.zeros;
  }
};
ExponentRange split_planes(const uint8_t* src, size_t rows, size_t hidden, size_t stride_bytes,
                           const uint8_t* bias, uint8_t* exponents, uint8_t* mantissas);
// `stream`: write past the caches, for a destination that is larger than they are.
void join_planes(const uint8_t* exponents, const uint8_t* mantissas, const uint8_t* bias,
                 uint8_t* dst, size_t rows, size_t hidden, size_t stride_bytes,
                 bool stream = false);
// What is odd about each row of words: a sum of these.
enum Odd : uint8_t { kZero = 1, kConstant = 2, kNotFinite = 4 };
void odd_rows(const uint8_t* src, size_t rows, size_t hidden, size_t stride_bytes, uint8_t* odd);
// The lower median of each column's exponents. rows >= 1.
void median_exponents(const uint8_t* src, size_t rows, size_t hidden, size_t stride_bytes,
                      uint8_t* medians);

}  // namespace hst
