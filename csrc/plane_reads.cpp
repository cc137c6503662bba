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

struct PlaneReads::Leave {
  PlaneReads& reads;
  ~Leave() {
    std::lock_guard<std::mutex> hold(reads.mutex_);
    if (--reads.at_work_ == 0) reads.idle_.notify_all();
  }
};

bool PlaneReads::work(size_t most) {
  for (; most != 0; --most) {
    size_t i;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      if (next_ >= reads_.size()) return false;
      i = next_++;
      ++at_work_;
    }
    const Leave leave{*this};  // however it ends: close() waits for it
    done_[i] = read(reads_[i]);
  }
  return true;
}

void PlaneReads::close() {
  std::unique_lock<std::mutex> hold(mutex_);
  next_ = reads_.size();
  idle_.wait(hold, [&] { return at_work_ == 0; });
}

bool PlaneReads::read(const PlaneRead& r) const {
  // Kept from one sample to the next: fresh memory costs as much as the copying.
  static thread_local std::vector<uint8_t> frames;
  const size_t size = r.mantissas + r.exponents;
  if (frames.size() < size) frames.resize(size);
  if (!read_all(r.fd, frames.data(), size, r.offset)) return false;
  return unpack_plane({frames.data() + r.mantissas, r.exponents}, {frames.data(), r.mantissas},
                      r.bias, r.dst, r.rows, hidden_, r.stride_bytes, stream_);
}

std::vector<size_t> PlaneReads::left() const {
  std::vector<size_t> left;
  for (size_t i = 0; i < done_.size(); ++i) {
    if (done_[i] == 0) left.push_back(i);
  }
  return left;
}

}  // namespace hst
