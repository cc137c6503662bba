#include "lock_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace hst {

// Closes the lock descriptors in forked children. The mutex is held across fork(), so that the
// child finds the list whole.
struct ForkGuard {
  std::mutex mutex;
  std::vector<LockFile*> files;

  static ForkGuard& get() {
    static ForkGuard* const guard = [] {
      ::pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); }, &in_child);
      return new ForkGuard;  // never destroyed: a ring may be closed after static destructors ran
    }();
    return *guard;
  }

  static void in_child() {
    ForkGuard& guard = get();
    for (LockFile* file : guard.files) ::close(file->fd_.exchange(-1));
    guard.files.clear();
    guard.mutex.unlock();
  }
};

LockFile::LockFile(int fd) : fd_(fd) {
  ForkGuard& guard = ForkGuard::get();
  std::lock_guard<std::mutex> hold(guard.mutex);
  guard.files.push_back(this);
}

void LockFile::close() {
  ForkGuard& guard = ForkGuard::get();
  std::lock_guard<std::mutex> hold(guard.mutex);
  const int fd = fd_.exchange(-1);
  if (fd < 0) return;
  guard.files.erase(std::remove(guard.files.begin(), guard.files.end(), this), guard.files.end());
  ::close(fd);  // the last descriptor of its description: this gives the locks back
}

static struct flock byte_of(short type, Role role) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(role);
  lock.l_len = 1;
  return lock;
}

bool LockFile::try_lock(Role role) {
  struct flock lock = byte_of(F_WRLCK, role);
  return ::fcntl(fd_, F_OFD_SETLK, &lock) == 0;
}

void LockFile::unlock(Role role) {
  struct flock lock = byte_of(F_UNLCK, role);
  ::fcntl(fd_, F_OFD_SETLK, &lock);
}

bool LockFile::held_by_other(Role role) const {
  struct flock lock = byte_of(F_WRLCK, role);
  // A failed probe counts as held: nothing irreversible is done to a ring that may have an owner.
  return ::fcntl(fd_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

uint64_t LockFile::bytes() const {
  struct stat st{};
  return ::fstat(fd_, &st) == 0 ? static_cast<uint64_t>(st.st_size) : UINT64_MAX;
}

}  // namespace hst
