// Planes of a sample out of files, by as many threads as come: nothing of Python is needed between
// one plane and the next.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace hst {

// One plane of a chunk: where its two frames lie in a file, mantissas first, and where its words
// go.
struct PlaneRead {
  int fd;
  uint64_t offset;
  size_t mantissas, exponents;  // bytes
  const uint8_t* bias;
  uint8_t* dst;
  size_t rows, stride_bytes;
};

class PlaneReads {
 public:
  PlaneReads(std::vector<PlaneRead> reads, size_t hidden, bool stream)
      : reads_(std::move(reads)), hidden_(hidden), stream_(stream), done_(reads_.size()) {}

  // Takes one read after another, at most so many; in any number of threads. False when none is
  // left to be taken. Throws std::bad_alloc.
  bool work(size_t most);
  // Once nobody is at work: from then on no thread touches a file or a destination, whatever comes.
  void close();
  // Those that came to nothing: the file is shorter, cannot be read, or has other frames than
  // pack_plane's. After close.
  std::vector<size_t> left() const;

 private:
  struct Leave;

  bool read(const PlaneRead& r) const;

  const std::vector<PlaneRead> reads_;
  const size_t hidden_;
  const bool stream_;
  std::mutex mutex_;
  std::condition_variable idle_;
  size_t next_ = 0, at_work_ = 0;  // with the mutex
  std::vector<uint8_t> done_;      // each byte is one thread's
};

}  // namespace hst
