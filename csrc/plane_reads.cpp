#include "plane_reads.h"

#include <unistd.h>

#include <cerrno>

#include "unpack.h"

namespace hst {

static bool read_all(int fd, uint8_t* out, size_t size, uint64_t offset) {
  while (size != 0) {
    const ssize_t n = ::pread(fd, out, size, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    out += n;
    size -= static_cast<size_t>(n);
    offset += static_cast<uint64_t>(n);
  }
  return true;
}

void PlaneReads::work() {
  // Kept from one sample to the next: fresh memory costs as much as the copying.
  static thread_local std::vector<uint8_t> frames;
  for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < reads_.size();) {
    const PlaneRead& r = reads_[i];
    const size_t size = r.mantissas + r.exponents;
    if (frames.size() < size) frames.resize(size);
    if (!read_all(r.fd, frames.data(), size, r.offset)) continue;
    const Span mantissas{frames.data(), r.mantissas};
    const Span exponents{frames.data() + r.mantissas, r.exponents};
    done_[i] =
        unpack_plane(exponents, mantissas, r.bias, r.dst, r.rows, hidden_, r.stride_bytes, stream_);
  }
}

std::vector<size_t> PlaneReads::left() const {
  std::vector<size_t> left;
  for (size_t i = 0; i < done_.size(); ++i) {
    if (done_[i] == 0) left.push_back(i);
  }
  return left;
}

}  // namespace hst
