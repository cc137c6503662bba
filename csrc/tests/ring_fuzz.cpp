// What both sides of a ring do while others bend the memory that they share: an error, and never a
// byte read outside of a record. Built by clang it is a libFuzzer target; elsewhere its own main
// tries so many inputs at random, after the files that are named.
//
//     ring_fuzz -max_total_time=60           (clang)
//     ring_fuzz 100000 [FILE...]             (any compiler)
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "fuzz_main.h"
#include "ring_reader.h"
#include "ring_writer.h"

namespace {

using namespace hst;

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

// An input is a list of deeds, each of a byte or more; where it ends there are zeros.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool more() const { return at_ < end_; }
  template <class T>
  T take() {
    T value{};
    const size_t n = std::min<size_t>(sizeof value, end_ - at_);
    if (n) std::memcpy(&value, at_, n);
    at_ += n;
    return value;
  }

 private:
  const uint8_t* at_;
  const uint8_t* const end_;
};

class Deeds {
 public:
  explicit Deeds(const std::string& path)
      : path_(path), writer_(path, kMinCapacityBytes, "the info"), reader_(attach()) {}
  ~Deeds() {
    reader_.reset();
    writer_.close();
    ::unlink(path_.c_str());
  }

  void next(Input& input) {
    switch (input.take<uint8_t>() % 9) {
      case 0: {
        const std::string meta(input.take<uint8_t>(), 'm');
        const std::optional<Slot> slot = writer_.reserve(1, meta, input.take<uint16_t>(), 64);
        if (slot) slots_.push_back(*slot);
        break;
      }
      case 1:
        if (slots_.empty()) break;
        writer_.finish(slots_.front(), input.take<uint8_t>() % 4 ? kCommitted : kAbandoned);
        slots_.pop_front();
        break;
      case 2:  // a header's word
        bend(input.take<uint8_t>() * 4 % kInfoOffset, input);
        break;
      case 3:  // a word of the record that comes next
        bend(map().header_bytes + reader_->cursor() % map().capacity_bytes +
                 input.take<uint8_t>() % 16 * 4,
             input);
        break;
      case 4:  // any word
        bend(input.take<uint32_t>() % (map().bytes() / 4) * 4, input);
        break;
      case 5:
        if (const std::optional<Lease> lease = reader_->read()) {
          touch(lease->record);
          leases_.push_back(*lease);
        }
        break;
      case 6: {
        if (leases_.empty()) break;
        const size_t i = input.take<uint8_t>() % leases_.size();
        reader_->release(leases_[i].ticket, leases_[i].record.header.seq);
        leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
      case 7: {
        const Inspection look = inspect_ring(path_);
        require(look.info.size() <= map().header_bytes, "the info lies in the header");
        if (const std::optional<CheckedRecord> record = reader_->pending()) touch(*record);
        break;
      }
      case 8:
        reader_.reset();
        leases_.clear();
        if (input.take<uint8_t>() % 4 == 0) writer_.close();
        reader_ = attach();
        if (!reader_->producer_alive()) {
          if (const std::optional<CheckedRecord> record = reader_->skip_pending()) touch(*record);
          reader_->unlink_if_orphaned();
        }
        break;
    }
  }
  bool over() const { return !reader_; }

 private:
  std::unique_ptr<RingReader> attach() { return std::make_unique<RingReader>(path_); }
  const Mapping& map() const { return *writer_.map(); }

  void bend(uint64_t offset, Input& input) {
    const uint8_t how = input.take<uint8_t>();
    const auto value = how % 4 ? input.take<uint32_t>() : input.take<uint8_t>();
    std::memcpy(map().base() + offset, &value, sizeof value);
    // The upper half of a word too: what does not fit 32 bits.
    if (how % 8 == 7 && offset % 8 == 0) std::memcpy(map().base() + offset + 4, &value, 4);
  }

  // All that a consumer reads of a record lies in the record, and that in the data area.
  void touch(const CheckedRecord& record) {
    const RecordHeader& h = record.header;
    const uint64_t at = record.position % map().capacity_bytes;
    require(h.record_bytes <= map().capacity_bytes - at, "a record ends with the data area");
    require(sizeof h + h.meta_bytes <= h.payload_offset, "metadata end before the payload");
    require(h.payload_offset <= h.record_bytes, "the payload begins in the record");
    require(h.payload_bytes <= h.record_bytes - h.payload_offset, "and ends in it");
    const uint8_t* const bytes = reader_->map()->at(record.position);
    for (uint64_t i = 0; i < h.record_bytes; ++i) sum_ = sum_ + bytes[i];
  }

  const std::string path_;
  RingWriter writer_;
  std::unique_ptr<RingReader> reader_;
  std::deque<Slot> slots_;
  std::vector<Lease> leases_;
  volatile uint8_t sum_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // In the current folder: a crash leaves it there.
  static const std::string path = cat("./ring-fuzz-", ::getpid(), ".ring");
  Input input(data, size);
  Deeds deeds(path);
  while (input.more() && !deeds.over()) {
    try {
      deeds.next(input);
    } catch (const Error&) {
    } catch (const OsError&) {
    }
  }
  return 0;
}

#ifndef HST_LIBFUZZER
int main(int argc, char** argv) {
  const long inputs = try_files(argc, argv);
  std::mt19937_64 random(1);
  std::vector<uint8_t> data;
  for (long n = 0; n < inputs; ++n) {
    data.resize(random() % 400);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(random() >> random() % 57);
    LLVMFuzzerTestOneInput(data.data(), data.size());
  }
  std::puts("ring_fuzz: all well");
}
#endif
