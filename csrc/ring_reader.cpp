#include "ring_reader.h"

#include <cstring>
#include <utility>

#include "check.h"

namespace hst {

RingReader::RingReader(const std::string& path, std::shared_ptr<Mapping> shared)
    : file_(RingFile::open(path, Access::kReadWrite)) {
  if (shared) file_->map = std::move(shared);
  check(file_->lock.try_lock(Role::kConsumer), Fault::kBusy, path,
        ": another consumer is attached: a ring has one, stop it first");
  // Read only once the lock is held: before that another consumer may still move the tail.
  tail_ = cursor_ = load_acquire(&file_->map->header()->tail);
  tell_out({});  // an earlier consumer may have been killed
  acquire_head();
}

void RingReader::need_open() const {
  check(is_open(), Fault::kRing, file_->path, ": the reader is closed (or this is a forked child)");
}

uint64_t RingReader::acquire_head() const {
  // HEAD (acquire half): headers and metadata of all records before it are visible.
  const uint64_t head = load_acquire(&file_->map->header()->head);
  check_positions(*file_, tail_, head);
  check(head >= cursor_, Fault::kCorrupt, file_->path, ": header: head is ", head,
        ", before the record read last, which ends at ", cursor_,
        ": the ring is corrupt, delete the file");
  return head;
}

std::optional<CheckedRecord> RingReader::at_cursor() {
  const uint64_t head = acquire_head();
  if (cursor_ == head) return std::nullopt;
  CheckedRecord record = check_record(*file_, cursor_, head);
  if (record.padding()) {
    // Padding needs no lease: it is freed with the record after it.
    cursor_ = record.end();
    if (cursor_ == head) return std::nullopt;
    record = check_record(*file_, cursor_, head);  // (at the data area's start: no padding again)
  }
  const uint64_t seq = record.header.seq;
  // Dropped records take no number, so there are no gaps.
  const uint64_t bound = load_relaxed(&file_->map->header()->next_seq);
  check(next_seq_ ? seq == *next_seq_ : seq < bound, Fault::kCorrupt, file_->path,
        ": record at position ", record.position, ": seq is ", seq, ", must be ",
        next_seq_ ? "" : "less than ", next_seq_.value_or(bound),
        ": the ring is corrupt, delete the file");
  return record;
}

uint64_t RingReader::lease_to(uint64_t end) {
  extents_.push_back({end, false});
  cursor_ = end;
  return first_ticket_ + extents_.size() - 1;
}

std::optional<Lease> RingReader::read() {
  need_open();
  std::lock_guard<std::mutex> hold(mutex_);
  const std::optional<CheckedRecord> record = at_cursor();
  if (!record || record->header.ready == kPending) return std::nullopt;
  next_seq_ = record->header.seq + 1;
  return Lease{*record, lease_to(record->end())};
}

std::optional<CheckedRecord> RingReader::pending() {
  need_open();
  std::lock_guard<std::mutex> hold(mutex_);
  std::optional<CheckedRecord> record = at_cursor();
  if (record && record->header.ready != kPending) record.reset();
  return record;
}

std::optional<CheckedRecord> RingReader::skip_pending() {
  need_open();
  check(!producer_alive(), Fault::kBusy, file_->path,
        ": the producer is alive and may yet commit its pending record: wait for it");
  // Looked at after the probe: the producer may have committed it with its last breath.
  std::lock_guard<std::mutex> hold(mutex_);
  const std::optional<CheckedRecord> record = at_cursor();
  if (!record || record->header.ready != kPending) return std::nullopt;
  next_seq_ = record->header.seq + 1;
  release_locked(lease_to(record->end()));
  return record;
}

void RingReader::release(uint64_t ticket, uint64_t seq) {
  check(is_open(), Fault::kLease, file_->path, ": record ", seq,
        ": the reader is closed, the next consumer will read this record again");
  std::lock_guard<std::mutex> hold(mutex_);
  release_locked(ticket);
}

void RingReader::release_locked(uint64_t ticket) {
  extents_[ticket - first_ticket_].released = true;
  const uint64_t before = tail_;
  while (!extents_.empty() && extents_.front().released) {
    tail_ = extents_.front().end;
    extents_.pop_front();
    ++first_ticket_;
  }
  // TAIL (release half): every read of the freed bytes is over before it.
  if (tail_ != before) store_release(&file_->map->header()->tail, tail_);
}

bool RingReader::tell_out(const std::string& directory) {
  need_open();
  uint8_t* const out = file_->map->out();
  if (!out || directory.size() > kOutBytes) return false;
  uint32_t* const bytes = &file_->map->header()->out_bytes;
  store_release<uint32_t>(bytes, 0);
  std::memcpy(out, directory.data(), directory.size());
  store_release(bytes, static_cast<uint32_t>(directory.size()));
  return true;
}

bool RingReader::producer_alive() const {
  need_open();
  return file_->lock.held_by_other(Role::kProducer);
}

bool RingReader::unlink_if_orphaned() {
  need_open();
  std::lock_guard<std::mutex> hold(mutex_);
  if (file_->map->cut()) return false;  // left for a person to look at, as any corrupt ring
  if (tail_ != acquire_head() || !file_->lock.try_lock(Role::kProducer)) return false;
  // Again, now that no producer can move it.
  const bool unlinked = tail_ == acquire_head() && file_->unlink();
  file_->lock.unlock(Role::kProducer);
  return unlinked;
}

void RingReader::close() {
  if (!is_open()) return;  // before the mutex: in a forked child nobody will unlock it
  std::lock_guard<std::mutex> hold(mutex_);
  file_->lock.close();
}

uint64_t RingReader::tail() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return tail_;
}

uint64_t RingReader::cursor() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return cursor_;
}

Inspection inspect_ring(const std::string& path) {
  const std::unique_ptr<RingFile> file = RingFile::open(path, Access::kRead);
  const RingHeader* const header = file->map->header();
  Inspection look;
  look.info = file->info();
  look.counters = file->counters();
  look.capacity_bytes = file->map->capacity_bytes;
  look.closed = load_acquire(&header->closed) != 0;
  look.producer_alive = file->lock.held_by_other(Role::kProducer);
  look.consumer_attached = file->lock.held_by_other(Role::kConsumer);
  if (look.consumer_attached) look.out = file->out();
  // Tail before head: the other way round a fast pair could show tail > head.
  look.tail = load_acquire(&header->tail);
  look.head = load_acquire(&header->head);
  if (load_acquire(&header->tail) == look.tail) check_positions(*file, look.tail, look.head);

  for (uint64_t at = look.tail; at < look.head;) {
    CheckedRecord record;
    std::exception_ptr fault;
    try {
      record = check_record(*file, at, look.head);
    } catch (const Error&) {
      fault = std::current_exception();
    }
    // Both sides may be at work. What was freed meanwhile may have been written anew while it was
    // looked at: forget it and go on from where the tail is now.
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    const uint64_t tail = load_relaxed(&header->tail);
    if (tail > at && tail > look.tail) {
      at = look.tail = tail;
      look.committed = look.pending = look.abandoned = 0;
      continue;
    }
    if (fault) std::rethrow_exception(fault);
    at = record.end();
    if (record.padding()) continue;
    ++(record.header.ready == kPending     ? look.pending
       : record.header.ready == kCommitted ? look.committed
                                           : look.abandoned);
  }
  look.head = look.head < look.tail ? look.tail : look.head;
  file->check_whole();
  return look;
}

}  // namespace hst
