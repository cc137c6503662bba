#include "huffman.h"

#include <algorithm>
#include <cstring>

namespace hst {

namespace {

constexpr int kMaxBits = 11;   // of a code: zstd allows no more
constexpr int kStateBits = 6;  // of the states that pack the description
constexpr int kWeights = 12;   // 0 for a byte that does not occur, or 12 - bits

template <class T>
void store(uint8_t* out, T value) {
  std::memcpy(out, &value, sizeof value);
}

// Bits from the lowest on, as zstd wants them.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : begin_(out), out_(out) {}
  void add(uint64_t value, unsigned bits) {  // at most 56 between two flushes
    word_ |= value << held_;
    held_ += bits;
  }
  void flush() {
    store(out_, word_);
    out_ += held_ >> 3;
    word_ >>= held_ & ~7u;
    held_ &= 7;
  }
  size_t close() {  // bytes written, the last one padded
    flush();
    return out_ - begin_ + (held_ != 0);
  }

 private:
  uint8_t* begin_;
  uint8_t* out_;
  uint64_t word_ = 0;
  unsigned held_ = 0;
};

// Lengths of an optimal code for the n bytes in `order`, which is sorted by count, none zero.
void optimal_lengths(const Counts& counts, const uint8_t* order, int n, uint8_t* bits) {
  // Two queues, leaves and inner nodes, both sorted: the lightest two are at their heads.
  uint64_t weight[512];
  int parent[512];
  for (int i = 0; i < n; ++i) weight[i] = counts.of[order[i]];
  int leaf = 0, inner = n;
  for (int node = n; node < 2 * n - 1; ++node) {
    weight[node] = 0;
    for (int k = 0; k < 2; ++k) {
      const bool take_leaf = leaf < n && (inner == node || weight[leaf] <= weight[inner]);
      const int lightest = take_leaf ? leaf++ : inner++;
      weight[node] += weight[lightest];
      parent[lightest] = node;
    }
  }
  int depth[512];
  depth[2 * n - 2] = 0;
  for (int node = 2 * n - 3; node >= 0; --node) {
    depth[node] = depth[parent[node]] + 1;
    if (node < n) bits[order[node]] = static_cast<uint8_t>(std::min(depth[node], kMaxBits));
  }
}

// Codes that were cut to kMaxBits take more than there is: others give way, the rarest first; and
// then what is left over is used up, since zstd wants a code that is complete.
void make_complete(const uint8_t* order, int n, uint8_t* bits) {
  const auto share = [&](int i) { return 1 << (kMaxBits - bits[order[i]]); };
  int used = 0;
  for (int i = 0; i < n; ++i) used += share(i);
  for (int i = 0; used > 1 << kMaxBits; i = (i + 1) % n) {
    if (bits[order[i]] < kMaxBits) {
      ++bits[order[i]];
      used -= share(i);
    }
  }
  for (int i = n - 1; used < 1 << kMaxBits; i = (i + n - 1) % n) {
    if (share(i) <= (1 << kMaxBits) - used) {
      used += share(i);
      --bits[order[i]];
    }
  }
}

// RFC 8878, 4.1.1: how often each weight is among the 64 states. None of them is zero.
size_t write_shares(const int* shares, uint8_t* out) {
  BitWriter writer(out);
  writer.add(kStateBits - 5, 4);
  int left = (1 << kStateBits) + 1, threshold = 1 << kStateBits, bits = kStateBits + 1;
  for (int w = 0; w < kWeights && left > 1; ++w) {
    const int larger = 2 * threshold - 1 - left;
    left -= shares[w];
    int value = shares[w] + 1;
    if (value >= threshold) value += larger;
    writer.add(value, bits - (value < larger));
    writer.flush();
    while (left < threshold) {
      --bits;
      threshold >>= 1;
    }
  }
  return writer.close();
}

// RFC 8878, 4.2.1.2: the weights of `count` >= 2 bytes, packed by two states (FSE) in turns, from
// the last to the first. Returns how long they are, at most 160 bytes.
size_t pack_weights(const uint8_t* weights, int count, uint8_t* out) {
  constexpr int kStates = 1 << kStateBits;
  int shares[kWeights], left = kStates - kWeights;
  int seen[kWeights] = {};
  for (int i = 0; i < count; ++i) ++seen[weights[i]];
  for (int w = 0; w < kWeights; ++w) {
    const int more = seen[w] * (kStates - kWeights) / count;
    shares[w] = 1 + more;
    left -= more;
  }
  *std::max_element(shares, shares + kWeights) += left;

  uint8_t spread[kStates];
  for (int w = 0, at = 0; w < kWeights; ++w) {
    for (int i = 0; i < shares[w]; ++i) {
      spread[at] = static_cast<uint8_t>(w);
      at = (at + (kStates >> 1) + (kStates >> 3) + 3) & (kStates - 1);
    }
  }
  // The n-th state that stands for a weight is where state number share + n of it leads.
  int first[kWeights], next[kWeights], states[kStates];
  for (int w = 0, at = 0; w < kWeights; ++w) {
    first[w] = next[w] = at;
    at += shares[w];
  }
  for (int i = 0; i < kStates; ++i) states[next[spread[i]]++] = kStates + i;

  size_t size = write_shares(shares, out);
  BitWriter writer(out + size);
  int state[2] = {0, 0};
  for (int i = count - 1; i >= 0; --i) {
    int& s = state[i & 1];
    const int w = weights[i], share = shares[w];
    if (s == 0) {  // the first one of its state: any of the weight's states will do
      s = states[first[w]];
      continue;
    }
    int bits = 0;
    while (s >> bits >= 2 * share) ++bits;
    writer.add(s & ((1 << bits) - 1), bits);
    writer.flush();
    s = states[first[w] + (s >> bits) - share];
  }
  // A decoder begins with the state of the byte at 0.
  writer.add(state[1] - kStates, kStateBits);
  writer.add(state[0] - kStates, kStateBits);
  writer.add(1, 1);
  return size + writer.close();
}

// The codes of `data` from its end to its beginning. Compiled twice: BMI2 has shifts that cost
// half.
static inline __attribute__((always_inline)) size_t write_codes(const uint32_t* pairs,
                                                                const uint32_t* single,
                                                                const uint8_t* data, size_t size,
                                                                uint8_t* out) {
  BitWriter writer(out);
  const auto add = [&](uint32_t entry) { writer.add(entry >> 8, entry & 255); };
  const auto pair = [&](size_t at) {
    uint16_t two;
    std::memcpy(&two, data + at, 2);
    return pairs[two];
  };
  size_t at = size;
  if (at & 1) add(single[data[--at]]);
  if (at & 2) add(pair(at -= 2));
  writer.flush();
  while (at != 0) {
    at -= 4;
    add(pair(at + 2));
    add(pair(at));
    writer.flush();
  }
  writer.add(1, 1);
  return writer.close();
}

using WriteCodes = size_t (*)(const uint32_t*, const uint32_t*, const uint8_t*, size_t, uint8_t*);

size_t write_codes_any(const uint32_t* pairs, const uint32_t* single, const uint8_t* data,
                       size_t size, uint8_t* out) {
  return write_codes(pairs, single, data, size, out);
}
#if defined(__x86_64__)
__attribute__((target("bmi2"))) size_t write_codes_bmi2(const uint32_t* pairs,
                                                        const uint32_t* single, const uint8_t* data,
                                                        size_t size, uint8_t* out) {
  return write_codes(pairs, single, data, size, out);
}
const WriteCodes kWriteCodes = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("bmi2") ? write_codes_bmi2 : write_codes_any;
}();
#else
const WriteCodes kWriteCodes = write_codes_any;
#endif

}  // namespace

