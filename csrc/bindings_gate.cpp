// hstransport._core: the gate between array libraries and the ring. hstransport/capture.py
// documents.
#include "bindings_gate.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "check.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hst {

// DLPack's exchange interface (DLPack 1.3): a table of C functions that a type of arrays offers, so
// that looking into an array takes no detour through Python objects.
struct ExchangeApi {
  uint32_t major;
  uint32_t minor;
  void* older;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*look)(void* object, nb::dlpack::dltensor* out);  // borrows; may be null
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

static constexpr uint32_t kDlpackMajor = 1;
static constexpr uint8_t kDlpackBfloat = 4;
static constexpr int32_t kDlpackCpu = 1, kDlpackCuda = 2;

// Null when the type offers none.
static const ExchangeApi* exchange_api(nb::handle type) {
  // One library's arrays come again and again; its type is kept for ever.
  static PyObject* known = nullptr;
  static const ExchangeApi* known_api = nullptr;
  if (type.ptr() == known) return known_api;
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* api =
      static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api->major != kDlpackMajor || !api->look) return nullptr;
  if (!known) {
    known = type.inc_ref().ptr();
    known_api = api;
  }
  return api;
}

static void check_plane(uint64_t address, uint64_t stride_bytes, uint64_t rows,
                        uint64_t row_bytes) {
  check((rows == 0 || address != 0) && address % 2 == 0 && stride_bytes % 2 == 0 &&
            stride_bytes >= row_bytes,
        Fault::kConfig, "a plane at ", address, " with rows ", stride_bytes,
        " bytes apart: bf16 rows lie at even addresses and do not overlap");
}

static std::unique_ptr<Planes> make_planes(
    const std::vector<std::tuple<uint64_t, uint64_t>>& planes, uint64_t rows, uint64_t row_bytes,
    std::optional<int> device, uintptr_t stream, nb::object owners) {
  check(!planes.empty() && row_bytes > 0 && row_bytes % 2 == 0, Fault::kConfig, planes.size(),
        " planes of rows of ", row_bytes, " bytes: must be some, of an even number of bytes");
  auto result = std::make_unique<Planes>();
  for (const auto& [address, stride_bytes] : planes) {
    check_plane(address, stride_bytes, rows, row_bytes);
    result->planes.push_back({address, stride_bytes});
  }
  result->rows = rows;
  result->row_bytes = row_bytes;
  result->stream = as_stream(stream);
  result->device = device.value_or(kHostMemory);
  result->owners = std::move(owners);
  return result;
}

// Planes of arrays that all have the exchange interface and are [rows, hidden] bf16 with contiguous
// rows on one device: what a model hands over in every pass. Nothing for all others: the way
// through Python takes them, or says what is wrong.
static std::unique_ptr<Planes> look_into(nb::list arrays, uint64_t hidden) {
  if (arrays.size() == 0) return nullptr;
  const nb::handle type = nb::handle(arrays[0]).type();
  const ExchangeApi* const api = exchange_api(type);
  if (!api) return nullptr;
  auto result = std::make_unique<Planes>();
  nb::dlpack::device device{};
  result->row_bytes = hidden * 2;
  result->planes.reserve(arrays.size());
  for (const nb::handle array : arrays) {
    nb::dlpack::dltensor t{};
    if (!array.type().is(type)) return nullptr;
    if (api->look(array.ptr(), &t) != 0) {
      PyErr_Clear();
      return nullptr;
    }
    const bool first = result->planes.empty();
    const bool plain = t.dtype.code == kDlpackBfloat && t.dtype.bits == 16 && t.dtype.lanes == 1 &&
                       t.ndim == 2 && t.shape[1] == static_cast<int64_t>(hidden);
    if (!plain) return nullptr;
    if (first) device = t.device;
    const bool same =
        t.device.device_type == device.device_type && t.device.device_id == device.device_id;
    // Without strides an array is compact; one row has no stride that is ever taken.
    const bool compact = !t.strides || t.shape[0] <= 1;
    const int64_t stride = compact ? static_cast<int64_t>(hidden) : t.strides[0];
    const bool rows_fit =
        stride >= static_cast<int64_t>(hidden) && (!t.strides || hidden == 1 || t.strides[1] == 1);
    if (!same || !rows_fit) return nullptr;
    const uint64_t address = reinterpret_cast<uint64_t>(t.data) + t.byte_offset;
    const auto rows = static_cast<uint64_t>(t.shape[0]);
    const uint64_t stride_bytes = static_cast<uint64_t>(stride) * 2;
    check_plane(address, stride_bytes, rows, result->row_bytes);
    result->planes.push_back({address, stride_bytes});
    result->rows = first ? rows : std::min(result->rows, rows);
  }
  if (device.device_type == kDlpackCuda) {
    void* stream = nullptr;
    if (!api->current_stream ||
        api->current_stream(device.device_type, device.device_id, &stream) != 0) {
      PyErr_Clear();
      return nullptr;
    }
    result->device = device.device_id;
    result->stream = static_cast<cuda::Stream>(stream);
  } else if (device.device_type != kDlpackCpu) {
    return nullptr;
  }
  result->owners = std::move(arrays);
  return result;
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

void bind_gate(nb::module_& m) {
  m.def("describe_dlpack", &describe, "array"_a);
  m.def("device_of", &cuda::device_of, "address"_a);
  m.def("look_into", &look_into, "arrays"_a, "hidden"_a);

  nb::class_<Planes>(m, "Planes")
      .def(
          "__init__",
          [](Planes* self, const std::vector<std::tuple<uint64_t, uint64_t>>& planes, uint64_t rows,
             uint64_t row_bytes, std::optional<int> device, uintptr_t stream, nb::object owners) {
            new (self)
                Planes(*make_planes(planes, rows, row_bytes, device, stream, std::move(owners)));
          },
          "planes"_a, "rows"_a, "row_bytes"_a, "device"_a.none(), "stream"_a, "owners"_a.none())
      .def("__len__", [](const Planes& p) { return p.planes.size(); })
      .def_prop_ro("places",
                   [](const Planes& p) {
                     nb::list places;
                     for (const GatherPlane& plane : p.planes) {
                       places.append(nb::make_tuple(plane.address, plane.stride_bytes));
                     }
                     return places;
                   })
      .def_ro("rows", &Planes::rows)
      .def_ro("row_bytes", &Planes::row_bytes)
      .def_prop_ro("device",
                   [](const Planes& p) -> std::optional<int> {
                     if (p.device == kHostMemory) return std::nullopt;
                     return p.device;
                   })
      .def_prop_rw(
          "stream", [](const Planes& p) { return reinterpret_cast<uintptr_t>(p.stream); },
          [](Planes& p, uintptr_t stream) { p.stream = as_stream(stream); });
}

}  // namespace hst
