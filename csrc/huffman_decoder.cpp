#include "huffman_decoder.h"

#include <algorithm>
#include <cstring>

namespace hst {

namespace {

constexpr int kMaxStateBits = 6;  // of the states that pack a description
constexpr int kMaxWeight = 11;
constexpr int kBytesAStep = 6;

int highest_bit(uint32_t value) { return 31 - __builtin_clz(value); }

// Bits from the lowest on, as the shares of a description lie; beyond the end there are zeros.
class ForwardBits {
 public:
  ForwardBits(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint32_t peek(int bits) const {
    uint32_t word = 0;
    for (size_t i = 0; i < 3; ++i) {
      const size_t at = (at_ >> 3) + i;
      if (at < size_) word |= uint32_t{data_[at]} << (8 * i);
    }
    return word >> (at_ & 7) & ((1u << bits) - 1);
  }
  void skip(int bits) { at_ += bits; }
  size_t bytes() const { return (at_ + 7) >> 3; }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

// Bits from the last one on, below the mark that ends a stream.
class BackwardBits {
 public:
  BackwardBits(const uint8_t* data, size_t size) : data_(data) {
    if (size != 0 && data[size - 1] != 0) left_ = 8 * (size - 1) + highest_bit(data[size - 1]);
  }
  int64_t left() const { return left_; }
  uint32_t take(int bits) {  // bits <= left()
    uint32_t value = 0;
    for (; bits != 0; --bits) {
      --left_;
      value = value << 1 | (data_[left_ >> 3] >> (left_ & 7) & 1);
    }
    return value;
  }

 private:
  const uint8_t* data_;
  int64_t left_ = -1;  // no mark
};

// RFC 8878, 4.1.1: how many of the states stand for each weight. Returns the bytes it took, 0 if
// it is no such table.
size_t read_shares(const uint8_t* data, size_t size, int* shares, int* state_bits) {
  ForwardBits bits(data, size);
  *state_bits = static_cast<int>(bits.peek(4)) + 5;
  bits.skip(4);
  if (*state_bits > kMaxStateBits) return 0;
  int left = 1 << *state_bits;
  for (int w = 0; left > 0; ++w) {
    if (w > kMaxWeight) return 0;
    // A value of 0 .. left + 1; the small ones take a bit less.
    const int wide = highest_bit(left + 1) + 1, small = (1 << wide) - 2 - left;
    int value = static_cast<int>(bits.peek(wide - 1));
    if (value < small) {
      bits.skip(wide - 1);
    } else {
      value = static_cast<int>(bits.peek(wide));
      bits.skip(wide);
      if (value >= 1 << (wide - 1)) value -= small;
    }
    // Less than one in the table, -1, has one state, but in a place of its own; and zeros have
    // more to follow. Nobody who packs exponents needs either.
    if (value < 2) return 0;
    shares[w] = value - 1;
    left -= value - 1;
  }
  return left == 0 && bits.bytes() <= size ? bits.bytes() : 0;
}

// Weights that two states have packed, in turns. Returns how many, 0 if they are broken.
int unpack_weights(const uint8_t* data, size_t size, uint8_t* weights) {
  int shares[kMaxWeight + 1] = {}, state_bits;
  const size_t head = read_shares(data, size, shares, &state_bits);
  if (head == 0) return 0;
  const int states = 1 << state_bits;
  uint8_t weight_of[1 << kMaxStateBits];
  for (int w = 0, at = 0; w <= kMaxWeight; ++w) {
    for (int i = 0; i < shares[w]; ++i) {
      weight_of[at] = static_cast<uint8_t>(w);
      at = (at + (states >> 1) + (states >> 3) + 3) & (states - 1);
    }
  }
  int next[kMaxWeight + 1], width[1 << kMaxStateBits], base[1 << kMaxStateBits];
  std::copy(shares, shares + kMaxWeight + 1, next);
  for (int s = 0; s < states; ++s) {
    const int n = next[weight_of[s]]++;
    width[s] = state_bits - highest_bit(n);
    base[s] = (n << width[s]) - states;
  }

  BackwardBits bits(data + head, size - head);
  if (bits.left() < 2 * state_bits) return 0;
  int state[2];
  for (int& s : state) s = static_cast<int>(bits.take(state_bits));
  for (int count = 0; count < 254; ++count) {
    int& s = state[count & 1];
    weights[count] = weight_of[s];
    if (bits.left() < width[s]) {
      weights[count + 1] = weight_of[state[~count & 1]];
      return count + 2;
    }
    s = base[s] + static_cast<int>(bits.take(width[s]));
  }
  return 0;
}

using Steps = HuffmanDecoder::Steps;

// One stream, from its last bit to its first.
struct Stream {
  uint64_t word = 0;            // the next bit is its highest; the lowest one that is set is a mark
  const uint8_t* at = nullptr;  // what `word` was read from
  const uint8_t* begin = nullptr;
  uint8_t* out = nullptr;
  uint8_t* end = nullptr;

  // Not empty, and its last byte not 0. Of a short one, the bytes before it are read too.
  void open(const uint8_t* data, size_t size) {
    begin = data;
    at = data + size - 8;
    fill(8 - highest_bit(data[size - 1]));
  }
  inline __attribute__((always_inline)) void fill(int used) {
    std::memcpy(&word, at, 8);
    word = (word | 1) << used;
  }
  inline __attribute__((always_inline)) void step(const Steps& steps) {
    const size_t i = word >> (64 - HuffmanDecoder::kMaxBits);
    std::memcpy(out, &steps.bytes[i], 8);
    out += steps.count[i];
    word <<= steps.bits[i];
  }
  inline __attribute__((always_inline)) void refill() {
    const int used = __builtin_ctzll(word);
    at -= used >> 3;
    fill(used & 7);
  }
  // How often five steps and a refill stay inside of both sides for sure.
  int64_t rounds() const {
    return std::min<int64_t>(at < begin ? 0 : (at - begin) / 7 + 1,
                             (end - out - 2) / (5 * kBytesAStep));
  }
  int64_t bits_left() const { return 8 * (at - begin) + 64 - __builtin_ctzll(word); }
};

template <int kStreams>
static inline __attribute__((always_inline)) void run(const Steps& steps, Stream* streams) {
  Stream s[kStreams];
  for (int k = 0; k < kStreams; ++k) s[k] = streams[k];
  for (;;) {
    int64_t rounds = s[0].rounds();
    for (int k = 1; k < kStreams; ++k) rounds = std::min(rounds, s[k].rounds());
    if (rounds <= 0) break;
    for (; rounds != 0; --rounds) {
#pragma GCC unroll 5
      for (int i = 0; i < 5; ++i) {
#pragma GCC unroll 4
        for (int k = 0; k < kStreams; ++k) s[k].step(steps);
      }
#pragma GCC unroll 4
      for (int k = 0; k < kStreams; ++k) s[k].refill();
    }
  }
  for (int k = 0; k < kStreams; ++k) streams[k] = s[k];
}

// Compiled twice: BMI2 has shifts that cost half.
using Run = void (*)(const Steps&, Stream*);
void run_four_any(const Steps& steps, Stream* streams) { run<4>(steps, streams); }
void run_one_any(const Steps& steps, Stream* stream) { run<1>(steps, stream); }
#if defined(__x86_64__)
__attribute__((target("bmi,bmi2"))) void run_four_bmi2(const Steps& steps, Stream* streams) {
  run<4>(steps, streams);
}
__attribute__((target("bmi,bmi2"))) void run_one_bmi2(const Steps& steps, Stream* stream) {
  run<1>(steps, stream);
}
const bool kBmi2 = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}();
const Run kRunFour = kBmi2 ? run_four_bmi2 : run_four_any,
          kRunOne = kBmi2 ? run_one_bmi2 : run_one_any;
#else
const Run kRunFour = run_four_any, kRunOne = run_one_any;
#endif

}  // namespace

bool HuffmanDecoder::build(const uint8_t* weights, int count) {
  // The weight of the last byte is not told: it makes the code complete.
  uint32_t used = 0;
  for (int b = 0; b < count; ++b) {
    if (weights[b] > kMaxWeight) return false;
    used += 1u << weights[b] >> 1;
  }
  if (used == 0) return false;
  const int longest = highest_bit(used) + 1;
  const uint32_t left = (1u << longest) - used;
  if (longest > kMaxBits || (left & (left - 1)) != 0) return false;
  const auto bits_of = [&](int b) {
    const int weight = b < count ? weights[b] : highest_bit(left) + 1;
    return weight ? longest + 1 - weight : 0;
  };

  int longest_ones = 0;  // a code that is complete has two of them at least
  for (int b = 0; b <= count; ++b) longest_ones += bits_of(b) == longest;
  if (longest_ones < 2) return false;

  // Codes go up from the longest to the shortest, and with the byte among those of one length.
  uint32_t at = 0;
  uint8_t first[1 << kMaxBits];
  for (int length = longest; length > 0; --length) {
    for (int b = 0; b <= count; ++b) {
      if (bits_of(b) != length) continue;
      const uint32_t room = 1u << (kMaxBits - length);
      std::memset(first + at, b, room);
      at += room;
    }
  }
  for (int b = 0; b <= count; ++b) bits_[b] = static_cast<uint8_t>(bits_of(b));

  for (uint32_t i = 0; i < 1 << kMaxBits; ++i) {
    uint64_t bytes = 0, taken = 0, n = 0;
    while (n < kBytesAStep) {
      const uint8_t byte = first[i << taken & ((1 << kMaxBits) - 1)];
      if (taken + bits_[byte] > kMaxBits) break;
      bytes |= uint64_t{byte} << (8 * n++);
      taken += bits_[byte];
    }
    steps_.bytes[i] = bytes;
    steps_.count[i] = static_cast<uint8_t>(n);
    steps_.bits[i] = static_cast<uint8_t>(taken);
  }
  return true;
}

size_t HuffmanDecoder::describe(const uint8_t* data, size_t size) {
  described_ = false;
  if (size == 0) return 0;
  uint8_t weights[256];
  const int head = data[0];
  size_t length;
  int count;
  if (head >= 128) {
    count = head - 127;
    length = 1 + (count + 1) / 2;
    if (length > size) return 0;
    for (int i = 0; i < count; ++i) weights[i] = data[1 + i / 2] >> (i & 1 ? 0 : 4) & 15;
  } else {
    length = 1 + head;
    if (length > size) return 0;
    count = unpack_weights(data + 1, head, weights);
  }
  described_ = count > 0 && build(weights, count);
  return described_ ? length : 0;
}

bool HuffmanDecoder::decode(const uint8_t* data, size_t data_size, bool four, uint8_t* out,
                            size_t size) const {
  Stream streams[4];
  const int n = four ? 4 : 1;
  const size_t part = four ? (size + 3) / 4 : size;
  if (four) {
    if (data_size < 6 || 3 * part > size) return false;
    size_t sizes[4];
    size_t rest = data_size - 6;
    for (int k = 0; k < 4; ++k) {
      sizes[k] = k < 3 ? data[2 * k] | data[2 * k + 1] << 8 : rest;
      if (sizes[k] > rest) return false;
      rest -= sizes[k];
    }
    data += 6;
    for (int k = 0; k < 4; ++k) {
      if (sizes[k] == 0 || data[sizes[k] - 1] == 0) return false;
      streams[k].open(data, sizes[k]);
      data += sizes[k];
    }
  } else {
    if (data_size == 0 || data[data_size - 1] == 0) return false;
    streams[0].open(data, data_size);
  }
  for (int k = 0; k < n; ++k) {
    streams[k].out = out + k * part;
    streams[k].end = k + 1 < n ? streams[k].out + part : out + size;
  }
  if (four) kRunFour(steps_, streams);
  for (int k = 0; k < n; ++k) {
    Stream& s = streams[k];
    kRunOne(steps_, &s);
    // The rest byte by byte: bits below the first one count as zeros.
    int64_t left = s.bits_left();
    while (s.out < s.end) {
      const int64_t low = std::max<int64_t>(left - kMaxBits, 0);
      uint32_t word;
      if (left <= 0) return false;
      std::memcpy(&word, s.begin + (low >> 3), 4);
      word = word >> (low & 7) & ((1u << (left - low)) - 1);
      const uint8_t byte = static_cast<uint8_t>(steps_.bytes[word << (kMaxBits - (left - low))]);
      *s.out++ = byte;
      left -= bits_[byte];
    }
    if (left != 0) return false;
  }
  return true;
}

}  // namespace hst