void Counts::add(const uint8_t* data, size_t size) {
  // Four tables: two equal bytes in a row would wait for one another's count.
  uint32_t parts[4][256] = {};
  size_t i = 0;
  for (; i + 8 <= size; i += 8) {
    uint64_t word;
    std::memcpy(&word, data + i, 8);
    for (int k = 0; k < 8; ++k) ++parts[k & 3][word >> (8 * k) & 255];
  }
  for (; i < size; ++i) ++parts[0][data[i]];
  for (int b = 0; b < 256; ++b) of[b] += parts[0][b] + parts[1][b] + parts[2][b] + parts[3][b];
}

bool Counts::cover(const bool possible[256], int most) {
  for (int b = 0; b < 256; ++b) {
    if (!possible[b] || of[b] != 0) continue;
    of[b] = 1;
    --most;
  }
  return most >= 0;
}

int Counts::distinct() const {
  return static_cast<int>(256 - std::count(of, of + 256, uint32_t{0}));
}

bool Huffman::build(const Counts& counts) {
  uint8_t order[256];
  int n = 0;
  for (int b = 0; b < 256; ++b) {
    bits_[b] = 0;
    if (counts.of[b] != 0) order[n++] = static_cast<uint8_t>(b);
  }
  if (n < 2) return false;
  const int last = order[n - 1];
  std::sort(order, order + n, [&](uint8_t a, uint8_t b) {
    return counts.of[a] != counts.of[b] ? counts.of[a] < counts.of[b] : a < b;
  });
  optimal_lengths(counts, order, n, bits_);
  make_complete(order, n, bits_);

  // Codes go up with the byte among those of one length, and from the longest ones to the shortest.
  const int longest = *std::max_element(bits_, bits_ + 256);
  int of_length[kMaxBits + 1] = {}, next[kMaxBits + 1] = {};
  for (int b = 0; b < 256; ++b) of_length[bits_[b]] += bits_[b] != 0;
  for (int length = longest, code = 0; length > 0; --length) {
    next[length] = code;
    code = (code + of_length[length]) >> 1;
  }
  uint8_t weights[256], present[256];
  n = 0;
  for (int b = 0; b < 256; ++b) {
    weights[b] = bits_[b] ? static_cast<uint8_t>(longest + 1 - bits_[b]) : 0;
    if (bits_[b] == 0) continue;
    present[n++] = static_cast<uint8_t>(b);
    single_[b] = static_cast<uint32_t>(next[bits_[b]]++) << 8 | bits_[b];
  }
  // In memory the first of the two comes first; in the stream it comes last.
  for (int j = 0; j < n; ++j) {
    const uint32_t second = single_[present[j]], length = second & 255;
    uint32_t* row = pairs_.get() + (present[j] << 8);
    for (int i = 0; i < n; ++i) {
      const uint32_t one = single_[present[i]];
      row[present[i]] = ((one >> 8) << length | second >> 8) << 8 | ((one & 255) + length);
    }
  }
  // The weight of the last byte follows from the others'.
  if (last <= 128) {
    description_[0] = static_cast<uint8_t>(127 + last);
    weights[last] = 0;
    for (int b = 0; b < last; b += 2) {
      description_[1 + b / 2] = static_cast<uint8_t>(weights[b] << 4 | weights[b + 1]);
    }
    description_size_ = 1 + (last + 1) / 2;
    return true;
  }
  uint8_t packed[256];
  const size_t size = pack_weights(weights, last, packed);
  if (size > 127) return false;
  description_[0] = static_cast<uint8_t>(size);
  std::memcpy(description_ + 1, packed, size);
  description_size_ = 1 + size;
  return true;
}

