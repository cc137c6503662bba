#include "unpack.h"

#include <algorithm>

#include "codec.h"

namespace hst {

namespace {

// Where the next words of a plane go, and their bias.
class Rows {
 public:
  Rows(const uint8_t* bias, uint8_t* dst, size_t hidden, size_t stride_bytes, bool stream)
      : bias_(bias), row_(dst), hidden_(hidden), stride_bytes_(stride_bytes), stream_(stream) {}

  void join(const uint8_t* exponents, const uint8_t* mantissas, size_t size) {
    while (size != 0) {
      // Whole rows, or what there is of one.
      const bool whole = column_ == 0 && size >= hidden_;
      const size_t rows = whole ? size / hidden_ : 1;
      const size_t columns = whole ? hidden_ : std::min(size, hidden_ - column_);
      join_planes(exponents, mantissas, bias_ + column_, row_ + 2 * column_, rows, columns,
                  stride_bytes_, stream_);
      exponents += rows * columns;
      mantissas += rows * columns;
      size -= rows * columns;
      column_ = whole ? 0 : (column_ + columns) % hidden_;
      row_ += (column_ == 0 ? rows : 0) * stride_bytes_;
    }
  }

 private:
  const uint8_t* bias_;
  uint8_t* row_;
  size_t hidden_, stride_bytes_, column_ = 0;
  bool stream_;
};

}  // namespace

bool unpack_frame(Span frame, uint8_t* dst, uint64_t size) {
  static thread_local FrameReader reader;
  if (!reader.open(frame.data, frame.size, size)) return false;
  for (Span span; reader.next(span);) dst = std::copy_n(span.data, span.size, dst);
  return reader.well();
}

bool unpack_plane(Span exponents, Span mantissas, const uint8_t* bias, uint8_t* dst, size_t rows,
                  size_t hidden, size_t stride_bytes, bool stream) {
  static thread_local FrameReader one, other;
  if (!one.open(exponents.data, exponents.size, uint64_t{rows} * hidden) ||
      !other.open(mantissas.data, mantissas.size, uint64_t{rows} * hidden)) {
    return false;
  }
  Rows words(bias, dst, hidden, stride_bytes, stream);
  Span e{nullptr, 0}, m{nullptr, 0};
  while ((e.size != 0 || one.next(e)) && (m.size != 0 || other.next(m))) {
    const size_t n = std::min(e.size, m.size);
    words.join(e.data, m.data, n);
    e = {e.data + n, e.size - n};
    m = {m.data + n, m.size - n};
  }
  // One of the two may have empty blocks left.
  while (e.size == 0 && one.next(e)) continue;
  while (m.size == 0 && other.next(m)) continue;
  return e.size == 0 && m.size == 0 && one.well() && other.well();
}

}  // namespace hst
