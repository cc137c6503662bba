#include "copier.h"

#include <unistd.h>

#include <algorithm>
#include <thread>

#include "check.h"

#ifdef HST_GATHER_FATBIN
extern "C" const unsigned char hst_gather_fatbin[];  // written by embed.cmake
static constexpr unsigned kBlocksPerMultiprocessor = 8;
#endif

namespace hst {

using namespace cuda;

static constexpr uint64_t kStageAlign = 256;
// The server's own small copies (the tokens of a step, say) go through the same engine, one copy at
// a time: behind one of 256 MiB they would wait 5 ms, behind this 0.15 ms.
static constexpr uint64_t kCopyBytes = 8 << 20;

Pinned::Pinned(std::shared_ptr<Device> device, std::shared_ptr<Mapping> map)
    : device_(std::move(device)), map_(std::move(map)) {
  ContextScope scope(device_->context());
  const Driver& d = driver();
  const Result result =
      d.host_register(map_->base(), map_->bytes(), kHostRegisterPortable | kHostRegisterDeviceMap);
  if (result != 0) {
    const char* name = nullptr;
    d.error_name(result, &name);
    throw Error(Fault::kCuda,
                cat("the driver cannot pin the ring's ", map_->bytes(),
                    " bytes (cuMemHostRegister: ", name ? name : "unknown error",
                    "): choose a smaller ring (HSTRANSPORT_RING_BYTES), or raise the limit on "
                    "locked memory (ulimit -l; docker --ulimit memlock=-1) or of the container"));
  }
  const Result mapped = d.host_device_ptr(&base_, map_->base(), 0);
  if (mapped != 0) d.host_unregister(map_->base());
  check_call(mapped, "cuMemHostGetDevicePointer");
}

Pinned::~Pinned() {
  try {
    ContextScope scope(device_->context());
    driver().host_unregister(map_->base());
  } catch (const Error&) {
    // The process ends, and the driver with it, or its context is lost: nothing is pinned then.
  }
}

DevicePtr Pinned::device_ptr(const void* host) const {
  return base_ + (static_cast<const uint8_t*>(host) - map_->base());
}

Copier::Copier(int device, uint64_t stage_bytes)
    : device_(std::make_shared<Device>(device)),
      stage_bytes_(align_up(stage_bytes, kStageAlign)),
      pid_(::getpid()) {
  check(stage_bytes > 0, Fault::kConfig, "stage_bytes=0: a copy needs room on the device");
  try {
    ContextScope scope(device_->context());
    const Result result = driver().mem_alloc(&stage_, stage_bytes_);
    check(result != 2, Fault::kCuda, "the GPU has no ", stage_bytes_,
          " bytes left for the stage: choose a smaller one (HSTRANSPORT_STAGE_BYTES), or give "
          "SGLang less (--mem-fraction-static)");
    check_call(result, "cuMemAlloc");
    check_call(driver().stream_create(&stream_, kStreamNonBlocking), "cuStreamCreate");
    load_kernel();
  } catch (...) {
    close();
    throw;
  }
}

Copier::~Copier() { close(); }

void Copier::load_kernel() {
#ifdef HST_GATHER_FATBIN
  const Driver& d = driver();
  // A card that the kernel was not compiled for: the copy engine gathers as well.
  if (d.module_load(&module_, hst_gather_fatbin) != 0) {
    module_ = nullptr;
    return;
  }
  check_call(d.module_function(&gather2_, module_, "gather2"), "cuModuleGetFunction");
  check_call(d.module_function(&gather16_, module_, "gather16"), "cuModuleGetFunction");
  blocks_ = kBlocksPerMultiprocessor * device_->attribute(kMultiprocessorCount);
#endif
}

void Copier::check_open() const {
  check(is_open() && pid_ == ::getpid(), Fault::kLease,
        "the copier is closed (or this is a forked child, where CUDA does not work)");
}

void Copier::pin(const RingWriter& ring) {
  check_open();
  pinned_ = std::make_unique<Pinned>(device_, ring.map());
}

std::optional<StageClaim> Copier::claim(Stream stream, uint64_t bytes) {
  check(bytes > 0 && bytes <= stage_bytes_, Fault::kConfig, "a claim of ", bytes,
        " bytes: the stage has ", stage_bytes_);
  reap();
  StageClaim claim;
  claim.begin = head_;
  const uint64_t room = stage_bytes_ - head_ % stage_bytes_;
  const uint64_t size = align_up(bytes, kStageAlign);
  if (size > room) claim.begin += room;
  claim.end = claim.begin + size;
  claim.address = stage_ + claim.begin % stage_bytes_;

  // The last copy that reads what this claim overwrites; those before it end earlier.
  const Claim* blocker = nullptr;
  for (const Claim& older : claims_) {
    if (older.begin + stage_bytes_ >= claim.end) continue;
    if (!older.done) return std::nullopt;
    blocker = &older;
  }
  if (blocker) check_call(driver().stream_wait(stream, blocker->done, 0), "cuStreamWaitEvent");
  head_ = claim.end;
  claims_.push_back({claim.begin});
  return claim;
}

void Copier::launch(Stream stream, GatherArguments& a) {
  uint64_t all = a.target | a.target_plane | a.target_row | a.row_bytes;
  for (uint32_t p = 0; p < a.planes; ++p) all |= a.plane[p].address | a.plane[p].stride_bytes;
  const uint64_t items = uint64_t{a.planes} * a.rows;
  const unsigned blocks = static_cast<unsigned>(std::min<uint64_t>(items, blocks_));
  void* arguments[] = {&a};
  check_call(driver().launch(all % 16 == 0 ? gather16_ : gather2_, blocks, 1, 1, kGatherThreads, 1,
                             1, 0, stream, arguments, nullptr),
             "cuLaunchKernel");
}

void Copier::gather_by_engine(Stream stream, const GatherArguments& a) {
  for (uint32_t p = 0; p < a.planes; ++p) {
    Memcpy2D copy{};
    copy.src_type = copy.dst_type = kMemoryDevice;
    copy.src_device = a.plane[p].address;
    copy.src_pitch = a.plane[p].stride_bytes;
    copy.dst_device = a.target + p * a.target_plane;
    copy.dst_pitch = a.target_row;
    copy.width = a.row_bytes;
    copy.height = a.rows;
    if (a.rows == 1) copy.src_pitch = copy.dst_pitch = a.row_bytes;
    check_call(driver().memcpy_2d(&copy, stream), "cuMemcpy2DAsync");
  }
}

void Copier::gather(const DevicePlanes& source, uint64_t row, uint64_t rows, DevicePtr target,
                    uint64_t target_plane, uint64_t target_row) {
  GatherArguments a;
  a.target_plane = target_plane;
  a.target_row = target_row;
  a.row_bytes = source.row_bytes;
  a.rows = static_cast<uint32_t>(rows);
  for (size_t p0 = 0; p0 < source.planes.size(); p0 += kGatherPlanes) {
    a.target = target + p0 * target_plane;
    a.planes = static_cast<uint32_t>(
        std::min<size_t>(source.planes.size() - p0, static_cast<size_t>(kGatherPlanes)));
    for (uint32_t p = 0; p < a.planes; ++p) {
      const GatherPlane& plane = source.planes[p0 + p];
      a.plane[p] = {plane.address + row * plane.stride_bytes, plane.stride_bytes};
    }
    if (has_kernel()) {
      launch(source.stream, a);
    } else {
      gather_by_engine(source.stream, a);
    }
  }
}

static void check_rows(const DevicePlanes& source, uint64_t row, uint64_t rows) {
  check(rows > 0 && rows <= source.rows && row <= source.rows - rows, Fault::kConfig, rows,
        " rows from row ", row, " on: the planes have ", source.rows);
}

std::optional<StageClaim> Copier::take(const DevicePlanes& source, uint64_t row, uint64_t rows) {
  check_open();
  check_rows(source, row, rows);
  ContextScope scope(device_->context());
  std::optional<StageClaim> claim = this->claim(source.stream, source.bytes(rows));
  if (!claim) return claim;
  gather(source, row, rows, claim->address, rows * source.row_bytes, source.row_bytes);
  seal(source.stream, *claim);
  return claim;
}

std::optional<StageSteps> Copier::begin_steps(const DevicePlanes& like, uint64_t rows,
                                              uint64_t limit) {
  check_open();
  ContextScope scope(device_->context());
  const std::optional<StageClaim> claim = this->claim(like.stream, like.bytes(rows * limit));
  if (!claim) return std::nullopt;
  return StageSteps{*claim, rows, limit};
}

void Copier::add_step(StageSteps& steps, const DevicePlanes& source) {
  check_open();
  const uint64_t row_bytes = source.row_bytes, plane = steps.rows * steps.limit * row_bytes;
  check(steps.claim.number == 0 && steps.count < steps.limit &&
            source.planes.size() * plane <= steps.claim.end - steps.claim.begin,
        Fault::kLease, "step ", steps.count + 1, " of at most ", steps.limit,
        steps.claim.number ? ", and they are sealed" : "");
  check_rows(source, 0, steps.rows);
  ContextScope scope(device_->context());
  gather(source, 0, steps.rows, steps.claim.address + steps.count * row_bytes, plane,
         steps.limit * row_bytes);
  ++steps.count;
}

void Copier::seal_steps(StageSteps& steps, Stream stream) {
  check_open();
  ContextScope scope(device_->context());
  seal(stream, steps.claim);
}

Copier::Claim& Copier::unsent(const StageClaim& claim) {
  for (Claim& mine : claims_) {
    if (mine.begin == claim.begin && !mine.done) return mine;
  }
  throw Error(Fault::kLease, "this claim was sent or dropped before");
}

void Copier::seal(Stream stream, StageClaim& claim) {
  Claim& mine = unsent(claim);
  check(mine.sealed == nullptr, Fault::kLease, "this claim was sealed before");
  const Event sealed = take_event();
  check_call(driver().event_record(sealed, stream), "cuEventRecord");
  mine.sealed = sealed;
  claim.number = mine.number = ++sealed_;
}

void Copier::send(const StageClaim& claim, const Slot& slot, const std::vector<Piece>& pieces,
                  uint64_t from_pitch, uint64_t to_pitch, uint64_t height) {
  check_open();
  check(pinned_ != nullptr, Fault::kLease, "the ring is not pinned: call pin() first");
  Claim& mine = unsent(claim);
  const uint64_t size = claim.end - claim.begin;
  uint64_t sum = 0;
  for (const Piece& piece : pieces) {
    const uint64_t rest = height - 1;
    check(height > 0 && piece.width > 0 && piece.width <= from_pitch && piece.width <= to_pitch &&
              piece.from + rest * from_pitch + piece.width <= size &&
              piece.to + rest * to_pitch + piece.width <= slot.payload_bytes,
          Fault::kConfig, "a piece of ", height, " times ", piece.width, " bytes, from ",
          piece.from, " in steps of ", from_pitch, " to ", piece.to, " in steps of ", to_pitch,
          ", exceeds the claim of ", size, " bytes or the payload of ", slot.payload_bytes);
    sum += piece.width * height;
  }
  check(sum == slot.payload_bytes, Fault::kConfig, sum, " bytes are sent into a payload of ",
        slot.payload_bytes);
  const Driver& d = driver();
  const Mapping& map = *pinned_->map();
  uint8_t* const payload = map.at(slot.position) + slot.payload_offset;
  ContextScope scope(device_->context());

  check_call(d.stream_wait(stream_, mine.sealed, 0), "cuStreamWaitEvent");
  for (const Piece& piece : pieces) {
    if (height == 1) {
      for (uint64_t at = 0; at < piece.width; at += kCopyBytes) {
        check_call(d.memcpy_d2h(payload + piece.to + at, claim.address + piece.from + at,
                                std::min(kCopyBytes, piece.width - at), stream_),
                   "cuMemcpyDtoHAsync");
      }
      continue;
    }
    Memcpy2D copy{};
    copy.src_type = kMemoryDevice;
    copy.src_device = claim.address + piece.from;
    copy.src_pitch = from_pitch;
    copy.dst_type = kMemoryHost;
    copy.dst_host = payload + piece.to;
    copy.dst_pitch = to_pitch;
    copy.width = piece.width;
    copy.height = height;
    check_call(d.memcpy_2d(&copy, stream_), "cuMemcpy2DAsync");
  }
  // READY (release half): the default flags order this write behind the copy, for all observers.
  check_call(
      d.write_value(stream_, pinned_->device_ptr(&map.record(slot.position)->ready), kCommitted, 0),
      "cuStreamWriteValue32");
  finish(mine);
}

void Copier::drop(const StageClaim& claim) {
  check_open();
  Claim& mine = unsent(claim);
  ContextScope scope(device_->context());
  check_call(driver().stream_wait(stream_, mine.sealed, 0), "cuStreamWaitEvent");
  finish(mine);
}

void Copier::finish(Claim& claim) {
  const Event done = take_event();
  check_call(driver().event_record(done, stream_), "cuEventRecord");
  claim.done = done;
}

Event Copier::take_event() {
  Event event = nullptr;
  if (events_.empty()) {
    check_call(driver().event_create(&event, kEventDisableTiming), "cuEventCreate");
  } else {
    event = events_.back();
    events_.pop_back();
  }
  return event;
}

// Forgets claims that are sent and copied.
void Copier::reap() {
  if (claims_.empty() || !claims_.front().done) return;
  ContextScope scope(device_->context());
  while (!claims_.empty() && claims_.front().done) {
    const Claim& first = claims_.front();
    const Result result = driver().event_query(first.done);
    if (result == kNotReady) return;
    check_call(result, "cuEventQuery");
    gathered_ = std::max(gathered_, first.number);
    events_.push_back(first.done);
    events_.push_back(first.sealed);
    claims_.pop_front();
  }
}

uint64_t Copier::gathered() {
  check_open();
  reap();
  if (claims_.empty()) return gathered_;
  ContextScope scope(device_->context());
  for (const Claim& claim : claims_) {
    if (!claim.sealed) break;
    const Result result = driver().event_query(claim.sealed);
    if (result == kNotReady) break;
    check_call(result, "cuEventQuery");
    gathered_ = claim.number;
  }
  return gathered_;
}

bool Copier::drain(std::chrono::steady_clock::time_point deadline) {
  check_open();
  for (;;) {
    reap();
    if (claims_.empty() || !claims_.front().done) return true;  // those unsent come last
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void Copier::close() {
  if (!device_) return;
  const std::shared_ptr<Device> device = std::move(device_);
  if (pid_ != ::getpid()) {  // a forked child owns none of it
    new std::shared_ptr<Device>(device);
    pinned_.release();
    return;
  }
  try {
    ContextScope scope(device->context());
    const Driver& d = driver();
    while (!claims_.empty() && claims_.front().done && d.event_query(claims_.front().done) == 0) {
      claims_.pop_front();
    }
    if (!claims_.empty()) {
      // What a copy still reads and writes outlives us: the stage, the ring's memory, its pins.
      new std::shared_ptr<Device>(device);
      pinned_.release();
      return;
    }
    pinned_.reset();
    for (const Event event : events_) d.event_destroy(event);
    if (stream_) d.stream_destroy(stream_);
    if (module_) d.module_unload(module_);
    if (stage_) d.mem_free(stage_);
  } catch (const Error&) {
    // The context is lost, and all of this with it.
  }
  pinned_.reset();
}

}  // namespace hst