size_t Huffman::encode(const uint8_t* data, size_t size, bool with_code, uint8_t* out) const {
  const bool four = size >= 256;
  const int format = !four ? 0 : size < 1 << 10 ? 1 : size < 1 << 14 ? 2 : 3;
  const int head = format < 2 ? 3 : format + 2, digits = format < 2 ? 10 : 4 * format + 6;
  uint8_t* end = out + head;
  if (with_code) {
    std::memcpy(end, description_, description_size_);
    end += description_size_;
  }
  if (four) {
    uint8_t* sizes = end;
    end += 6;
    const size_t quarter = (size + 3) / 4;
    for (int k = 0; k < 4; ++k) {
      const size_t part = k < 3 ? quarter : size - 3 * quarter;
      const size_t n = kWriteCodes(pairs_.get(), single_, data + k * quarter, part, end);
      if (k < 3) store(sizes + 2 * k, static_cast<uint16_t>(n));
      end += n;
    }
  } else {
    end += kWriteCodes(pairs_.get(), single_, data, size, end);
  }
  const uint64_t literals = (with_code ? 2 : 3) | format << 2 | uint64_t{size} << 4 |
                            static_cast<uint64_t>(end - out - head) << (4 + digits);
  for (int i = 0; i < head; ++i) out[i] = static_cast<uint8_t>(literals >> (8 * i));
  *end++ = 0;  // no sequences
  return end - out;
}

}  // namespace hst
