// hstransport._core: errors and the codec. bindings_ring.cpp has the ring,
// bindings_copier.cpp the way out of a GPU.
#include "bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "check.h"
#include "codec.h"
#include "pack.h"
#include "plane_reads.h"
#include "unpack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hst {

static const char* class_of(Fault fault) {
  switch (fault) {
    case Fault::kConfig:
      return "ConfigError";
    case Fault::kLayout:
      return "RingLayoutError";
    case Fault::kCorrupt:
      return "RingCorruptError";
    case Fault::kBusy:
      return "RingBusyError";
    case Fault::kLease:
      return "LeaseError";
    case Fault::kCuda:
      return "CudaError";
    case Fault::kRing:
      break;
  }
  return "RingError";
}

static void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& e) {
    const nb::object type = nb::module_::import_("hstransport.errors").attr(class_of(e.fault));
    PyErr_SetString(type.ptr(), e.what());
  } catch (const OsError& e) {
    // OSError(errno, text, path) makes the subclass that belongs to errno.
    const nb::object args = nb::make_tuple(e.code, e.what(), e.path.c_str());
    PyErr_SetObject(PyExc_OSError, args.ptr());
  }
}

// Arguments of these types take noconvert(): nanobind would otherwise convert an array of another
// type or layout into a copy, and what is written into the copy is lost.
using Bytes = nb::ndarray<uint8_t, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;

using ConstPlanes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Places = nb::ndarray<const uint64_t, nb::shape<-1, 8>, nb::c_contig, nb::device::cpu>;
using Pieces = nb::ndarray<const uint64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;

// The gate for addresses: what the kernels assume is checked here.
static void check_words(uintptr_t address, uint64_t rows, uint64_t hidden, uint64_t stride_bytes) {
  check(rows < uint64_t{1} << 32 && hidden < uint64_t{1} << 30, Fault::kConfig, "rows=", rows,
        ", hidden=", hidden, ": must be less than 2**32 and 2**30");
  check(address % 2 == 0 && stride_bytes % 2 == 0, Fault::kConfig, "address=", address,
        ", stride_bytes=", stride_bytes, ": bf16 words lie at even addresses");
  check(rows <= 1 || stride_bytes >= 2 * hidden, Fault::kConfig, "stride_bytes=", stride_bytes,
        ": rows of ", 2 * hidden, " bytes would overlap");
  check(address != 0 || rows * hidden == 0, Fault::kConfig, "the address is null");
}

static void check_size(const char* name, uint64_t got, uint64_t want) {
  check(got == want, Fault::kConfig, name, " has ", got, " bytes, must have ", want);
}

