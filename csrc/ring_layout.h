// The bytes of a ring file. docs/design.md, "Ring file", is the normative text.
//
//   offset  size  header
//        0     8  magic "HSTRING\1"
//        8     4  layout version
//       12     4  header_bytes: where the data area starts, a multiple of 4096
//       16     8  capacity_bytes of the data area, a multiple of 4096
//       24     4  info_bytes: length of the session info at offset 512
//       28     4  closed: 1 once the producer has ended in order
//      128     8  head: end of the last reserved record           (written by the producer)
//      136     8  next_seq: number of the next record
//      192     8  tail: everything before it is free              (written by the consumer)
//      200     4  out_bytes: length of the consumer's directory; 0: there is none to tell of
//      256  32*8  counters of the producer, in the order of `Counter`
//      512     …  session info
//    -1024  1024  the consumer's directory: the last bytes of the header
//
//   offset  size  record, 64-byte aligned, contiguous, never wrapping
//        0     4  ready: 0 pending, 1 committed, 2 abandoned
//        4     4  kind (0 = padding to the end of the data area)
//        8     8  record_bytes, this header included, a multiple of 64
//       16     8  seq
//       24     4  meta_bytes
//       28     4  zero
//       32     8  payload_bytes
//       40     8  payload_offset from the record's start, a multiple of 64
//       48    16  zero
//       64     …  metadata, then the payload
//
// Memory order. Three pairs, each named where its two halves stand:
//   HEAD   the producer releases head after the record's header and metadata are written; the
//          consumer acquires head before it reads them.
//   READY  whoever writes the payload releases ready after it; the consumer acquires ready before
//          it reads the payload. The releasing side may be a GPU's copy stream.
//   TAIL   the consumer releases tail after its last read of the freed bytes; the producer acquires
//          tail before it writes them anew.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hst {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the ring is little-endian");

inline constexpr char kMagic[8] = {'H', 'S', 'T', 'R', 'I', 'N', 'G', '\1'};
inline constexpr uint32_t kLayoutVersion = 2;
inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint64_t kAlign = 64;
inline constexpr uint64_t kInfoOffset = 512;
inline constexpr uint64_t kMinCapacityBytes = 64 << 10;
inline constexpr uint64_t kMaxInfoBytes = 1 << 20;
inline constexpr uint64_t kOutBytes = 1024;

enum Ready : uint32_t { kPending = 0, kCommitted = 1, kAbandoned = 2 };

// A kind that this release does not know is taken for corruption: a new kind is a new layout.
inline constexpr uint32_t kPadding = 0;
inline constexpr uint32_t kLastKind = 3;

// What the producer counts; hstransport/ring.py says what each means. New ones come at the end:
// a producer that does not know them leaves zeros there.
enum Counter : uint32_t {
  kRecords,
  kBytes,
  kDroppedBytes,
  kRingFull,  // to kStopped: dropped pieces of samples, by reason
  kStageFull,
  kTooLong,
  kQueueFull,
  kStopped,
  kRingStallNs,
  kStageStallNs,
  kSamplesLost,
  kBudgetSpent,
  kCounters
};
using Counters = std::array<uint64_t, kCounters>;
inline constexpr uint64_t kCounterWords = 32;
static_assert(kCounters <= kCounterWords);

// The producer's and the consumer's words lie on cache lines of their own.
struct RingHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;
  uint64_t capacity_bytes;
  uint32_t info_bytes;
  uint32_t closed;
  uint8_t pad0[96];
  uint64_t head;
  uint64_t next_seq;
  uint8_t pad1[48];
  uint64_t tail;
  uint32_t out_bytes;
  uint8_t pad2[52];
  uint64_t counters[kCounterWords];
};
static_assert(sizeof(RingHeader) == kInfoOffset);
static_assert(offsetof(RingHeader, capacity_bytes) == 16 && offsetof(RingHeader, closed) == 28);
static_assert(offsetof(RingHeader, head) == 128 && offsetof(RingHeader, next_seq) == 136);
static_assert(offsetof(RingHeader, tail) == 192 && offsetof(RingHeader, out_bytes) == 200);
static_assert(offsetof(RingHeader, counters) == 256);

struct RecordHeader {
  uint32_t ready;
  uint32_t kind;
  uint64_t record_bytes;
  uint64_t seq;
  uint32_t meta_bytes;
  uint32_t zero0;
  uint64_t payload_bytes;
  uint64_t payload_offset;
  uint64_t zero1[2];
};
static_assert(sizeof(RecordHeader) == kAlign);
static_assert(offsetof(RecordHeader, ready) == 0 && offsetof(RecordHeader, seq) == 16);
static_assert(offsetof(RecordHeader, payload_bytes) == 32);
static_assert(offsetof(RecordHeader, payload_offset) == 40);

constexpr uint64_t align_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

// Builtins rather than std::atomic: the words lie in memory that another process maps too, and
// std::atomic_ref is C++20.
template <class T>
T load_acquire(const T* p) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <class T>
void store_release(T* p, T value) {
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
}
template <class T>
T load_relaxed(const T* p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
template <class T>
void store_relaxed(T* p, T value) {
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
}

}  // namespace hst
