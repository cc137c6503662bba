// XXH64 of bytes that come in pieces, with seed 0: the checksum of a zstd frame is its low half.
// After the specification, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hst {

class XxHash64 {
 public:
  void update(const uint8_t* data, size_t size) {
    total_ += size;
    if (held_ + size < kStripe) {
      std::memcpy(stripe_ + held_, data, size);
      held_ += size;
      return;
    }
    if (held_ != 0) {
      const size_t missing = kStripe - held_;
      std::memcpy(stripe_ + held_, data, missing);
      stripes(stripe_, 1);
      data += missing;
      size -= missing;
    }
    stripes(data, size / kStripe);
    held_ = size % kStripe;
    std::memcpy(stripe_, data + size - held_, held_);
  }

  uint64_t digest() const {
    uint64_t h = kPrime5;
    if (total_ >= kStripe) {
      h = rotate(lanes_[0], 1) + rotate(lanes_[1], 7) + rotate(lanes_[2], 12) +
          rotate(lanes_[3], 18);
      for (const uint64_t lane : lanes_) h = (h ^ round(0, lane)) * kPrime1 + kPrime4;
    }
    h += total_;
    const uint8_t* p = stripe_;
    size_t left = held_;
    for (; left >= 8; p += 8, left -= 8) {
      h = rotate(h ^ round(0, load<uint64_t>(p)), 27) * kPrime1 + kPrime4;
    }
    if (left >= 4) {
      h = rotate(h ^ load<uint32_t>(p) * kPrime1, 23) * kPrime2 + kPrime3;
      p += 4;
      left -= 4;
    }
    for (; left != 0; ++p, --left) h = rotate(h ^ *p * kPrime5, 11) * kPrime1;
    h = (h ^ h >> 33) * kPrime2;
    h = (h ^ h >> 29) * kPrime3;
    return h ^ h >> 32;
  }

 private:
  static constexpr size_t kStripe = 32;
  static constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F,
                            kPrime3 = 0x165667B19E3779F9, kPrime4 = 0x85EBCA77C2B2AE63,
                            kPrime5 = 0x27D4EB2F165667C5;

  template <class T>
  static T load(const uint8_t* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
  }
  static uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }
  static uint64_t round(uint64_t lane, uint64_t word) {
    return rotate(lane + word * kPrime2, 31) * kPrime1;
  }
  void stripes(const uint8_t* p, size_t count) {
    uint64_t a = lanes_[0], b = lanes_[1], c = lanes_[2], d = lanes_[3];
    for (; count != 0; p += kStripe, --count) {
      a = round(a, load<uint64_t>(p));
      b = round(b, load<uint64_t>(p + 8));
      c = round(c, load<uint64_t>(p + 16));
      d = round(d, load<uint64_t>(p + 24));
    }
    lanes_[0] = a, lanes_[1] = b, lanes_[2] = c, lanes_[3] = d;
  }

  uint64_t lanes_[4] = {kPrime1 + kPrime2, kPrime2, 0, uint64_t{0} - kPrime1};
  uint64_t total_ = 0;
  uint8_t stripe_[kStripe];
  size_t held_ = 0;
};

}  // namespace hst
