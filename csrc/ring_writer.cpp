#include "ring_writer.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "check.h"

namespace hst {

static void add(uint64_t* counter, uint64_t n) {
  store_relaxed(counter, load_relaxed(counter) + n);
}

uint64_t RingWriter::max_payload_bytes(uint64_t meta_bytes, uint64_t leave_bytes) const {
  // At worst the ring is empty and the data area ends 64 bytes too early for the record. Those
  // record - 64 bytes become padding, so 2 * record - 64 + leave must not exceed the capacity.
  const uint64_t capacity = file_->map->capacity_bytes;
  if (leave_bytes > capacity || meta_bytes > capacity) return 0;
  const uint64_t record = (capacity - leave_bytes + kAlign) / 2 / kAlign * kAlign;
  const uint64_t payload_offset = align_up(kAlign + meta_bytes, kAlign);
  return record > payload_offset ? record - payload_offset : 0;
}

uint64_t RingWriter::acquire_tail() {
  // TAIL (acquire half): the consumer's last reads of everything before it are over.
  const uint64_t tail = load_acquire(&file_->map->header()->tail);
  check_positions(*file_, tail, head_);
  check(tail >= tail_, Fault::kCorrupt, file_->path, ": header: tail went back from ", tail_,
        " to ", tail, ": the ring is corrupt, restart the server");
  return tail_ = tail;
}

std::optional<Slot> RingWriter::reserve(uint32_t kind, std::string_view meta,
                                        uint64_t payload_bytes, uint64_t leave_bytes) {
  const Mapping& map = *file_->map;
  const uint64_t capacity = map.capacity_bytes;
  check(kind != kPadding && kind <= kLastKind, Fault::kConfig, "kind=", kind,
        ": must be from 1 to ", kLastKind);
  // Each on its own first, so that the sum cannot overflow.
  const bool sane = meta.size() <= capacity && payload_bytes <= capacity && leave_bytes <= capacity;
  const uint64_t payload_offset = align_up(kAlign + meta.size(), kAlign);
  const uint64_t record_bytes = sane ? align_up(payload_offset + payload_bytes, kAlign) : 0;
  check(sane && record_bytes + leave_bytes <= capacity && meta.size() <= UINT32_MAX, Fault::kConfig,
        "a record of ", meta.size(), " bytes of metadata and ", payload_bytes,
        " of payload can never fit into a ring of ", capacity, " bytes that keeps ", leave_bytes,
        " free: enlarge the ring or split the record");

  std::lock_guard<std::mutex> hold(mutex_);
  check(is_open(), Fault::kRing, file_->path, ": the writer is closed (or this is a forked child)");
  file_->check_whole();
  const uint64_t room = map.room_before_end(head_);
  const uint64_t padding = record_bytes <= room ? 0 : room;
  const uint64_t end = head_ + padding + record_bytes;
  // The last tail seen is good enough to say yes; only a no needs a fresh one.
  if (end - tail_ + leave_bytes > capacity && end - acquire_tail() + leave_bytes > capacity) {
    return std::nullopt;
  }

  if (padding) {
    RecordHeader pad{};
    pad.ready = kCommitted;
    pad.record_bytes = padding;
    std::memcpy(map.record(head_), &pad, sizeof pad);
  }
  Slot slot;
  slot.seq = next_seq_++;
  slot.position = head_ + padding;
  slot.record_bytes = record_bytes;
  slot.payload_offset = payload_offset;
  slot.payload_bytes = payload_bytes;

  RecordHeader header{};
  header.ready = kPending;
  header.kind = kind;
  header.record_bytes = record_bytes;
  header.seq = slot.seq;
  header.meta_bytes = static_cast<uint32_t>(meta.size());
  header.payload_bytes = payload_bytes;
  header.payload_offset = payload_offset;
  std::memcpy(map.record(slot.position), &header, sizeof header);
  if (!meta.empty()) std::memcpy(map.at(slot.position) + sizeof header, meta.data(), meta.size());

  RingHeader* const ring = map.header();
  add(&ring->counters[kRecords], 1);
  add(&ring->counters[kBytes], payload_bytes);
  store_relaxed(&ring->next_seq, next_seq_);
  // HEAD (release half): ready = 0, the header and the metadata are in place before it.
  store_release(&ring->head, head_ = end);
  return slot;
}

std::optional<Slot> RingWriter::reserve_until(Clock::time_point deadline, uint32_t kind,
                                              std::string_view meta, uint64_t payload_bytes,
                                              uint64_t leave_bytes) {
  using std::chrono::microseconds;
  const Clock::time_point start = Clock::now();
  Clock::time_point now = start;
  Clock::duration nap = microseconds(20);
  std::optional<Slot> slot = reserve(kind, meta, payload_bytes, leave_bytes);
  while (!slot && now < deadline) {
    std::this_thread::sleep_for(std::min(nap, deadline - now));
    nap = std::min<Clock::duration>(2 * nap, microseconds(1000));
    slot = reserve(kind, meta, payload_bytes, leave_bytes);
    now = Clock::now();
  }
  if (now > start) {
    count(kRingStallNs, std::chrono::duration_cast<std::chrono::nanoseconds>(now - start).count());
  }
  return slot;
}

void RingWriter::finish(const Slot& slot, Ready outcome) {
  check(is_open(), Fault::kLease, file_->path, ": record ", slot.seq,
        ": the writer is closed, which abandoned all pending records");
  // READY (release half): the payload is in place before it.
  store_release<uint32_t>(&file_->map->record(slot.position)->ready, outcome);
}

void RingWriter::count(uint32_t counter, uint64_t n) {
  check(counter < kCounters, Fault::kConfig, "counter=", counter, ": must be below ", kCounters);
  std::lock_guard<std::mutex> hold(mutex_);
  add(&file_->map->header()->counters[counter], n);
}

void RingWriter::abandon_pending() {
  for (uint64_t at = acquire_tail(); at != head_;) {
    const CheckedRecord record = check_record(*file_, at, head_);
    uint32_t expected = kPending;
    // Not a plain store: a copy stream may be committing this record right now.
    __atomic_compare_exchange_n(&file_->map->record(at)->ready, &expected, kAbandoned, false,
                                __ATOMIC_RELEASE, __ATOMIC_RELAXED);
    at = record.end();
  }
}

bool RingWriter::close() {
  if (!is_open()) return unlinked_;  // before the mutex: in a forked child nobody will unlock it
  std::lock_guard<std::mutex> hold(mutex_);
  if (!is_open()) return unlinked_;
  try {
    abandon_pending();
    unlinked_ = tail_ == head_ && file_->unlink();
  } catch (const Error&) {
    unlinked_ = false;  // a corrupt ring is left for a person to look at
  }
  store_release<uint32_t>(&file_->map->header()->closed, 1);
  file_->lock.close();
  return unlinked_;
}

}  // namespace hst
