// What a consumer believes of a ring's positions and records: nothing that it has not checked.
#include <cstring>

#include "check.h"
#include "ring_file.h"

namespace hst {

static constexpr char kAdvice[] = ": the ring is corrupt, delete the file";

void check_positions(const RingFile& file, uint64_t tail, uint64_t head) {
  file.check_whole();
  const uint64_t capacity = file.map->capacity_bytes;
  const auto want = [&](bool ok, const auto&... parts) {
    check(ok, Fault::kCorrupt, file.path, ": header: ", parts..., kAdvice);
  };
  want(tail % kAlign == 0, "tail is ", tail, ", must be a multiple of ", kAlign);
  want(head % kAlign == 0, "head is ", head, ", must be a multiple of ", kAlign);
  want(tail <= head, "tail is ", tail, ", past head ", head);
  want(head - tail <= capacity, "head is ", head, ", more than the capacity of ", capacity,
       " past tail ", tail);
}

CheckedRecord check_record(const RingFile& file, uint64_t position, uint64_t head) {
  const Mapping& map = *file.map;
  const auto want = [&](bool ok, const auto&... parts) {
    check(ok, Fault::kCorrupt, file.path, ": record at position ", position, ": ", parts...,
          kAdvice);
  };
  const uint64_t room = map.room_before_end(position);
  const uint64_t limit = head - position < room ? head - position : room;

  CheckedRecord record;
  record.position = position;
  RecordHeader& h = record.header;
  // READY (acquire half): from here on a committed record's payload is visible. The rest of the
  // header was published by HEAD, which the caller has acquired.
  const uint32_t ready = load_acquire(&map.record(position)->ready);
  std::memcpy(reinterpret_cast<uint8_t*>(&h) + sizeof ready, map.at(position) + sizeof ready,
              sizeof h - sizeof ready);
  h.ready = ready;
  file.check_whole();

  want(ready <= kAbandoned, "ready is ", ready, ", must be at most ", kAbandoned);
  want(h.kind <= kLastKind, "kind is ", h.kind, ", must be at most ", kLastKind);
  want(h.record_bytes >= sizeof h && h.record_bytes % kAlign == 0, "record_bytes is ",
       h.record_bytes, ", must be a multiple of ", kAlign);
  want(h.record_bytes <= room, "record_bytes is ", h.record_bytes, ", the data area ends after ",
       room);
  want(h.record_bytes <= limit, "record_bytes is ", h.record_bytes, ", head comes after ", limit);
  if (record.padding()) {
    want(h.record_bytes == room && room != map.capacity_bytes, "padding of record_bytes ",
         h.record_bytes, ", must fill the ", room % map.capacity_bytes,
         " bytes to the end of the data area");
    return record;
  }
  want(h.meta_bytes <= h.record_bytes - sizeof h, "meta_bytes is ", h.meta_bytes,
       ", the record has room for ", h.record_bytes - sizeof h);
  want(h.payload_offset % kAlign == 0 && h.payload_offset >= sizeof h + h.meta_bytes &&
           h.payload_offset <= h.record_bytes,
       "payload offset is ", h.payload_offset, ", must be a multiple of ", kAlign, " from ",
       sizeof h + h.meta_bytes, " to ", h.record_bytes);
  want(h.payload_bytes <= h.record_bytes - h.payload_offset, "payload_bytes is ", h.payload_bytes,
       ", the record has room for ", h.record_bytes - h.payload_offset);
  return record;
}

}  // namespace hst
