#include "cuda_driver.h"

#include <dlfcn.h>

#include <mutex>
#include <string>

#include "check.h"

namespace hst::cuda {

static std::mutex loading;
static Driver loaded;
static bool ready = false;

static void load() {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  check(library != nullptr, Fault::kCuda,
        "no CUDA driver on this machine (libcuda.so.1: ", library ? "" : ::dlerror(),
        "): install NVIDIA's driver, or in a container run it with --gpus");
  Driver d;
#define HST_CUDA_LOAD(field, symbol, signature)                              \
  d.field = reinterpret_cast<Result(*) signature>(::dlsym(library, symbol)); \
  check(d.field != nullptr, Fault::kCuda, "the CUDA driver has no ", symbol, \
        ": it is older than CUDA 11.7, update it");
  HST_CUDA_FUNCTIONS(HST_CUDA_LOAD)
#undef HST_CUDA_LOAD
  loaded = d;
  check_call(d.init(0), "cuInit");
}

const Driver& driver() {
  if (__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) return loaded;
  std::lock_guard<std::mutex> hold(loading);
  if (!ready) {
    load();
    __atomic_store_n(&ready, true, __ATOMIC_RELEASE);
  }
  return loaded;
}

void check_call(Result result, const char* call) {
  if (__builtin_expect(result == 0, 1)) return;
  const char* name = nullptr;
  const char* text = nullptr;
  loaded.error_name(result, &name);
  loaded.error_text(result, &text);
  throw Error(Fault::kCuda, cat(call, ": ", name ? name : "unknown error", " (", result,
                                "): ", text ? text : "the driver has no text for it"));
}

int device_of(DevicePtr address) {
  int ordinal = 0;
  check_call(driver().pointer_attribute(&ordinal, kPointerDeviceOrdinal, address),
             "cuPointerGetAttribute");
  return ordinal;
}

ContextScope::ContextScope(Context context) {
  const Driver& d = driver();
  Context current = nullptr;
  check_call(d.context_get(&current), "cuCtxGetCurrent");
  if (current == context) return;
  check_call(d.context_push(context), "cuCtxPushCurrent");
  pushed_ = true;
}

ContextScope::~ContextScope() {
  Context popped = nullptr;
  if (pushed_) loaded.context_pop(&popped);
}

Device::Device(int ordinal) : ordinal(ordinal) {
  const Driver& d = driver();
  int count = 0;
  check_call(d.device_count(&count), "cuDeviceGetCount");
  check(ordinal >= 0 && ordinal < count, Fault::kConfig, "device=", ordinal, ": there are ", count,
        " CUDA devices");
  check_call(d.device_get(&handle_, ordinal), "cuDeviceGet");
  check_call(d.primary_retain(&context_, handle_), "cuDevicePrimaryCtxRetain");
}

Device::~Device() { loaded.primary_release(handle_); }

int Device::attribute(int which) const {
  int value = 0;
  check_call(driver().device_attribute(&value, which, handle_), "cuDeviceGetAttribute");
  return value;
}

}  // namespace hst::cuda
