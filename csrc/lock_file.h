// Who holds which role on a ring file.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace hst {

enum class Role : off_t { kProducer = 0, kConsumer = 1 };  // the value is the byte that is locked

// Roles are open-file-description locks: the kernel drops them when the process dies, and closing
// some other descriptor of the file does not (as it would with POSIX locks).
//
// The descriptor is kept for its locks and for the file's size; the mapping comes from another
// open(), because a mapping keeps its open file description, and with it the lock, for as long as a
// view is alive. A forked child inherits the descriptor, so it is closed there: a child that
// outlives a killed server must not pass for the server. In the child is_open() is false.
class LockFile {
 public:
  explicit LockFile(int fd);
  ~LockFile() { close(); }
  LockFile(const LockFile&) = delete;
  LockFile& operator=(const LockFile&) = delete;

  bool is_open() const { return fd_.load(std::memory_order_relaxed) >= 0; }
  bool try_lock(Role role);
  void unlock(Role role);
  bool held_by_other(Role role) const;
  // The file's size as it is now; UINT64_MAX if that cannot be told.
  uint64_t bytes() const;
  void close();

 private:
  friend struct ForkGuard;
  std::atomic<int> fd_{-1};
};

}  // namespace hst
