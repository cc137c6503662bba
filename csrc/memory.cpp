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
#include <fstream>
#include <mutex>
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

// The number in a file of one number; `absent` if there is none ("max").
static uint64_t number_in(const std::string& path, uint64_t absent) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : absent;
}

// Bytes of a cgroup's page cache, which counts as used and is given up when memory is short.
static uint64_t file_cache_bytes(const std::string& stat_path, const std::string& prefix) {
  std::ifstream stat(stat_path);
  uint64_t bytes = 0;
  std::string name;
  for (uint64_t value = 0; stat >> name >> value;) {
    if (name == prefix + "inactive_file" || name == prefix + "active_file") bytes += value;
  }
  return bytes;
}

// What the cgroups of this process leave, under cgroup v2 or v1.
static uint64_t cgroup_bytes() {
  uint64_t left = UINT64_MAX;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = line.compare(0, first, "0") == 0 && controllers.empty();
    if (!v2 && controllers != "memory") continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    const char* const limit = v2 ? "/memory.max" : "/memory.limit_in_bytes";
    const char* const usage = v2 ? "/memory.current" : "/memory.usage_in_bytes";
    // A limit of any ancestor counts. In a container the path may be the host's and not exist.
    std::string group = line.substr(second + 1);
    for (;;) {
      const uint64_t max = number_in(root + group + limit, UINT64_MAX);
      const uint64_t used = number_in(root + group + usage, 0);
      const uint64_t cache = file_cache_bytes(root + group + "/memory.stat", v2 ? "" : "total_");
      const uint64_t held = used - std::min(used, cache);
      left = std::min(left, max > held ? max - held : 0);
      if (group.empty()) break;
      group.resize(group.find_last_of('/') == std::string::npos ? 0 : group.find_last_of('/'));
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
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1) {
      available = std::min<uint64_t>(available, kib * 1024);
    }
  }
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
  unsigned running = static_cast<unsigned>(std::min<uint64_t>(
      {steps, kMaxThreads, std::max(1u, std::thread::hardware_concurrency())}));
  std::vector<std::thread> threads;
  for (unsigned i = running; i > 0; --i) {
    threads.emplace_back([&] {
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
    });
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
