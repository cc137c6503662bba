// A reserved record, as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstring>
#include <memory>

#include "check.h"
#include "ring_writer.h"

namespace hst {

// Below this a copy is over before another thread could use the GIL, and to get it back may take
// a switch interval (5 ms) of the scheduler's time.
inline constexpr uint64_t kReleaseGilBytes = 256 << 10;
struct Reservation {
  const std::shared_ptr<RingWriter> writer;
  const Slot slot;
  std::atomic<bool> given_back{false};

  Reservation(std::shared_ptr<RingWriter> writer, const Slot& slot)
      : writer(std::move(writer)), slot(slot) {}

  uint8_t* payload() const {
    check(!given_back, Fault::kLease, "record ", slot.seq, " was committed or abandoned before");
    return writer->map()->at(slot.position) + slot.payload_offset;
  }
  void give_back(Ready outcome) {
    take();
    writer->finish(slot, outcome);
  }
  // The record is somebody else's to commit from here on.
  void take() {
    check(!given_back.exchange(true), Fault::kLease, "record ", slot.seq,
          " was committed or abandoned before");
  }
  void copy_rows(uint64_t offset, uintptr_t address, uint64_t rows, uint64_t row_bytes,
                 uint64_t stride_bytes) {
    uint8_t* const start = payload();
    const bool fits = offset <= slot.payload_bytes &&
                      (rows == 0 || row_bytes <= (slot.payload_bytes - offset) / rows);
    check(fits, Fault::kConfig, rows, " rows of ", row_bytes, " bytes at offset ", offset,
          " exceed the payload of ", slot.payload_bytes, " bytes");
    if (rows == 0 || row_bytes == 0) return;
    check(address != 0, Fault::kConfig, "the address is null");
    uint8_t* const to = start + offset;
    const auto copy = [&] {
      const auto* from = reinterpret_cast<const uint8_t*>(address);
      if (stride_bytes == row_bytes) {
        std::memcpy(to, from, rows * row_bytes);
        return;
      }
      for (uint64_t r = 0; r < rows; ++r) {
        std::memcpy(to + r * row_bytes, from + r * stride_bytes, row_bytes);
      }
    };
    if (rows * row_bytes < kReleaseGilBytes) return copy();
    nanobind::gil_scoped_release unlocked;
    copy();
  }
};

}  // namespace hst
