// The consumer's side of a ring.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "ring_file.h"

namespace hst {

// A record that was read: a lease whose bytes stay in place until it is given back, once.
struct Lease {
  CheckedRecord record;
  uint64_t ticket = 0;
};

class RingReader {
 public:
  // `shared` is for tests in one process: a sanitizer follows addresses, so it sees the two ends
  // meet only if they use one mapping.
  explicit RingReader(const std::string& path, std::shared_ptr<Mapping> shared = nullptr);

  // The committed or abandoned record at the cursor, which moves past it.
  std::optional<Lease> read();
  // The reserved record at the cursor that is neither committed nor abandoned.
  std::optional<CheckedRecord> pending();
  // Steps over it, when the producer is dead. Its bytes stay readable in this mapping.
  std::optional<CheckedRecord> skip_pending();
  // Records may be given back in any order; the tail follows the longest prefix of them.
  void release(uint64_t ticket, uint64_t seq);

  // Tell whoever inspects the ring where its records go; false when that is too long.
  bool tell_out(const std::string& directory);
  bool producer_alive() const;
  // The order matters to a reader: records seen after `closed` are the last ones.
  bool closed() const { return load_acquire(&file_->map->header()->closed) != 0; }
  bool unlink_if_orphaned();
  void close();
  bool is_open() const { return file_->lock.is_open(); }

  uint64_t head() const { return load_acquire(&file_->map->header()->head); }
  uint64_t tail() const;
  uint64_t cursor() const;
  const RingFile& file() const { return *file_; }
  const std::shared_ptr<Mapping>& map() const { return file_->map; }

 private:
  struct Extent {
    uint64_t end;
    bool released;
  };
  void need_open() const;
  uint64_t acquire_head() const;
  std::optional<CheckedRecord> at_cursor();
  uint64_t lease_to(uint64_t end);
  void release_locked(uint64_t ticket);

  const std::unique_ptr<RingFile> file_;
  mutable std::mutex mutex_;  // one thread reads while others give records back
  uint64_t tail_ = 0;         // this side owns it: the header's copy is only ever written
  uint64_t cursor_ = 0;
  std::optional<uint64_t> next_seq_;
  std::deque<Extent> extents_;  // leases from tail to cursor, oldest first
  uint64_t first_ticket_ = 0;   // the ticket of extents_.front()
};

// A look at a ring that takes no role and changes nothing.
struct Inspection {
  std::string info, out;
  Counters counters{};
  uint64_t capacity_bytes = 0, head = 0, tail = 0;
  uint64_t committed = 0, pending = 0, abandoned = 0;
  bool closed = false, producer_alive = false, consumer_attached = false;
};
Inspection inspect_ring(const std::string& path);

}  // namespace hst