void bind_codec(nb::module_& m) {
  m.def(
      "split_planes",
      [](uintptr_t src_addr, uint64_t rows, uint64_t hidden, uint64_t src_stride_bytes,
         const ConstBytes& bias, const Bytes& exponents, const Bytes& mantissas) {
        check_words(src_addr, rows, hidden, src_stride_bytes);
        check_size("bias", bias.size(), hidden);
        check_size("exponents", exponents.size(), rows * hidden);
        check_size("mantissas", mantissas.size(), rows * hidden);
        nb::gil_scoped_release unlocked;
        split_planes(reinterpret_cast<const uint8_t*>(src_addr), rows, hidden, src_stride_bytes,
                     bias.data(), exponents.data(), mantissas.data());
      },
      "src_addr"_a, "rows"_a, "hidden"_a, "src_stride_bytes"_a, "bias"_a.noconvert(),
      "exponents"_a.noconvert(), "mantissas"_a.noconvert(),
      "Split rows of bf16 words into exponent bytes (less the column's bias) and sign+mantissa "
      "bytes.");
  m.def(
      "join_planes",
      [](const ConstBytes& exponents, const ConstBytes& mantissas, const ConstBytes& bias,
         uintptr_t dst_addr, uint64_t rows, uint64_t hidden, uint64_t dst_stride_bytes) {
        check_words(dst_addr, rows, hidden, dst_stride_bytes);
        check_size("bias", bias.size(), hidden);
        check_size("exponents", exponents.size(), rows * hidden);
        check_size("mantissas", mantissas.size(), rows * hidden);
        nb::gil_scoped_release unlocked;
        join_planes(exponents.data(), mantissas.data(), bias.data(),
                    reinterpret_cast<uint8_t*>(dst_addr), rows, hidden, dst_stride_bytes);
      },
      "exponents"_a.noconvert(), "mantissas"_a.noconvert(), "bias"_a.noconvert(), "dst_addr"_a,
      "rows"_a, "hidden"_a, "dst_stride_bytes"_a, "The exact inverse of split_planes.");
  m.def(
      "unpack_plane",
      [](const ConstBytes& exponents, const ConstBytes& mantissas, const ConstBytes& bias,
         uintptr_t dst_addr, uint64_t rows, uint64_t hidden, uint64_t dst_stride_bytes) {
        check_words(dst_addr, rows, hidden, dst_stride_bytes);
        check_size("bias", bias.size(), hidden);
        check(hidden >= 1, Fault::kConfig, "hidden=0: there is nothing to unpack");
        nb::gil_scoped_release unlocked;
        return unpack_plane({exponents.data(), exponents.size()},
                            {mantissas.data(), mantissas.size()}, bias.data(),
                            reinterpret_cast<uint8_t*>(dst_addr), rows, hidden, dst_stride_bytes);
      },
      "exponents"_a.noconvert(), "mantissas"_a.noconvert(), "bias"_a.noconvert(), "dst_addr"_a,
      "rows"_a, "hidden"_a, "dst_stride_bytes"_a,
      "Join what the two zstd frames of a plane hold. False if they are not as pack_chunk writes "
      "them, checksums included: then zstd is to judge.");
  m.def(
      "unpack_frame",
      [](const ConstBytes& frame, const Bytes& out) {
        nb::gil_scoped_release unlocked;
        return unpack_frame({frame.data(), frame.size()}, out.data(), out.size());
      },
      "frame"_a.noconvert(), "out"_a.noconvert(),
      "Unpack one zstd frame of as many bytes as `out` has. False as of unpack_plane.");
  nb::class_<PlaneReads>(m, "PlaneReads", "Planes out of files, by as many threads as come.")
      .def(
          "__init__",
          [](PlaneReads* self, const Places& places, uint64_t hidden, bool stream, nb::object) {
            check(hidden >= 1, Fault::kConfig, "hidden=0: there is nothing to read");
            std::vector<PlaneRead> reads(places.shape(0));
            for (size_t i = 0; i < reads.size(); ++i) {
              const uint64_t* p = places.data() + 8 * i;
              check_words(p[5], p[6], hidden, p[7]);
              check(p[4] != 0, Fault::kConfig, "the address of the bias is null");
              check(p[2] < uint64_t{1} << 32 && p[3] < uint64_t{1} << 32, Fault::kConfig,
                    "frames of ", p[2], " and ", p[3], " bytes: must be less than 2**32");
              reads[i] = {static_cast<int>(p[0]),
                          p[1],
                          p[2],
                          p[3],
                          reinterpret_cast<const uint8_t*>(p[4]),
                          reinterpret_cast<uint8_t*>(p[5]),
                          p[6],
                          p[7]};
            }
            new (self) PlaneReads(std::move(reads), hidden, stream);
          },
          "places"_a.noconvert(), "hidden"_a, "stream"_a, "owners"_a, nb::keep_alive<1, 5>())
      .def("work", &PlaneReads::work, "most"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__",
           [](PlaneReads& self, nb::args) {
             nb::gil_scoped_release unlocked;
             self.close();
           })
      .def("left", &PlaneReads::left);
  m.def(
      "odd_rows",
      [](uintptr_t src_addr, uint64_t rows, uint64_t hidden, uint64_t src_stride_bytes,
         const Bytes& odd) {
        check_words(src_addr, rows, hidden, src_stride_bytes);
        check_size("odd", odd.size(), rows);
        nb::gil_scoped_release unlocked;
        odd_rows(reinterpret_cast<const uint8_t*>(src_addr), rows, hidden, src_stride_bytes,
                 odd.data());
      },
      "src_addr"_a, "rows"_a, "hidden"_a, "src_stride_bytes"_a, "odd"_a.noconvert(),
      "Adds what is odd about each row of bf16 words.");
  m.def("packed_bound", &packed_bound, "planes"_a, "size"_a,
        "Bytes of memory that so many planes of `size` words need to be packed.");
  m.def(
      "pack_chunk",
      [](const Pieces& pieces, const ConstPlanes& bias, const Bytes& out) {
        const uint64_t planes = bias.shape(0), hidden = bias.shape(1);
        check(hidden >= 1, Fault::kConfig, "hidden=0: there is nothing to pack");
        std::vector<Piece> parts(pieces.shape(0));
        uint64_t rows = 0;
        for (size_t i = 0; i < parts.size(); ++i) {
          const uint64_t* p = pieces.data() + 4 * i;
          parts[i] = {reinterpret_cast<const uint8_t*>(p[0]), p[1], p[2], p[3]};
          check_words(p[0], p[3], hidden, p[2]);
          check(p[1] % 2 == 0, Fault::kConfig, "plane_bytes=", p[1], ": must be even");
          rows += p[3];
        }
        check(rows < uint64_t{1} << 32, Fault::kConfig, "rows=", rows, ": must be less than 2**32");
        check_size("out", out.size(), packed_bound(planes, rows * hidden));
        std::vector<uint64_t> sizes(2 * planes);
        {
          nb::gil_scoped_release unlocked;
          uint8_t* at = out.data();
          for (uint64_t k = 0; k < planes; ++k) {
            std::tie(sizes[2 * k], sizes[2 * k + 1]) =
                pack_plane(parts, k, hidden, bias.data() + k * hidden, at);
            at += sizes[2 * k] + sizes[2 * k + 1];
          }
        }
        return sizes;
      },
      "pieces"_a.noconvert(), "bias"_a.noconvert(), "out"_a.noconvert(),
      "Pack the planes of a chunk into zstd frames, one behind another.");
  m.def(
      "median_exponents",
      [](uintptr_t src_addr, uint64_t rows, uint64_t hidden, uint64_t src_stride_bytes) {
        check_words(src_addr, rows, hidden, src_stride_bytes);
        check(rows >= 1, Fault::kConfig, "rows=0: no rows have no median");
        auto* medians = new uint8_t[hidden + 1];  // (+1: numpy wants an address for no bytes too)
        nb::capsule owner(medians, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
        {
          nb::gil_scoped_release unlocked;
          median_exponents(reinterpret_cast<const uint8_t*>(src_addr), rows, hidden,
                           src_stride_bytes, medians);
        }
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(medians, {hidden}, owner);
      },
      "src_addr"_a, "rows"_a, "hidden"_a, "src_stride_bytes"_a,
      "The lower median of each column's exponents: uint8[hidden].");
}

}  // namespace hst

NB_MODULE(_core, m) {
  m.doc() =
      "Native part of hstransport: shared-memory ring, copies out of a GPU, byte-plane codec.";
  nb::register_exception_translator(hst::translate);
  hst::bind_ring(m);
  hst::bind_codec(m);
  hst::bind_gate(m);
  hst::bind_copier(m);
}
