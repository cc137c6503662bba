#include "memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "check.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace hst {

static constexpr uint64_t kPage = 4096;
static constexpr uint64_t kStep = 64 << 20;
static constexpr unsigned kMaxThreads = 8;

// A file of /proc or /sys, whole; empty if there is none.
static std::string text_of(const std::string& path) {
  std::string text;
  if (std::FILE* const file = std::fopen(path.c_str(), "re")) {
    char part[4096];
    for (size_t n; (n = std::fread(part, 1, sizeof part, file)) > 0;) text.append(part, n);
    std::fclose(file);
  }
  return text;
}

// The number behind `name` at the beginning of a line; `absent` if there is none ("max").
static uint64_t number_in(const std::string& text, const std::string& name, uint64_t absent) {
  for (size_t at = 0; at < text.size(); at = text.find('\n', at) + 1) {
    if (text.compare(at, name.size(), name) == 0) {
      unsigned long long value = 0;
      return std::sscanf(text.c_str() + at + name.size(), "%llu", &value) == 1 ? value : absent;
    }
    if (text.find('\n', at) == std::string::npos) break;
  }
  return absent;
}

// What a cgroup leaves. Its page cache counts as used, and is given up when memory is short.
static uint64_t left_in(const std::string& group, bool v2) {
  const char* const limit = v2 ? "/memory.max" : "/memory.limit_in_bytes";
  const char* const usage = v2 ? "/memory.current" : "/memory.usage_in_bytes";
  const std::string prefix = v2 ? "" : "total_";
  const uint64_t max = number_in(text_of(group + limit), "", UINT64_MAX);
  const uint64_t used = number_in(text_of(group + usage), "", 0);
  const std::string stat = text_of(group + "/memory.stat");
  const uint64_t cache =
      number_in(stat, prefix + "inactive_file ", 0) + number_in(stat, prefix + "active_file ", 0);
  const uint64_t held = used - std::min(used, cache);
  return max > held ? max - held : 0;
}

// What the cgroups of this process leave, under cgroup v2 or v1.
static uint64_t cgroup_bytes() {
  uint64_t left = UINT64_MAX;
  const std::string groups = text_of("/proc/self/cgroup");  // lines of id:controllers:path
  for (size_t at = 0, end; (end = groups.find('\n', at)) != std::string::npos; at = end + 1) {
    const std::string line = groups.substr(at, end - at);
    const bool v2 = line.compare(0, 3, "0::") == 0;
    const size_t v1 = line.find(":memory:");
    if (!v2 && v1 == std::string::npos) continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    // A limit of any ancestor counts. In a container the path may be the host's and not exist.
    std::string group = v2 ? line.substr(3) : line.substr(v1 + 8);
    for (;;) {
      left = std::min(left, left_in(root + group, v2));
      const size_t parent = group.rfind('/');
      if (group.empty() || parent == std::string::npos) break;
      group.resize(parent);
    }
  }
  return left;
}

uint64_t available_bytes(int fd, const std::string& path) {
  struct statfs fs{};
  if (::fstatfs(fd, &fs) != 0) throw OsError(errno, "cannot ask for free space", path);
  // A tmpfs without a limit has no blocks.
  uint64_t available = fs.f_blocks == 0 ? UINT64_MAX : uint64_t{fs.f_bavail} * fs.f_bsize;
  if (fs.f_type != TMPFS_MAGIC) return available;
  const uint64_t kib = number_in(text_of("/proc/meminfo"), "MemAvailable:", UINT64_MAX / 1024);
  available = std::min(available, kib * 1024);
  return std::min(available, cgroup_bytes());
}

static OsError no_space(const std::string& path) {
  return OsError(ENOSPC, "no memory is left for the ring: choose a smaller one", path);
}

// Older kernels: allocate first, then touch, which fills the page tables.
static void allocate_step(int fd, const std::string& path, uint64_t at, uint64_t bytes) {
  int code = EINTR;
  // tmpfs undoes an allocation that a signal interrupts, and a timer may send many.
  while (code == EINTR) {
    code = ::posix_fallocate(fd, static_cast<off_t>(at), static_cast<off_t>(bytes));
  }
  if (code == ENOSPC) throw no_space(path);
  if (code != 0) throw OsError(code, "cannot allocate the ring", path);
}

static void populate_step(int fd, const std::string& path, uint8_t* base, uint64_t at,
                          uint64_t bytes) {
  for (;;) {
    if (::madvise(base + at, bytes, MADV_POPULATE_WRITE) == 0) return;
    switch (errno) {
      case EINTR:
      case EAGAIN:
        continue;
      case EINVAL:
        allocate_step(fd, path, at, bytes);
        for (uint64_t i = at; i < at + bytes; i += kPage) {
          (void)*const_cast<const volatile uint8_t*>(base + i);
        }
        return;
      case EFAULT:  // a touch would be a SIGBUS
        throw no_space(path);
      default:
        throw OsError(errno, "cannot allocate the ring", path);
    }
  }
}

void populate(int fd, const std::string& path, uint8_t* base, uint64_t bytes,
              const std::function<void(uint64_t)>& progress) {
  std::atomic<uint64_t> next{0};
  std::atomic<uint64_t> done{0};
  std::mutex mutex;
  std::condition_variable ended;
  std::exception_ptr failure;
  const uint64_t steps = (bytes + kStep - 1) / kStep;
  unsigned running = static_cast<unsigned>(
      std::min<uint64_t>({steps, kMaxThreads, std::max(1u, std::thread::hardware_concurrency())}));
  std::vector<std::thread> threads;
  const auto work = [&] {
    try {
      for (uint64_t at; (at = next.fetch_add(kStep)) < bytes;) {
        const uint64_t step = std::min(kStep, bytes - at);
        populate_step(fd, path, base, at, step);
        done += step;
      }
    } catch (...) {
      next = bytes;  // the others stop as well
      std::lock_guard<std::mutex> hold(mutex);
      failure = std::current_exception();
    }
    std::lock_guard<std::mutex> hold(mutex);
    --running;
    ended.notify_one();
  };
  for (unsigned wanted = running; threads.size() < wanted;) {
    try {
      threads.emplace_back(work);
    } catch (const std::system_error&) {  // a limit on threads: those that there are do it
      const std::lock_guard<std::mutex> hold(mutex);
      running -= wanted - static_cast<unsigned>(threads.size());
      break;
    }
  }
  if (threads.empty()) {
    running = 1;
    work();
  }
  std::unique_lock<std::mutex> hold(mutex);
  std::exception_ptr interrupted;
  while (!ended.wait_for(hold, std::chrono::seconds(1), [&] { return running == 0; })) {
    hold.unlock();
    try {
      if (progress) progress(done);
    } catch (...) {
      interrupted = std::current_exception();
      next = bytes;
    }
    hold.lock();
  }
  hold.unlock();
  for (std::thread& thread : threads) thread.join();
  if (interrupted) std::rethrow_exception(interrupted);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace hst
