// The producer's side of a ring.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "ring_file.h"

namespace hst {

// A reserved record: a lease that its holder commits or abandons, once.
struct Slot {
  uint64_t seq = 0;
  uint64_t position = 0;
  uint64_t record_bytes = 0;
  uint64_t payload_offset = 0;  // from the record's start
  uint64_t payload_bytes = 0;
};

class RingWriter {
 public:
  RingWriter(const std::string& path, uint64_t capacity_bytes, const std::string& info,
             const RingFile::Progress& progress = {})
      : file_(RingFile::create(path, capacity_bytes, info, progress)) {}

  // Nothing if there is no room at the moment; an error if there never can be.
  std::optional<Slot> reserve(uint32_t kind, std::string_view meta, uint64_t payload_bytes,
                              uint64_t leave_bytes);
  // The same, trying again until `deadline`; the wait is added to kRingStallNs.
  using Clock = std::chrono::steady_clock;
  std::optional<Slot> reserve_until(Clock::time_point deadline, uint32_t kind,
                                    std::string_view meta, uint64_t payload_bytes,
                                    uint64_t leave_bytes);
  // Publishes what became of the record's payload.
  void finish(const Slot& slot, Ready outcome);
  void count(uint32_t counter, uint64_t n);  // from any thread
  uint64_t max_payload_bytes(uint64_t meta_bytes, uint64_t leave_bytes) const;

  // Abandons what is still pending, says `closed`, gives the role back. True: the file is gone.
  bool close();
  bool is_open() const { return file_->lock.is_open(); }

  uint64_t head() const { return load_relaxed(&file_->map->header()->head); }
  uint64_t tail() const { return load_acquire(&file_->map->header()->tail); }
  bool consumer_attached() const { return is_open() && file_->lock.held_by_other(Role::kConsumer); }
  const RingFile& file() const { return *file_; }
  const std::shared_ptr<Mapping>& map() const { return file_->map; }

 private:
  uint64_t acquire_tail();
  void abandon_pending();

  const std::unique_ptr<RingFile> file_;
  std::mutex
      mutex_;  // one thread reserves, but any may close, and the wait for room lets the GIL go
  uint64_t head_ = 0;
  uint64_t tail_ = 0;  // as last seen
  uint64_t next_seq_ = 0;
  bool unlinked_ = false;
};

}  // namespace hst
