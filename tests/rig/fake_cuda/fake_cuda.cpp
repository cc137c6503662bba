// A CUDA driver without a GPU, for tests of what is built on one: device memory is host memory, a
// stream is a thread that does what it is given in order, and everything is late at random.
//
// FAKE_CUDA_DELAY_US   longest random delay before each piece of work (default 200)
// FAKE_CUDA_FAIL       "cuEventRecord:3:719": the third call of it fails with error 719, and from
//                      then on every call does
// FAKE_CUDA_LOG        file that host registrations and their ends are written to
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#define API extern "C" __attribute__((visibility("default"))) int

using Ptr = unsigned long long;

static int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

static void delay() {
  static const int longest = number("FAKE_CUDA_DELAY_US", 200);
  thread_local std::minstd_rand random(std::hash<std::thread::id>()(std::this_thread::get_id()));
  if (longest) std::this_thread::sleep_for(std::chrono::microseconds(random() % (longest + 1)));
}

// 0, or the error that this call is to fail with.
static int fault(const char* call) {
  static std::mutex mutex;
  static std::map<std::string, int> calls;
  static int broken = 0;
  static const char* const plan = std::getenv("FAKE_CUDA_FAIL");
  if (!plan) return 0;
  std::lock_guard<std::mutex> hold(mutex);
  char name[64];
  int nth = 0, error = 0;
  std::sscanf(plan, "%63[^:]:%d:%d", name, &nth, &error);
  if (!broken && call == std::string(name) && ++calls[call] == nth) broken = error;
  return broken;
}
#define MAY_FAIL \
  if (const int error = fault(__func__)) return error

static void note(const char* what, void* address) {
  if (const char* path = std::getenv("FAKE_CUDA_LOG")) {
    std::FILE* file = std::fopen(path, "a");
    std::fprintf(file, "%s %p\n", what, address);
    std::fclose(file);
  }
}

struct Stream {
  std::mutex mutex;
  std::condition_variable some;
  std::deque<std::function<void()>> work;
  Stream() {
    std::thread([this] {
      for (;;) {
        std::unique_lock<std::mutex> hold(mutex);
        some.wait(hold, [this] { return !work.empty(); });
        auto next = std::move(work.front());
        work.pop_front();
        hold.unlock();
        delay();
        next();
      }
    }).detach();
  }
  void add(std::function<void()> f) {
    std::lock_guard<std::mutex> hold(mutex);
    work.push_back(std::move(f));
    some.notify_one();
  }
};

struct Event {
  std::mutex mutex;
  std::condition_variable done;
  uint64_t recorded = 0, reached = 0;
};

static Stream& of(void* handle) {
  static Stream* const default_stream = new Stream;
  return handle ? *static_cast<Stream*>(handle) : *default_stream;
}

static int context_object;
static thread_local int depth = 0;

