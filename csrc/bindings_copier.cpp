// hstransport._core: the way out of a GPU. This file only translates; hstransport/copyout.py
// documents. Streams and device addresses cross as integers.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bindings.h"
#include "bindings_ring.h"
#include "copier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hst {

using Run = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>;
// How long a drain lasts before Python's signal handlers (Ctrl-C) get a turn.
static constexpr std::chrono::milliseconds kDrainSlice{50};

static cuda::Stream as_stream(uintptr_t handle) { return reinterpret_cast<cuda::Stream>(handle); }

static DevicePlanes make_planes(const std::vector<std::tuple<uint64_t, uint64_t>>& planes,
                                uint64_t row_bytes) {
  check(!planes.empty() && row_bytes > 0 && row_bytes % 2 == 0, Fault::kConfig, planes.size(),
        " planes of rows of ", row_bytes, " bytes: must be some, of an even number of bytes");
  DevicePlanes result;
  result.row_bytes = row_bytes;
  for (const auto& [address, stride_bytes] : planes) {
    check(address != 0 && address % 2 == 0 && stride_bytes >= row_bytes && stride_bytes % 2 == 0,
          Fault::kConfig, "a plane at ", address, " with rows ", stride_bytes,
          " bytes apart: bf16 rows lie at even addresses and do not overlap");
    result.planes.push_back({address, stride_bytes});
  }
  return result;
}

static bool drain(Copier& copier, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> wait(std::min(timeout_s, 1e9));
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(wait);
  for (;;) {
    const auto now = Clock::now();
    {
      nb::gil_scoped_release unlocked;
      if (copier.drain(std::min(deadline, now + kDrainSlice))) return true;
    }
    if (now >= deadline) return false;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

// What a DLPack capsule says: (address, shape, strides in bytes, item bytes, type code, device
// type, device id). The tensor stays the capsule's.
static nb::tuple describe(const nb::ndarray<>& array) {
  nb::list shape;
  nb::list strides;
  const uint64_t item_bytes = array.itemsize();
  for (size_t i = 0; i < array.ndim(); ++i) {
    shape.append(array.shape(i));
    strides.append(array.stride(i) * static_cast<int64_t>(item_bytes));
  }
  return nb::make_tuple(reinterpret_cast<uintptr_t>(array.data()), nb::tuple(shape),
                        nb::tuple(strides), item_bytes, static_cast<int>(array.dtype().code),
                        static_cast<int>(array.device_type()), static_cast<int>(array.device_id()));
}

void bind_copier(nb::module_& m) {
  m.def("describe_dlpack", &describe, "array"_a);
  m.def("device_of", &cuda::device_of, "address"_a);

  nb::class_<DevicePlanes>(m, "DevicePlanes")
      .def_prop_ro("count", [](const DevicePlanes& p) { return p.planes.size(); })
      .def_prop_ro("row_bytes", [](const DevicePlanes& p) { return p.row_bytes; });
  m.def("device_planes", &make_planes, "planes"_a, "row_bytes"_a);

  nb::class_<StageClaim>(m, "StageClaim")
      .def_prop_ro("address", [](const StageClaim& c) { return c.address; })
      .def_prop_ro("bytes", [](const StageClaim& c) { return c.end - c.begin; });

  nb::class_<Copier>(m, "Copier")
      .def(nb::init<int, uint64_t>(), "device"_a, "stage_bytes"_a)
      .def(
          "pin",
          [](Copier& copier, const std::shared_ptr<RingWriter>& ring) {
            nb::gil_scoped_release unlocked;  // 50 ms for each GiB
            copier.pin(*ring);
          },
          "ring"_a)
      .def(
          "claim",
          [](Copier& copier, uintptr_t stream, uint64_t bytes) {
            const std::optional<StageClaim> claim = copier.claim(as_stream(stream), bytes);
            return claim ? std::make_unique<StageClaim>(*claim) : nullptr;
          },
          "stream"_a, "bytes"_a)
      .def(
          "gather",
          [](Copier& copier, uintptr_t stream, const StageClaim& claim, const DevicePlanes& planes,
             const std::vector<Run>& runs, uint64_t plane_rows) {
            GatherRun few[8];
            std::vector<GatherRun> many(runs.size() <= std::size(few) ? 0 : runs.size());
            GatherRun* const all = many.empty() ? few : many.data();
            for (size_t i = 0; i < runs.size(); ++i) {
              const auto& [source_row, rows, target_row, target_step] = runs[i];
              all[i] = {source_row, rows, target_row, target_step};
            }
            copier.gather(as_stream(stream), claim, planes, all, runs.size(), plane_rows);
          },
          "stream"_a, "claim"_a, "planes"_a, "runs"_a, "plane_rows"_a)
      .def(
          "seal",
          [](Copier& copier, uintptr_t stream, const StageClaim& claim) {
            return copier.seal(as_stream(stream), claim);
          },
          "stream"_a, "claim"_a)
      .def(
          "send",
          [](Copier& copier, const StageClaim& claim, Reservation& record,
             const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& pieces,
             uint64_t from_pitch, uint64_t to_pitch, uint64_t height) {
            record.payload();  // not given back yet
            std::vector<Copier::Piece> all;
            all.reserve(pieces.size());
            for (const auto& [from, to, width] : pieces) all.push_back({from, to, width});
            copier.send(claim, record.slot, all, from_pitch, to_pitch, height);
            record.take();
          },
          "claim"_a, "record"_a, "pieces"_a, "from_pitch"_a, "to_pitch"_a, "height"_a)
      .def("drop", &Copier::drop, "claim"_a)
      .def("gathered", &Copier::gathered)
      .def("drain", &drain, "timeout_s"_a)
      .def("close",
           [](Copier& copier) {
             nb::gil_scoped_release unlocked;
             copier.close();
           })
      .def_prop_ro("is_open", &Copier::is_open)
      .def_prop_ro("stage_bytes", &Copier::stage_bytes)
      .def_prop_ro("has_kernel", &Copier::has_kernel)
      .def_prop_ro("stream",
                   [](const Copier& c) { return reinterpret_cast<uintptr_t>(c.stream()); });
}

}  // namespace hst
