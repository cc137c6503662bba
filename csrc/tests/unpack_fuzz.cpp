// What the decoder does with any bytes: true or false, and never a byte outside of its bounds,
// which the sanitizers watch. Built by clang it is a libFuzzer target; elsewhere its own main bends
// frames that are right.
//
//     unpack_fuzz -max_total_time=60         (clang)
//     unpack_fuzz 100000 [FILE...]           (any compiler)
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "fuzz_main.h"
#include "pack.h"
#include "unpack.h"

namespace {

using namespace hst;

using Bytes = std::vector<uint8_t>;

constexpr size_t kHidden = 61;

// Exponents of a plane in a frame; an even seed gives many rows, which are several blocks.
Bytes frame_of(uint64_t seed, size_t* rows) {
  std::mt19937_64 random(seed);
  *rows = 1 + random() % (seed % 2 ? 40 : 5000);
  std::vector<uint16_t> words(*rows * kHidden);
  const uint64_t spread = 1 + random() % 30;
  for (uint16_t& word : words) {
    const uint64_t bits = random();
    word = static_cast<uint16_t>(__builtin_ctzll(bits | 1ull << 50) * spread % 256 << 7);
  }
  const Bytes bias(kHidden, static_cast<uint8_t>(random()));
  Bytes out(packed_bound(1, words.size()));
  const Piece piece{reinterpret_cast<const uint8_t*>(words.data()), 0, 2 * kHidden, *rows};
  const auto [raw, coded] = pack_plane({piece}, 0, kHidden, bias.data(), out.data());
  return Bytes(out.begin() + raw, out.begin() + raw + coded);
}

// Also from a place and into a place of just the right size, so that the first byte beyond is seen.
bool unpack(const Bytes& frame, size_t size) {
  const Bytes exact(frame.begin(), frame.end());
  Bytes out(size);
  return unpack_frame({exact.data(), exact.size()}, out.data(), size);
}

}  // namespace

// Two bytes say how much the frame should hold; a frame's head is made to say so too.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3) return 0;
  const uint32_t content = data[0] | data[1] << 8 | (data[2] & 3) << 16;
  Bytes frame = {0x28, 0xb5, 0x2f, 0xfd, 0xa4};  // one segment, four bytes of size, checksum
  for (int i = 0; i < 4; ++i) frame.push_back(static_cast<uint8_t>(content >> (8 * i)));
  frame.insert(frame.end(), data + 3, data + size);
  unpack(frame, content);
  // The same bytes as the exponents of rows whose mantissas are right.
  std::vector<uint16_t> words(content);
  Bytes bias(kHidden), raw = {0x28, 0xb5, 0x2f, 0xfd, 0xa4, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0};
  unpack_plane({frame.data(), frame.size()}, {raw.data(), raw.size()}, bias.data(),
               reinterpret_cast<uint8_t*>(words.data()), content / kHidden, kHidden, 2 * kHidden);
  return 0;
}

#ifndef HST_LIBFUZZER
int main(int argc, char** argv) {
  const long inputs = try_files(argc, argv);
  std::mt19937_64 random(1);
  Bytes frame;
  size_t rows = 0;
  for (long n = 0; n < inputs; ++n) {
    if (n % 100 == 0) {
      frame = frame_of(static_cast<uint64_t>(n / 100), &rows);
      if (!unpack(frame, rows * kHidden)) {
        std::fprintf(stderr, "a good frame was refused\n");
        return 1;
      }
    }
    Bytes bent = frame;
    for (uint64_t hits = 1 + random() % 3; hits != 0; --hits) {
      const size_t near = random() % 2 ? 200 : bent.size();  // the heads and the code lie there
      bent[random() % std::min(bent.size(), near)] = static_cast<uint8_t>(random());
    }
    if (random() % 4 == 0) bent.resize(random() % bent.size());
    if (bent != frame && unpack(bent, rows * kHidden) && bent.size() != frame.size()) {
      std::fprintf(stderr, "a frame that was cut was taken\n");
      return 1;
    }
  }
  std::puts("unpack_fuzz: all well");
}
#endif
