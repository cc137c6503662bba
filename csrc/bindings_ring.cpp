// hstransport._core: the ring. This file only translates; hstransport/ring.py documents.
#include "bindings_ring.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <atomic>
#include <chrono>
#include <cstring>

#include "bindings.h"
#include "check.h"
#include "ring_reader.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hst {

using View = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;
using ConstView = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;

// How long a wait lasts before Python's signal handlers (Ctrl-C) get a turn.
static constexpr std::chrono::milliseconds kSignalSlice{50};

// A view names the mapping as its owner: it stays readable whatever is closed meanwhile.
static nb::capsule owner_of(const std::shared_ptr<Mapping>& map) {
  return nb::capsule(new std::shared_ptr<Mapping>(map),
                     [](void* p) noexcept { delete static_cast<std::shared_ptr<Mapping>*>(p); });
}

static nb::bytes as_bytes(const std::string& s) { return nb::bytes(s.data(), s.size()); }

static nb::bytes meta_of(const Mapping& map, const CheckedRecord& record) {
  return nb::bytes(map.at(record.position) + sizeof(RecordHeader), record.header.meta_bytes);
}

static nb::tuple as_tuple(const Counters& counters) {
  nb::list words;
  for (const uint64_t word : counters) words.append(word);
  return nb::tuple(words);
}

