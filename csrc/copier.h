// From a GPU into a ring: gather on the caller's stream, copy and commit on a stream of our own.
//
//   caller's stream   … model … ─ gather into the stage ─ next forward pass …
//   copy stream                          └─ copy engine: stage → ring ─ ready = committed
//
// The gather is ordered behind the states' kernels and before whatever overwrites them (the next
// replay of a CUDA graph), so the states' own memory is free again as soon as it has run. The
// stage is device memory used like a ring. Where it is full of copies under way, the *caller's
// stream* waits for them, on the GPU; where it is full of claims that nobody has sent yet, there is
// no room. No call here waits on the CPU, except drain().
//
// One thread takes; another may send and drop, in the order of what was taken. The calls themselves
// must not overlap: Python's lock sees to that.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "cuda_driver.h"
#include "gather.h"
#include "ring_writer.h"

namespace hst {

// A ring's memory, registered with the driver for as long as this lives.
class Pinned {
 public:
  Pinned(std::shared_ptr<cuda::Device> device, std::shared_ptr<Mapping> map);
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  const std::shared_ptr<Mapping>& map() const { return map_; }
  cuda::DevicePtr device_ptr(const void* host) const;

 private:
  const std::shared_ptr<cuda::Device> device_;
  const std::shared_ptr<Mapping> map_;
  cuda::DevicePtr base_ = 0;
};

// A place of the stage, for one record.
struct StageClaim {
  uint64_t begin = 0;  // positions only grow, as the ring's do
  uint64_t end = 0;
  cuda::DevicePtr address = 0;
  uint64_t number = 0;  // from 1 once it is sealed: once that is gathered(), the sources are free
};

// Planes of equal width on the device, and the stream on which they are computed.
struct DevicePlanes {
  std::vector<GatherPlane> planes;
  uint64_t rows = 0;
  uint64_t row_bytes = 0;
  cuda::Stream stream = nullptr;

  uint64_t bytes(uint64_t rows) const { return planes.size() * rows * row_bytes; }
};

// Decode steps that are gathered one by one: [planes, rows, limit, row].
struct StageSteps {
  StageClaim claim;
  uint64_t rows = 0;
  uint64_t limit = 0;
  uint64_t count = 0;
};

class Copier {
 public:
  Copier(int device, uint64_t stage_bytes);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Registers the ring with the driver: a GPU can only write into pinned memory.
  void pin(const RingWriter& ring);

  // Gathers rows: [planes, rows, row]. The planes' stream waits, on the GPU, until the copies that
  // still read that part of the stage have ended. Nothing if older claims, unsent, take all the
  // room.
  std::optional<StageClaim> take(const DevicePlanes& source, uint64_t row, uint64_t rows);
  // Claims room in the same way for steps that come one by one, all on the planes' stream.
  std::optional<StageSteps> begin_steps(const DevicePlanes& like, uint64_t rows, uint64_t limit);
  void add_step(StageSteps& steps, const DevicePlanes& source);
  // No more steps will come.
  void seal_steps(StageSteps& steps, cuda::Stream stream);

  // Copies pieces of the claim into the record and commits it, both behind what the stream had been
  // given when the claim was sealed. Each piece is `height` times `width` bytes, `from_pitch` apart
  // in the claim and `to_pitch` in the record; together they are the whole payload.
  struct Piece {
    uint64_t from;
    uint64_t to;
    uint64_t width;
  };
  void send(const StageClaim& claim, const Slot& slot, const std::vector<Piece>& pieces,
            uint64_t from_pitch, uint64_t to_pitch, uint64_t height);
  // Gives a claim back unsent.
  void drop(const StageClaim& claim);

  // The highest sealed claim of which all has been gathered, and of all before it.
  uint64_t gathered();
  // Waits for all copies, at most until `deadline`; false when some have not ended by then.
  bool drain(std::chrono::steady_clock::time_point deadline);
  // Gives everything back. Call drain() before: what a copy still under way uses is never freed.
  void close();
  bool is_open() const { return device_ != nullptr; }

  uint64_t stage_bytes() const { return stage_bytes_; }
  cuda::Stream stream() const { return stream_; }
  bool has_kernel() const { return gather16_ != nullptr; }

 private:
  struct Claim {
    uint64_t begin;       // of its part of the stage
    uint64_t number = 0;  // when it is sealed
    cuda::Event sealed = nullptr;
    cuda::Event done = nullptr;  // once sent or dropped
  };

  void check_open() const;
  void load_kernel();
  std::optional<StageClaim> claim(cuda::Stream stream, uint64_t bytes);
  // Rows from `row` on, to `target`, where planes and rows are so many bytes apart.
  void gather(const DevicePlanes& source, uint64_t row, uint64_t rows, cuda::DevicePtr target,
              uint64_t target_plane, uint64_t target_row);
  void gather_by_engine(cuda::Stream stream, const GatherArguments& a);
  void launch(cuda::Stream stream, GatherArguments& a);
  void seal(cuda::Stream stream, StageClaim& claim);
  cuda::Event take_event();
  Claim& unsent(const StageClaim& claim);
  void finish(Claim& claim);
  void reap();

  std::shared_ptr<cuda::Device> device_;
  const uint64_t stage_bytes_;
  cuda::DevicePtr stage_ = 0;
  cuda::Stream stream_ = nullptr;
  cuda::Module module_ = nullptr;
  cuda::Function gather16_ = nullptr;
  cuda::Function gather2_ = nullptr;
  unsigned blocks_ = 0;
  std::unique_ptr<Pinned> pinned_;
  uint64_t head_ = 0;
  uint64_t sealed_ = 0;
  uint64_t gathered_ = 0;
  std::deque<Claim> claims_;
  std::vector<cuda::Event> events_;  // spare ones
  const int pid_;
};

}  // namespace hst
