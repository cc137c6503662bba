// A producer and a consumer thread on one ring, for the sanitizers. The behaviour is tested in
// tests/test_ring*.py; here every byte is written and read by code that a sanitizer sees.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "codec.h"
#include "pack.h"
#include "ring_reader.h"
#include "ring_writer.h"
#include "unpack.h"

namespace {

using namespace hst;

#define REQUIRE(ok)                                                         \
  do {                                                                      \
    if (!(ok)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #ok); \
      std::exit(1);                                                         \
    }                                                                       \
  } while (0)

uint8_t pattern(uint64_t seq, uint64_t i) { return static_cast<uint8_t>(seq * 31 + i * 7); }

void produce(RingWriter& writer, uint64_t records) {
  std::mt19937_64 random(1);
  for (uint64_t n = 0; n < records; ++n) {
    const std::string meta(random() % 100, 'm');
    const uint64_t payload_bytes = random() % (n % 50 ? 500 : 30000);
    const auto deadline = RingWriter::Clock::now() + std::chrono::seconds(60);
    const std::optional<Slot> slot = writer.reserve_until(deadline, 1, meta, payload_bytes, 64);
    REQUIRE(slot && slot->seq == n);
    uint8_t* payload = writer.map()->at(slot->position) + slot->payload_offset;
    for (uint64_t i = 0; i < payload_bytes; ++i) payload[i] = pattern(n, i);
    writer.finish(*slot, n % 9 ? kCommitted : kAbandoned);
  }
}

// One thread reads and another gives back, as a consumer that packs in the background does.
void consume(RingReader& reader, uint64_t records) {
  std::mutex mutex;
  std::vector<Lease> held;
  bool done = false;
  std::thread releaser([&] {
    for (bool last = false; !last;) {
      std::vector<Lease> batch;
      {
        std::lock_guard<std::mutex> hold(mutex);
        batch.swap(held);
        last = done;
      }
      for (; !batch.empty(); batch.pop_back()) {  // the last first
        reader.release(batch.back().ticket, batch.back().record.header.seq);
      }
    }
  });
  for (uint64_t n = 0; n < records;) {
    const std::optional<Lease> lease = reader.read();
    if (!lease) continue;
    const RecordHeader& h = lease->record.header;
    REQUIRE(h.seq == n && (h.ready == kAbandoned) == (n % 9 == 0));
    const uint8_t* payload = reader.map()->at(lease->record.position) + h.payload_offset;
    for (uint64_t i = 0; i < h.payload_bytes; ++i) REQUIRE(payload[i] == pattern(n, i));
    ++n;
    std::lock_guard<std::mutex> hold(mutex);
    held.push_back(*lease);
    done = n == records;
  }
  releaser.join();
}

void ring_carries_every_byte(const std::string& path) {
  constexpr uint64_t kRecords = 20000;
  RingWriter writer(path, kMinCapacityBytes, "info");
  RingReader reader(path, writer.map());
  std::thread producer([&] { produce(writer, kRecords); });
  std::thread onlooker([&] {
    for (int i = 0; i < 1000; ++i) (void)(reader.tail() + writer.head() + writer.tail());
  });
  consume(reader, kRecords);
  producer.join();
  onlooker.join();
  REQUIRE(reader.tail() == writer.head() && !reader.read());
  REQUIRE(inspect_ring(path).committed == 0 && inspect_ring(path).producer_alive);
  REQUIRE(writer.close() && !reader.producer_alive());
}

void close_ends_a_wait(const std::string& path) {
  RingWriter writer(path, kMinCapacityBytes, "");
  REQUIRE(writer.reserve(1, "", kMinCapacityBytes - 64, 0));
  std::thread waiter([&] {
    try {
      const auto deadline = RingWriter::Clock::now() + std::chrono::seconds(60);
      writer.reserve_until(deadline, 1, "", 64, 0);
      REQUIRE(!"the wait goes on");
    } catch (const Error& e) {
      REQUIRE(e.fault == Fault::kRing);
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  REQUIRE(!writer.close());
  waiter.join();
  RingReader reader(path);
  reader.release(reader.read()->ticket, 0);
  REQUIRE(reader.unlink_if_orphaned());
}

// Random bytes for headers: whatever they say, no byte outside the mapping is read.
void garbage_is_refused(const std::string& path) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 3000; ++round) {
    RingWriter writer(path, kMinCapacityBytes, "");
    for (int i = 0; i < 20; ++i)
      writer.finish(*writer.reserve(1, "meta", random() % 4000, 0), kCommitted);
    RingReader reader(path);
    auto* words = reinterpret_cast<uint64_t*>(writer.map()->record(0));
    for (int hits = 0; hits < 3; ++hits) {
      const uint64_t at = reader.cursor() / 8 + random() % 64;
      words[at] = random() >> (random() % 64);
    }
    try {
      uint64_t sum = 0;
      while (const std::optional<Lease> lease = reader.read()) {
        const RecordHeader& h = lease->record.header;
        const uint8_t* record = reader.map()->at(lease->record.position);
        for (uint64_t i = 0; i < h.payload_bytes; ++i) sum += record[h.payload_offset + i];
        for (uint64_t i = 0; i < h.meta_bytes; ++i) sum += record[sizeof h + i];
        reader.release(lease->ticket, h.seq);
      }
      REQUIRE(sum != 1);
    } catch (const Error& e) {
      REQUIRE(e.fault == Fault::kCorrupt);
    }
    ::unlink(path.c_str());
  }
}

void planes_join_to_what_was_split() {
  std::mt19937_64 random(3);
  for (size_t hidden : {1u, 7u, 31u, 64u, 1000u}) {
    const size_t rows = 5, stride = hidden + 3;
    std::vector<uint16_t> src(rows * stride), dst(rows * stride);
    for (uint16_t& word : src) word = static_cast<uint16_t>(random());
    std::vector<uint8_t> bias(hidden), exponents(rows * hidden), mantissas(rows * hidden);
    const auto* from = reinterpret_cast<const uint8_t*>(src.data());
    median_exponents(from, rows, hidden, 2 * stride, bias.data());
    split_planes(from, rows, hidden, 2 * stride, bias.data(), exponents.data(), mantissas.data());
    join_planes(exponents.data(), mantissas.data(), bias.data(),
                reinterpret_cast<uint8_t*>(dst.data()), rows, hidden, 2 * stride);
    for (size_t r = 0; r < rows; ++r) {
      REQUIRE(std::memcmp(&src[r * stride], &dst[r * stride], 2 * hidden) == 0);
    }
  }
}

// What zstd makes of the frames is for tests/test_pack.py: here every byte lies in its bounds.
void planes_are_packed_within_their_bounds() {
  std::mt19937_64 random(4);
  for (int round = 0; round < 300; ++round) {
    const size_t hidden = 1 + random() % (round % 10 ? 900 : 70000);
    const size_t rows = 1 + random() % (400000 / hidden + 1), stride = hidden + random() % 5;
    // Exponents of a few values up to all of them, evenly and not.
    const int spread = round % 9, keep = 1 + static_cast<int>(random() % 256);
    std::vector<uint16_t> src(rows * stride), dst(rows * stride);
    for (uint16_t& word : src) {
      const uint64_t bits = random();
      const int exponent = spread == 0 ? bits % keep : __builtin_ctzll(bits | 1ull << 50) * spread;
      word = static_cast<uint16_t>((exponent & 255) << 7 | (bits >> 40 & 0x807f));
    }
    std::vector<uint8_t> bias(hidden);
    for (uint8_t& value : bias) value = static_cast<uint8_t>(random() % 4);
    const auto* from = reinterpret_cast<const uint8_t*>(src.data());
    const size_t half = rows / 2;
    const std::vector<Piece> pieces = {
        {from, 0, 2 * stride, half},
        {from + 2 * half * stride, 0, 2 * stride, rows - half},
    };
    // Just as large as it must be, so that a sanitizer sees the first byte beyond.
    std::vector<uint8_t> out(packed_bound(1, rows * hidden));
    const auto [raw, coded] = pack_plane(pieces, 0, hidden, bias.data(), out.data());
    REQUIRE(coded <= rows * hidden + rows * hidden / 256 + 64);
    out.resize(raw + coded);
    const Span exponents{out.data() + raw, coded}, mantissas{out.data(), raw};
    auto* to = reinterpret_cast<uint8_t*>(dst.data());
    REQUIRE(unpack_plane(exponents, mantissas, bias.data(), to, rows, hidden, 2 * stride));
    for (size_t r = 0; r < rows; ++r) {
      REQUIRE(std::memcmp(&src[r * stride], &dst[r * stride], 2 * hidden) == 0);
    }
  }
}

}  // namespace

int main() {
  const char* folder = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
  const std::string path = cat(folder, "/hst-ring-test-", ::getpid());
  ring_carries_every_byte(path);
  close_ends_a_wait(path);
  garbage_is_refused(path);
  planes_join_to_what_was_split();
  planes_are_packed_within_their_bounds();
  std::puts("ring_test: all well");
}
