// Memory for a ring: how much there is, and taking it all at once.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace hst {

// What may still be allocated on the file system of `fd`: its free space and, since a tmpfs may be
// larger than the memory that is left, what the machine and this process's cgroups have left.
// To go beyond would call the OOM killer, on this process or on any other.
uint64_t available_bytes(int fd, const std::string& path);

// Backs every page of a shared mapping of `fd` with memory, on several threads: one thread clears
// about 1.4 GB/s. Throws OsError(ENOSPC) where untouched pages would be a SIGBUS later.
void populate(int fd, const std::string& path, uint8_t* base, uint64_t bytes,
              const std::function<void(uint64_t)>& progress);

}  // namespace hst