API cuInit(unsigned) { return 0; }
API cuGetErrorName(int error, const char** name) {
  *name = error == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
                                                                 : "CUDA_ERROR_OTHER";
  return 0;
}
API cuGetErrorString(int, const char** text) {
  *text = "made up";
  return 0;
}
API cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
API cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
API cuDeviceGetAttribute(int* value, int, int) {
  *value = 2;
  return 0;
}
API cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &context_object;
  return 0;
}
API cuDevicePrimaryCtxRelease_v2(int) { return 0; }
API cuCtxGetCurrent(void** context) {
  *context = depth ? &context_object : nullptr;
  return 0;
}
API cuCtxPushCurrent_v2(void*) {
  ++depth;
  return 0;
}
API cuCtxPopCurrent_v2(void**) {
  --depth;
  return 0;
}
API cuPointerGetAttribute(void* value, int, Ptr) {
  *static_cast<int*>(value) = 0;
  return 0;
}
API cuMemHostRegister_v2(void* p, size_t, unsigned) {
  MAY_FAIL;
  note("register", p);
  return 0;
}
API cuMemHostUnregister(void* p) {
  note("unregister", p);
  return 0;
}
API cuMemHostGetDevicePointer_v2(Ptr* device, void* host, unsigned) {
  *device = reinterpret_cast<Ptr>(host);
  return 0;
}
API cuMemAlloc_v2(Ptr* p, size_t bytes) {
  MAY_FAIL;
  *p = reinterpret_cast<Ptr>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return *p ? 0 : 2;
}
API cuMemFree_v2(Ptr p) {
  std::free(reinterpret_cast<void*>(p));
  return 0;
}
API cuMemcpyDtoHAsync_v2(void* to, Ptr from, size_t bytes, void* stream) {
  MAY_FAIL;
  of(stream).add([=] { std::memcpy(to, reinterpret_cast<void*>(from), bytes); });
  return 0;
}
struct Copy2D {
  size_t src_x, src_y;
  unsigned src_type;
  const void* src_host;
  Ptr src_device;
  void* src_array;
  size_t src_pitch, dst_x, dst_y;
  unsigned dst_type;
  void* dst_host;
  Ptr dst_device;
  void* dst_array;
  size_t dst_pitch, width, height;
};
API cuMemcpy2DAsync_v2(const Copy2D* copy, void* stream) {
  MAY_FAIL;
  const Copy2D c = *copy;
  if (c.width > c.src_pitch || c.width > c.dst_pitch) return 1;
  of(stream).add([c] {
    const char* from = c.src_type == 1 ? static_cast<const char*>(c.src_host)
                                       : reinterpret_cast<const char*>(c.src_device);
    char* to = c.dst_type == 1 ? static_cast<char*>(c.dst_host)
                               : reinterpret_cast<char*>(c.dst_device);
    for (size_t row = 0; row < c.height; ++row) {
      std::memcpy(to + row * c.dst_pitch, from + row * c.src_pitch, c.width);
    }
  });
  return 0;
}
API cuStreamWriteValue32_v2(void* stream, Ptr p, uint32_t value, unsigned) {
  MAY_FAIL;
  of(stream).add([=] {
    __atomic_store_n(reinterpret_cast<uint32_t*>(p), value, __ATOMIC_RELEASE);
  });
  return 0;
}
API cuStreamCreate(void** stream, unsigned) {
  *stream = new Stream;
  return 0;
}
API cuStreamDestroy_v2(void*) { return 0; }
API cuEventCreate(void** event, unsigned) {
  *event = new Event;
  return 0;
}
API cuEventDestroy_v2(void*) { return 0; }
API cuEventRecord(void* event, void* stream) {
  MAY_FAIL;
  Event* e = static_cast<Event*>(event);
  std::lock_guard<std::mutex> hold(e->mutex);
  const uint64_t mine = ++e->recorded;
  of(stream).add([=] {
    std::lock_guard<std::mutex> hold(e->mutex);
    if (mine > e->reached) e->reached = mine;
    e->done.notify_all();
  });
  return 0;
}
API cuEventQuery(void* event) {
  MAY_FAIL;
  Event* e = static_cast<Event*>(event);
  std::lock_guard<std::mutex> hold(e->mutex);
  return e->reached >= e->recorded ? 0 : 600;
}
API cuStreamWaitEvent(void* stream, void* event, unsigned) {
  MAY_FAIL;
  Event* e = static_cast<Event*>(event);
  std::lock_guard<std::mutex> hold(e->mutex);
  const uint64_t until = e->recorded;
  of(stream).add([=] {
    std::unique_lock<std::mutex> hold(e->mutex);
    e->done.wait(hold, [=] { return e->reached >= until; });
  });
  return 0;
}
API cuModuleLoadData(void**, const void*) { return 209; }
API cuModuleUnload(void*) { return 0; }
API cuModuleGetFunction(void**, void*, const char*) { return 209; }
API cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void*, void**, void**) {
  return 209;
}
// For tests: the stream does nothing more until *flag is not zero.
API fakeStreamHold(void* stream, const int* flag) {
  of(stream).add([=] {
    while (!__atomic_load_n(flag, __ATOMIC_ACQUIRE)) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  });
  return 0;
}
// For tests: whether all that was given to a stream is done.
API fakeStreamIdle(void* stream) {
  Event e;
  cuEventRecord(&e, stream);
  std::unique_lock<std::mutex> hold(e.mutex);
  e.done.wait(hold, [&] { return e.reached == e.recorded; });
  return 0;
}