static std::unique_ptr<Reservation> reserve(const std::shared_ptr<RingWriter>& writer,
                                            uint32_t kind, const nb::bytes& meta,
                                            uint64_t payload_bytes, double wait_s,
                                            uint64_t leave_bytes) {
  const std::string_view text(meta.c_str(), meta.size());
  // The usual case keeps the GIL: there is room.
  std::optional<Slot> slot = writer->reserve(kind, text, payload_bytes, leave_bytes);
  if (!slot && wait_s > 0) {
    using Clock = RingWriter::Clock;
    const std::chrono::duration<double> wait(std::min(wait_s, 1e9));
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(wait);
    for (;;) {
      const Clock::time_point now = Clock::now();
      if (now >= deadline) break;
      {
        nb::gil_scoped_release unlocked;
        slot = writer->reserve_until(std::min(deadline, now + kSignalSlice), kind, text,
                                     payload_bytes, leave_bytes);
      }
      if (slot) break;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
  }
  return slot ? std::make_unique<Reservation>(writer, *slot) : nullptr;
}

struct Record {
  const std::shared_ptr<RingReader> reader;
  const Lease lease;
  const nb::bytes meta;  // a copy: it stays when the record is given back
  std::atomic<bool> given_back{false};

  Record(std::shared_ptr<RingReader> reader, const Lease& lease)
      : reader(std::move(reader)),
        lease(lease),
        meta(meta_of(*this->reader->map(), lease.record)) {}

  const RecordHeader& header() const { return lease.record.header; }
  bool abandoned() const { return header().ready == kAbandoned; }
  void check_held() const {
    check(!given_back, Fault::kLease, "record ", header().seq, " was released before");
  }
  ConstView payload() const {
    check_held();
    check(reader->is_open(), Fault::kLease, "record ", header().seq, ": the reader is closed");
    const uint8_t* data = reader->map()->at(lease.record.position) + header().payload_offset;
    // The bytes of an abandoned record are whatever lay there before.
    return ConstView(data, {abandoned() ? 0 : header().payload_bytes}, owner_of(reader->map()));
  }
  void release() {
    check(!given_back.exchange(true), Fault::kLease, "record ", header().seq,
          " was released before");
    reader->release(lease.ticket, header().seq);
  }
};

static nb::object skip_pending(RingReader& reader) {
  const std::optional<CheckedRecord> record = reader.skip_pending();
  if (!record) return nb::none();
  const RecordHeader& h = record->header;
  // Freed by now, but a dead producer writes nothing over it.
  return nb::make_tuple(h.seq, h.kind, meta_of(*reader.map(), *record), record->position,
                        h.record_bytes);
}

static nb::tuple inspect(const std::string& path) {
  const Inspection look = inspect_ring(path);
  return nb::make_tuple(as_bytes(look.info), as_tuple(look.counters), look.capacity_bytes,
                        look.head, look.tail, look.committed, look.pending, look.abandoned,
                        look.closed, look.producer_alive, look.consumer_attached,
                        as_bytes(look.out));
}

static void bind_producer(nb::module_& m) {
  nb::class_<Reservation>(m, "Reservation",
                          "A lease on a pending record; commit() or abandon() it.")
      .def_prop_ro("seq", [](const Reservation& r) { return r.slot.seq; })
      .def_prop_ro("position", [](const Reservation& r) { return r.slot.position; })
      .def_prop_ro("record_bytes", [](const Reservation& r) { return r.slot.record_bytes; })
      .def_prop_ro("payload_bytes", [](const Reservation& r) { return r.slot.payload_bytes; })
      .def_prop_ro(
          "payload",
          [](const Reservation& r) {
            return View(r.payload(), {r.slot.payload_bytes}, owner_of(r.writer->map()));
          },
          nb::rv_policy::automatic)
      .def_prop_ro("address",
                   [](const Reservation& r) { return reinterpret_cast<uintptr_t>(r.payload()); })
      .def_prop_ro("ready_address",
                   [](const Reservation& r) {
                     return reinterpret_cast<uintptr_t>(r.payload()) - r.slot.payload_offset;
                   })
      .def("copy_rows", &Reservation::copy_rows, "offset"_a, "address"_a, "rows"_a, "row_bytes"_a,
           "stride_bytes"_a)
      .def("commit", [](Reservation& r) { r.give_back(kCommitted); })
      .def("abandon", [](Reservation& r) { r.give_back(kAbandoned); });

  nb::class_<RingWriter>(m, "RingWriter")
      .def_static(
          "create",
          [](const std::string& path, uint64_t capacity_bytes, const nb::bytes& info,
             const nb::object& progress) {
            const std::string text(info.c_str(), info.size());
            RingFile::Progress report;
            if (!progress.is_none()) {
              report = [&](uint64_t bytes) {
                nb::gil_scoped_acquire locked;
                progress(bytes);
              };
            }
            nb::gil_scoped_release unlocked;  // to clear a large ring takes seconds
            return std::make_shared<RingWriter>(path, capacity_bytes, text, report);
          },
          "path"_a, "capacity_bytes"_a, "info"_a, "progress"_a.none())
      .def("reserve", &reserve, "kind"_a, "meta"_a, "payload_bytes"_a, "wait_s"_a, "leave_bytes"_a)
      .def(
          "put",
          [](RingWriter& writer, uint32_t kind, const nb::bytes& meta) -> nb::object {
            const auto slot = writer.reserve(kind, {meta.c_str(), meta.size()}, 0, 0);
            if (!slot) return nb::none();
            writer.finish(*slot, kCommitted);
            return nb::make_tuple(slot->seq, slot->position, slot->record_bytes);
          },
          "kind"_a, "meta"_a)
      .def("max_payload_bytes", &RingWriter::max_payload_bytes, "meta_bytes"_a, "leave_bytes"_a)
      .def("count", &RingWriter::count, "counter"_a, "n"_a)
      .def("consumer_attached", &RingWriter::consumer_attached)
      .def("close", &RingWriter::close)
      .def_prop_ro("is_open", &RingWriter::is_open)
      .def_prop_ro("head", &RingWriter::head)
      .def_prop_ro("tail", &RingWriter::tail)
      .def_prop_ro("counters", [](const RingWriter& w) { return as_tuple(w.file().counters()); });
}

static void bind_consumer(nb::module_& m) {
  nb::class_<Record>(m, "Record", "A lease on a record that was read; release() it once.")
      .def_prop_ro("seq", [](const Record& r) { return r.header().seq; })
      .def_prop_ro("kind", [](const Record& r) { return r.header().kind; })
      .def_prop_ro("position", [](const Record& r) { return r.lease.record.position; })
      .def_prop_ro("end_position", [](const Record& r) { return r.lease.record.end(); })
      .def_prop_ro("record_bytes", [](const Record& r) { return r.header().record_bytes; })
      .def_prop_ro("payload_bytes", [](const Record& r) { return r.header().payload_bytes; })
      .def_prop_ro("meta", [](const Record& r) { return r.meta; })
      .def_prop_ro("payload", &Record::payload, nb::rv_policy::automatic)
      .def_prop_ro("abandoned", &Record::abandoned)
      .def_prop_ro("released", [](const Record& r) { return r.given_back.load(); })
      .def("release", &Record::release)
      .def("__enter__", [](nb::object self) { return self; })
      .def(
          "__exit__",
          [](Record& r, nb::handle, nb::handle, nb::handle) {
            if (!r.given_back) r.release();
          },
          "type"_a.none(), "value"_a.none(), "traceback"_a.none());

  nb::class_<RingReader>(m, "RingReader")
      .def_static(
          "attach", [](const std::string& path) { return std::make_shared<RingReader>(path); },
          "path"_a)
      .def("read",
           [](const std::shared_ptr<RingReader>& reader) -> std::unique_ptr<Record> {
             const std::optional<Lease> lease = reader->read();
             return lease ? std::make_unique<Record>(reader, *lease) : nullptr;
           })
      .def("pending", [](RingReader& r) { return r.pending().has_value(); })
      .def("skip_pending", &skip_pending)
      .def("tell_out",
           [](RingReader& r, const nb::bytes& directory) {
             return r.tell_out({directory.c_str(), directory.size()});
           })
      .def("check_whole", [](const RingReader& r) { r.file().check_whole(true); })
      .def("producer_alive", &RingReader::producer_alive)
      .def("unlink_if_orphaned", &RingReader::unlink_if_orphaned)
      .def("close", &RingReader::close)
      .def_prop_ro("is_open", &RingReader::is_open)
      .def_prop_ro("closed", &RingReader::closed)
      .def_prop_ro("head", &RingReader::head)
      .def_prop_ro("tail", &RingReader::tail)
      .def_prop_ro("cursor", &RingReader::cursor)
      .def_prop_ro("capacity_bytes", [](const RingReader& r) { return r.map()->capacity_bytes; })
      .def_prop_ro("info", [](const RingReader& r) { return as_bytes(r.file().info()); })
      .def_prop_ro("counters", [](const RingReader& r) { return as_tuple(r.file().counters()); });
}

void bind_ring(nb::module_& m) {
  bind_producer(m);
  bind_consumer(m);
  m.def("inspect_ring", &inspect, "path"_a);
}

}  // namespace hst
