// A ring file: creating it, opening and checking it, its mapping.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cut_guard.h"
#include "lock_file.h"
#include "ring_layout.h"

namespace hst {

// The mapped file. Views of payloads share it, so that none of them can outlive it.
class Mapping {
 public:
  Mapping(uint8_t* base, uint64_t bytes)
      : base_(base), bytes_(bytes), guard_(std::in_place, base, bytes) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  RingHeader* header() const { return reinterpret_cast<RingHeader*>(base_); }
  uint8_t* info() const { return base_ + kInfoOffset; }
  // kOutBytes for the consumer's directory; null in a header that has no room for it.
  uint8_t* out() const {
    const bool room = kInfoOffset + info_bytes + kOutBytes <= header_bytes;
    return room ? base_ + header_bytes - kOutBytes : nullptr;
  }
  uint8_t* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  // Whether another process has truncated the file, and this one has met that.
  bool cut() const { return guard_->cut(); }
  void note_cut() { guard_->note_cut(); }
  // Positions only grow; the record at one lies at position % capacity of the data area.
  uint8_t* at(uint64_t position) const { return base_ + header_bytes + position % capacity_bytes; }
  RecordHeader* record(uint64_t position) const {
    return reinterpret_cast<RecordHeader*>(at(position));
  }
  uint64_t room_before_end(uint64_t position) const {
    return capacity_bytes - position % capacity_bytes;
  }

  // Copies taken when the header was checked: a later write to it cannot move the bounds.
  uint64_t header_bytes = 0;
  uint64_t capacity_bytes = 0;
  uint64_t info_bytes = 0;

 private:
  uint8_t* const base_;
  const uint64_t bytes_;
  std::optional<CutGuard> guard_;
};

enum class Access { kRead, kReadWrite };

struct RingFile {
  RingFile(std::string path, int lock_fd) : path(std::move(path)), lock(lock_fd) {}

  // The file appears under `path` only once its header is complete and the producer lock is held.
  // `progress` is called on this thread about once a second with the bytes made ready so far.
  using Progress = std::function<void(uint64_t)>;
  static std::unique_ptr<RingFile> create(const std::string& path, uint64_t capacity_bytes,
                                          const std::string& info, const Progress& progress = {});
  // Every bound is checked here; a file that passes can be walked without reading outside it.
  static std::unique_ptr<RingFile> open(const std::string& path, Access access);

  std::string info() const;
  Counters counters() const;
  // Where the consumer stores what it reads; empty when it has not said so.
  std::string out() const;
  // RingCorruptError if the file was truncated: what was read of it before this call is the file's
  // only if it passes, with a look at its size, since not every byte that is gone is a fault.
  void check_whole(bool size_too = false) const;
  // Removes the name if it still is this file's. True: this file has no name any more.
  bool unlink();

  const std::string path;
  LockFile lock;
  std::shared_ptr<Mapping> map;
  dev_t dev = 0;
  ino_t ino = 0;
};

// tail <= head <= tail + capacity, all of them multiples of 64; or RingCorruptError.
void check_positions(const RingFile& file, uint64_t tail, uint64_t head);

// A record's header, checked against the ring's bounds. Only this copy is used afterwards: the
// original lies in memory that others can write.
struct CheckedRecord {
  uint64_t position = 0;
  RecordHeader header{};  // `ready` is what it was at the check
  uint64_t end() const { return position + header.record_bytes; }
  bool padding() const { return header.kind == kPadding; }
};
CheckedRecord check_record(const RingFile& file, uint64_t position, uint64_t head);

}  // namespace hst
