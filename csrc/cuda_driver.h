// The CUDA driver, loaded when it is first needed: the module is built without a toolkit and
// imported on machines without a driver. Types and values as in the driver API's reference manual.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hst::cuda {

using Result = int;
using DevicePtr = unsigned long long;
using Context = struct ContextRecord*;
using Stream = struct StreamRecord*;
using Event = struct EventRecord*;
using Module = struct ModuleRecord*;
using Function = struct FunctionRecord*;

inline constexpr Result kNotReady = 600;
inline constexpr unsigned kHostRegisterPortable = 1, kHostRegisterDeviceMap = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kMemoryHost = 1, kMemoryDevice = 2;
inline constexpr int kMultiprocessorCount = 16;
inline constexpr int kPointerDeviceOrdinal = 9;

struct Memcpy2D {
  size_t src_x, src_y;
  unsigned src_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  size_t src_pitch;
  size_t dst_x, dst_y;
  unsigned dst_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  size_t dst_pitch;
  size_t width, height;
};

// X(field, symbol, signature)
#define HST_CUDA_FUNCTIONS(X)                                                                \
  X(init, "cuInit", (unsigned))                                                              \
  X(error_name, "cuGetErrorName", (Result, const char**))                                    \
  X(error_text, "cuGetErrorString", (Result, const char**))                                  \
  X(device_count, "cuDeviceGetCount", (int*))                                                \
  X(device_get, "cuDeviceGet", (int*, int))                                                  \
  X(device_attribute, "cuDeviceGetAttribute", (int*, int, int))                              \
  X(primary_retain, "cuDevicePrimaryCtxRetain", (Context*, int))                             \
  X(primary_release, "cuDevicePrimaryCtxRelease_v2", (int))                                  \
  X(context_get, "cuCtxGetCurrent", (Context*))                                              \
  X(context_push, "cuCtxPushCurrent_v2", (Context))                                          \
  X(context_pop, "cuCtxPopCurrent_v2", (Context*))                                           \
  X(pointer_attribute, "cuPointerGetAttribute", (void*, int, DevicePtr))                     \
  X(host_register, "cuMemHostRegister_v2", (void*, size_t, unsigned))                        \
  X(host_unregister, "cuMemHostUnregister", (void*))                                         \
  X(host_device_ptr, "cuMemHostGetDevicePointer_v2", (DevicePtr*, void*, unsigned))          \
  X(mem_alloc, "cuMemAlloc_v2", (DevicePtr*, size_t))                                        \
  X(mem_free, "cuMemFree_v2", (DevicePtr))                                                   \
  X(memcpy_2d, "cuMemcpy2DAsync_v2", (const Memcpy2D*, Stream))                              \
  X(memcpy_d2h, "cuMemcpyDtoHAsync_v2", (void*, DevicePtr, size_t, Stream))                  \
  X(write_value, "cuStreamWriteValue32_v2", (Stream, DevicePtr, uint32_t, unsigned))         \
  X(stream_create, "cuStreamCreate", (Stream*, unsigned))                                    \
  X(stream_destroy, "cuStreamDestroy_v2", (Stream))                                          \
  X(stream_wait, "cuStreamWaitEvent", (Stream, Event, unsigned))                             \
  X(event_create, "cuEventCreate", (Event*, unsigned))                                       \
  X(event_destroy, "cuEventDestroy_v2", (Event))                                             \
  X(event_record, "cuEventRecord", (Event, Stream))                                          \
  X(event_query, "cuEventQuery", (Event))                                                    \
  X(module_load, "cuModuleLoadData", (Module*, const void*))                                 \
  X(module_unload, "cuModuleUnload", (Module))                                               \
  X(module_function, "cuModuleGetFunction", (Function*, Module, const char*))                \
  X(launch, "cuLaunchKernel",                                                                \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, \
     void**, void**))

struct Driver {
#define HST_CUDA_FIELD(field, symbol, signature) Result(*field) signature = nullptr;
  HST_CUDA_FUNCTIONS(HST_CUDA_FIELD)
#undef HST_CUDA_FIELD
};

// The driver, initialised. Throws Fault::kCuda that says what is missing; tries again next time.
const Driver& driver();

// Throws Fault::kCuda with the call's and the error's names.
void check_call(Result result, const char* call);

// The device that memory lies on, or was registered with.
int device_of(DevicePtr address);

// Makes a device's primary context, the one that PyTorch and CuPy use, current for a scope.
class ContextScope {
 public:
  explicit ContextScope(Context context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  bool pushed_ = false;
};

// A device's primary context, retained. Everything below lives in it.
class Device {
 public:
  explicit Device(int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const int ordinal;
  Context context() const { return context_; }
  int attribute(int which) const;

 private:
  int handle_ = 0;
  Context context_ = nullptr;
};

}  // namespace hst::cuda
