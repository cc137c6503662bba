#include "ring_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "check.h"
#include "memory.h"

namespace hst {

Mapping::~Mapping() {
  guard_.reset();  // first: the addresses may be another mapping's at once
  ::munmap(base_, bytes_);
}

std::string RingFile::info() const {
  return std::string(reinterpret_cast<const char*>(map->info()), map->info_bytes);
}

Counters RingFile::counters() const {
  Counters now;
  for (uint32_t i = 0; i < kCounters; ++i) now[i] = load_relaxed(&map->header()->counters[i]);
  return now;
}

std::string RingFile::out() const {
  const uint64_t bytes = load_acquire(&map->header()->out_bytes);
  if (bytes > kOutBytes || !map->out()) return {};
  return std::string(reinterpret_cast<const char*>(map->out()), bytes);
}

void RingFile::check_whole(bool size_too) const {
  if (size_too && lock.bytes() < map->bytes()) map->note_cut();
  check(!map->cut(), Fault::kCorrupt, path,
        ": another process has truncated the file, what it held is lost: delete it, and restart "
        "the server");
}

bool RingFile::unlink() {
  struct stat st{};
  if (::stat(path.c_str(), &st) != 0) return errno == ENOENT;
  if (st.st_dev != dev || st.st_ino != ino) return true;  // the name is another file's by now
  return ::unlink(path.c_str()) == 0 || errno == ENOENT;
}

// Maps the file by another open() of its name (lock_file.h says why); it must be the same inode.
static std::shared_ptr<Mapping> map_again(const std::string& path, const struct stat& locked,
                                          Access access, int flags = O_NOFOLLOW) {
  const int mode = access == Access::kRead ? O_RDONLY : O_RDWR;
  const int fd = ::open(path.c_str(), mode | O_CLOEXEC | O_NONBLOCK | flags);
  if (fd < 0) throw OsError(errno, "cannot open the ring", path);
  struct stat st{};
  if (::fstat(fd, &st) != 0 || st.st_dev != locked.st_dev || st.st_ino != locked.st_ino) {
    ::close(fd);
    throw OsError(ENOENT, "the ring was replaced while it was opened: look again", path);
  }
  const int prot = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* base = ::mmap(nullptr, locked.st_size, prot, MAP_SHARED, fd, 0);
  const int code = errno;
  ::close(fd);
  if (base == MAP_FAILED) throw OsError(code, "cannot map the ring", path);
  return std::make_shared<Mapping>(static_cast<uint8_t*>(base), locked.st_size);
}

static void check_room(int fd, const std::string& path, uint64_t file_bytes) {
  const uint64_t available = available_bytes(fd, path);
  if (available >= file_bytes) return;
  throw OsError(
      ENOSPC,
      cat("a ring of ", file_bytes, " bytes does not fit, ", available,
          " bytes are available there: choose a smaller ring, free memory, or enlarge the file "
          "system (/dev/shm: mount -o remount,size=…, docker --shm-size) or the container's limit"),
      path);
}

// A file that has not got its name yet. Where the file system can (tmpfs can) it has none at all,
// and is gone with a process that is killed while it takes the ring's memory.
struct Draft {
  int fd = -1;
  bool nameless = true;
  std::string name;  // to open it again by
};

static Draft open_draft(const std::string& path) {
  Draft draft;
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  draft.fd = ::open(folder.empty() ? "." : folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  draft.name = cat("/proc/self/fd/", draft.fd);
  if (draft.fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
    uint64_t random = 0;
    if (::getrandom(&random, sizeof random, 0) != sizeof random) {
      throw OsError(errno, "cannot draw a random name", path);
    }
    char suffix[32];
    std::snprintf(suffix, sizeof suffix, ".%016llx.tmp", static_cast<unsigned long long>(random));
    draft.nameless = false;
    draft.name = path + suffix;
    const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
    draft.fd = ::open(draft.name.c_str(), flags, 0600);
  }
  if (draft.fd < 0) throw OsError(errno, "cannot create the ring", path);
  return draft;
}

// Names it without replacing. Where renameat2 is not supported, link() refuses to replace as well.
static void publish(const Draft& draft, const std::string& path) {
  const char* const name = draft.name.c_str();
  if (draft.nameless) {
    if (::linkat(AT_FDCWD, name, AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) return;
  } else {
    if (::syscall(SYS_renameat2, AT_FDCWD, name, AT_FDCWD, path.c_str(), RENAME_NOREPLACE) == 0) {
      return;
    }
    if ((errno == EINVAL || errno == ENOSYS) && ::link(name, path.c_str()) == 0) {
      ::unlink(name);
      return;
    }
  }
  throw OsError(errno, errno == EEXIST ? "a ring of this name exists" : "cannot name the ring",
                path);
}

std::unique_ptr<RingFile> RingFile::create(const std::string& path, uint64_t capacity_bytes,
                                           const std::string& info, const Progress& progress) {
  check(capacity_bytes >= kMinCapacityBytes && capacity_bytes % kPageBytes == 0 &&
            capacity_bytes <= uint64_t{1} << 62,
        Fault::kConfig, "capacity_bytes=", capacity_bytes,
        ": must be a multiple of 4096, at least ", kMinCapacityBytes);
  check(info.size() <= kMaxInfoBytes, Fault::kConfig, "info takes ", info.size(),
        " bytes, at most ", kMaxInfoBytes, " are kept");
  if (::access(path.c_str(), F_OK) == 0) throw OsError(EEXIST, "a ring of this name exists", path);

  const Draft draft = open_draft(path);
  const int fd = draft.fd;
  auto file = std::make_unique<RingFile>(path, fd);
  try {
    // Now, so that nobody takes it for what a dead server left (stale.py).
    if (!file->lock.try_lock(Role::kProducer)) {
      throw OsError(errno, "cannot lock the ring: its file system must support locks", path);
    }
    if (::fchmod(fd, 0600) != 0) throw OsError(errno, "cannot set the ring's mode", path);
    const uint64_t header_bytes = align_up(kInfoOffset + info.size() + kOutBytes, kPageBytes);
    const uint64_t file_bytes = header_bytes + capacity_bytes;
    check_room(fd, path, file_bytes);
    if (::ftruncate(fd, static_cast<off_t>(file_bytes)) != 0) {
      throw OsError(errno, cat("cannot size the ring to ", file_bytes, " bytes"), path);
    }
    struct stat st{};
    if (::fstat(fd, &st) != 0) throw OsError(errno, "cannot inspect the ring", path);
    file->dev = st.st_dev;
    file->ino = st.st_ino;
    file->map = map_again(draft.name, st, Access::kReadWrite, draft.nameless ? 0 : O_NOFOLLOW);
    // All memory is taken and mapped now: otherwise the first copies of a forward pass would do it,
    // and a full /dev/shm would be a SIGBUS in the middle of one.
    populate(fd, path, file->map->base(), file_bytes, progress);

    RingHeader* header = file->map->header();
    std::memcpy(header->magic, kMagic, sizeof kMagic);
    header->version = kLayoutVersion;
    header->header_bytes = static_cast<uint32_t>(header_bytes);
    header->capacity_bytes = capacity_bytes;
    header->info_bytes = static_cast<uint32_t>(info.size());
    if (!info.empty()) std::memcpy(file->map->info(), info.data(), info.size());
    file->map->header_bytes = header_bytes;
    file->map->capacity_bytes = capacity_bytes;
    file->map->info_bytes = info.size();
    publish(draft, path);
  } catch (...) {
    if (!draft.nameless) ::unlink(draft.name.c_str());
    throw;
  }
  return file;
}

static void check_header(RingFile& file, uint64_t file_bytes) {
  const RingHeader* const header = file.map->header();
  const std::string& path = file.path;
  check(std::memcmp(header->magic, kMagic, sizeof kMagic) == 0, Fault::kLayout, path,
        ": not a ring: it begins with ", hex(header->magic, sizeof kMagic), ", a ring with ",
        hex(kMagic, sizeof kMagic));
  const uint32_t version = header->version;
  check(version == kLayoutVersion, Fault::kLayout, path, ": ring layout version ", version,
        ", this release reads ", kLayoutVersion, ": use one hstransport release on both sides");
  const uint64_t header_bytes = header->header_bytes;
  const uint64_t capacity_bytes = header->capacity_bytes;
  const uint64_t info_bytes = header->info_bytes;
  check(header_bytes != 0 && header_bytes % kPageBytes == 0, Fault::kLayout, path,
        ": header_bytes is ", header_bytes, ", must be a multiple of ", kPageBytes);
  check(capacity_bytes >= kMinCapacityBytes && capacity_bytes % kPageBytes == 0, Fault::kLayout,
        path, ": capacity_bytes is ", capacity_bytes, ", must be a multiple of ", kPageBytes,
        ", at least ", kMinCapacityBytes);
  check(header_bytes <= file_bytes && capacity_bytes == file_bytes - header_bytes, Fault::kLayout,
        path, ": the header says ", header_bytes, " + ", capacity_bytes, " bytes, the file has ",
        file_bytes);
  check(info_bytes <= header_bytes - kInfoOffset, Fault::kLayout, path, ": info_bytes is ",
        info_bytes, ", the header has room for ", header_bytes - kInfoOffset);
  file.map->header_bytes = header_bytes;
  file.map->capacity_bytes = capacity_bytes;
  file.map->info_bytes = info_bytes;
}

std::unique_ptr<RingFile> RingFile::open(const std::string& path, Access access) {
  const int mode = access == Access::kRead ? O_RDONLY : O_RDWR;
  // O_NONBLOCK: opening a FIFO that was put there must not hang.
  const int fd = ::open(path.c_str(), mode | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) {
    const int code = errno;
    check(code != EISDIR && code != ELOOP && code != ENXIO, Fault::kLayout, path,
          ": not a ring: ", std::strerror(code), ", a ring is a regular file");
    throw OsError(code, code == ENOENT ? "no such ring" : "cannot open the ring", path);
  }
  auto file = std::make_unique<RingFile>(path, fd);
  struct stat st{};
  if (::fstat(fd, &st) != 0) throw OsError(errno, "cannot inspect the ring", path);
  check(S_ISREG(st.st_mode), Fault::kLayout, path, ": not a ring: not a regular file");
  if (st.st_uid != ::geteuid()) {
    throw OsError(EPERM,
                  cat("the ring belongs to uid ", st.st_uid, ", this process runs as uid ",
                      ::geteuid(), ": run the consumer as the server's user"),
                  path);
  }
  const uint64_t file_bytes = static_cast<uint64_t>(st.st_size);
  check(file_bytes >= kPageBytes, Fault::kLayout, path, ": not a ring: it has ", file_bytes,
        " bytes, a ring at least ", kPageBytes + kMinCapacityBytes);
  file->dev = st.st_dev;
  file->ino = st.st_ino;
  file->map = map_again(path, st, access);
  check_header(*file, file_bytes);
  return file;
}

}  // namespace hst
