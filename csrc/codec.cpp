#include "codec.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace hst {

// The row kernels are plain loops that the compiler vectorises, compiled twice: for any CPU, and
// for AVX2, which is chosen at run time. (Not target_clones: its ifuncs need glibc, and sanitizers
// do not survive them.)
#define HST_ROW_KERNEL static inline __attribute__((always_inline)) void
#if defined(__x86_64__)
#define HST_HAVE_AVX2 1
#define HST_AVX2 __attribute__((target("avx2")))
#include <immintrin.h>
#endif

HST_ROW_KERNEL split_row(const uint16_t* __restrict src, size_t n, const uint8_t* __restrict bias,
                         uint8_t* __restrict exponents, uint8_t* __restrict mantissas,
                         ExponentRange& range) {
  uint8_t lowest = range.lowest, highest = range.highest, zeros = range.zeros;
  for (size_t i = 0; i < n; ++i) {
    const uint16_t x = src[i];
    const uint8_t exponent = static_cast<uint8_t>((x >> 7) - bias[i]);
    const uint8_t shifted = static_cast<uint8_t>(exponent + 128);
    const uint8_t zero = static_cast<uint8_t>((x & 0x7fff) == 0 ? 255 : 0);
    const uint8_t low = shifted | zero, high = shifted & static_cast<uint8_t>(~zero);
    lowest = low < lowest ? low : lowest;
    highest = high > highest ? high : highest;
    zeros |= zero;
    exponents[i] = exponent;
    mantissas[i] = static_cast<uint8_t>((x & 127) | (x >> 8 & 128));
  }
  range = {lowest, highest, zeros};
}

HST_ROW_KERNEL join_row(const uint8_t* __restrict exponents, const uint8_t* __restrict mantissas,
                        const uint8_t* __restrict bias, size_t n, uint16_t* __restrict dst) {
  for (size_t i = 0; i < n; ++i) {
    const uint16_t exponent = static_cast<uint8_t>(exponents[i] + bias[i]);
    const uint16_t mantissa = mantissas[i];
    dst[i] = static_cast<uint16_t>(exponent << 7 | (mantissa & 127) | (mantissa & 128) << 8);
  }
}

HST_ROW_KERNEL odd_row(const uint16_t* __restrict src, size_t n, uint8_t& odd) {
  uint16_t any = 0, differs = 0, highest = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint16_t magnitude = src[i] & 0x7fff;
    any |= magnitude;
    differs |= src[i] ^ src[0];
    highest = magnitude > highest ? magnitude : highest;
  }
  odd |= highest >= 0x7f80 ? kNotFinite : 0;
  odd |= any == 0 ? kZero : differs == 0 && n > 1 ? kConstant : 0;
}

#define HST_SPLIT_ROWS(name, attributes)                                                       \
  attributes static ExponentRange name(const uint8_t* src, size_t rows, size_t hidden,         \
                                       size_t stride, const uint8_t* bias, uint8_t* exponents, \
                                       uint8_t* mantissas) {                                   \
    ExponentRange range;                                                                       \
    for (size_t r = 0; r < rows; ++r) {                                                        \
      split_row(reinterpret_cast<const uint16_t*>(src + r * stride), hidden, bias,             \
                exponents + r * hidden, mantissas + r * hidden, range);                        \
    }                                                                                          \
    return range;                                                                              \
  }
#define HST_JOIN_ROWS(name, attributes)                                                      \
  attributes static void name(const uint8_t* exponents, const uint8_t* mantissas,            \
                              const uint8_t* bias, uint8_t* dst, size_t rows, size_t hidden, \
                              size_t stride) {                                               \
    for (size_t r = 0; r < rows; ++r) {                                                      \
      join_row(exponents + r * hidden, mantissas + r * hidden, bias, hidden,                 \
               reinterpret_cast<uint16_t*>(dst + r * stride));                               \
    }                                                                                        \
  }

#define HST_ODD_ROWS(name, attributes)                                                       \
  attributes static void name(const uint8_t* src, size_t rows, size_t hidden, size_t stride, \
                              uint8_t* odd) {                                                \
    for (size_t r = 0; r < rows; ++r) {                                                      \
      odd_row(reinterpret_cast<const uint16_t*>(src + r * stride), hidden, odd[r]);          \
    }                                                                                        \
  }

HST_SPLIT_ROWS(split_any, )
HST_JOIN_ROWS(join_any, )
HST_ODD_ROWS(odd_any, )
#ifdef HST_HAVE_AVX2
HST_SPLIT_ROWS(split_avx2, HST_AVX2)
HST_JOIN_ROWS(join_avx2, HST_AVX2)
HST_ODD_ROWS(odd_avx2, HST_AVX2)

