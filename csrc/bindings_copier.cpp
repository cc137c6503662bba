// hstransport._core: the way out of a GPU. This file only translates; hstransport/copyout.py
// documents. Streams and device addresses cross as integers.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bindings.h"
#include "bindings_gate.h"
#include "bindings_ring.h"
#include "copier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hst {

// How long a drain lasts before Python's signal handlers (Ctrl-C) get a turn.
static constexpr std::chrono::milliseconds kDrainSlice{50};

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

// Decode steps as Python holds them, with what they are gathered by.
struct Steps {
  nb::object copier;
  nb::object source;  // of the last step
  StageSteps steps;

  uint64_t add(nb::object planes) {
    source = std::move(planes);
    return again();
  }
  // One more step out of the same memory.
  uint64_t again() {
    nb::cast<Copier&>(copier).add_step(steps, nb::cast<Planes&>(source));
    return steps.count;
  }
  const StageClaim& seal(uintptr_t stream) {
    nb::cast<Copier&>(copier).seal_steps(steps, as_stream(stream));
    source = nb::none();  // whoever gave it holds it until all is gathered
    return steps.claim;
  }
};

void bind_copier(nb::module_& m) {
  nb::class_<StageClaim>(m, "StageClaim")
      .def_prop_ro("address", [](const StageClaim& c) { return c.address; })
      .def_ro("number", &StageClaim::number)
      .def_prop_ro("bytes", [](const StageClaim& c) { return c.end - c.begin; });

  nb::class_<Steps>(m, "Steps")
      .def("add", &Steps::add, "planes"_a)
      .def("again", &Steps::again)
      .def_prop_ro("count", [](const Steps& s) { return s.steps.count; })
      .def("seal", &Steps::seal, "stream"_a, nb::rv_policy::copy);

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
          "take",
          [](Copier& copier, const Planes& planes, uint64_t row, uint64_t rows) {
            const std::optional<StageClaim> claim = copier.take(planes, row, rows);
            return claim ? std::make_unique<StageClaim>(*claim) : nullptr;
          },
          "planes"_a, "row"_a, "rows"_a)
      .def(
          "begin_steps",
          [](nb::handle self, const Planes& like, uint64_t rows, uint64_t limit) {
            const std::optional<StageSteps> steps =
                nb::cast<Copier&>(self).begin_steps(like, rows, limit);
            return steps ? std::make_unique<Steps>(Steps{nb::borrow(self), nb::none(), *steps})
                         : nullptr;
          },
          "like"_a, "rows"_a, "limit"_a)
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