// As join_avx2, its words written past the caches: a line that is written whole need not be read
// first. Rows begin at multiples of 32 bytes.
HST_AVX2 static void join_stream(const uint8_t* exponents, const uint8_t* mantissas,
                                 const uint8_t* bias, uint8_t* dst, size_t rows, size_t hidden,
                                 size_t stride) {
  const auto load = [](const uint8_t* p)
                        HST_AVX2 { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
  const __m256i low = _mm256_set1_epi16(127), sign = _mm256_set1_epi16(128);
  for (size_t r = 0; r < rows; ++r) {
    size_t i = 0;
    for (; i + 16 <= hidden; i += 16) {
      const __m256i e = _mm256_cvtepu8_epi16(_mm_add_epi8(load(exponents + i), load(bias + i)));
      const __m256i m = _mm256_cvtepu8_epi16(load(mantissas + i));
      const __m256i signs = _mm256_slli_epi16(_mm256_and_si256(m, sign), 8);
      const __m256i word = _mm256_or_si256(_mm256_slli_epi16(e, 7), _mm256_and_si256(m, low));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 2 * i), _mm256_or_si256(word, signs));
    }
    join_row(exponents + i, mantissas + i, bias + i, hidden - i,
             reinterpret_cast<uint16_t*>(dst + 2 * i));
    exponents += hidden;
    mantissas += hidden;
    dst += stride;
  }
  _mm_sfence();  // such stores are not in order with others
}

static const bool kAvx2 = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") != 0;
}();
#endif

ExponentRange split_planes(const uint8_t* src, size_t rows, size_t hidden, size_t stride_bytes,
                           const uint8_t* bias, uint8_t* exponents, uint8_t* mantissas) {
#ifdef HST_HAVE_AVX2
  if (kAvx2) return split_avx2(src, rows, hidden, stride_bytes, bias, exponents, mantissas);
#endif
  return split_any(src, rows, hidden, stride_bytes, bias, exponents, mantissas);
}

void join_planes(const uint8_t* exponents, const uint8_t* mantissas, const uint8_t* bias,
                 uint8_t* dst, size_t rows, size_t hidden, size_t stride_bytes, bool stream) {
#ifdef HST_HAVE_AVX2
  if (kAvx2 && stream && (reinterpret_cast<uintptr_t>(dst) | stride_bytes) % 32 == 0) {
    return join_stream(exponents, mantissas, bias, dst, rows, hidden, stride_bytes);
  }
  if (kAvx2) return join_avx2(exponents, mantissas, bias, dst, rows, hidden, stride_bytes);
#endif
  join_any(exponents, mantissas, bias, dst, rows, hidden, stride_bytes);
}

void odd_rows(const uint8_t* src, size_t rows, size_t hidden, size_t stride_bytes, uint8_t* odd) {
#ifdef HST_HAVE_AVX2
  if (kAvx2) return odd_avx2(src, rows, hidden, stride_bytes, odd);
#endif
  odd_any(src, rows, hidden, stride_bytes, odd);
}

void median_exponents(const uint8_t* src, size_t rows, size_t hidden, size_t stride_bytes,
                      uint8_t* medians) {
  // Bit by bit from the highest: with so many exponents below a value, is the median below it too?
  // All columns of a strip at once, so that the loops vectorise and its exponents stay in a cache.
  constexpr size_t kColumns = 128;
  std::vector<uint8_t> exponents(rows * kColumns);
  for (size_t first = 0; first < hidden; first += kColumns) {
    const size_t columns = std::min(kColumns, hidden - first);
    for (size_t r = 0; r < rows; ++r) {
      const uint16_t* row = reinterpret_cast<const uint16_t*>(src + r * stride_bytes) + first;
      for (size_t c = 0; c < columns; ++c) {
        exponents[r * kColumns + c] = static_cast<uint8_t>(row[c] >> 7);
      }
    }
    uint8_t found[kColumns] = {};
    for (int bit = 128; bit != 0; bit >>= 1) {
      uint8_t value[kColumns];
      uint32_t below[kColumns] = {};
      for (size_t c = 0; c < kColumns; ++c) value[c] = static_cast<uint8_t>(found[c] | bit);
      for (size_t r = 0; r < rows; ++r) {
        const uint8_t* row = exponents.data() + r * kColumns;
        for (size_t c = 0; c < kColumns; ++c) below[c] += row[c] < value[c];
      }
      for (size_t c = 0; c < kColumns; ++c) {
        if (below[c] < (rows + 1) / 2) found[c] = value[c];
      }
    }
    std::copy(found, found + columns, medians + first);
  }
}

}  // namespace hst
