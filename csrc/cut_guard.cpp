#include "cut_guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>

namespace hst {

static const uintptr_t kPage = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
static constexpr uintptr_t kNowhere = UINTPTR_MAX;

// Found by the handler without a lock, so they are never freed, only used again.
struct Watched {
  std::atomic<uintptr_t> begin{kNowhere};
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> cut{false};
  Watched* next = nullptr;
};

static std::mutex changing;
static std::atomic<Watched*> all{nullptr};
static struct sigaction before{};
// Whether a fault was handed to `before`. Should it come back, that handler has ours behind it.
static std::atomic<bool> handed_on{false};

static bool put_memory_at(uintptr_t at) {
  for (Watched* w = all.load(std::memory_order_acquire); w; w = w->next) {
    const uintptr_t begin = w->begin.load(std::memory_order_acquire);
    const uintptr_t end = w->end.load(std::memory_order_acquire);
    // Again: another thread may use the entry anew, for a mapping elsewhere.
    if (at < begin || at >= end || begin != w->begin.load(std::memory_order_acquire)) continue;
    w->cut.store(true, std::memory_order_release);  // first: who reads the new memory must see it
    const uintptr_t page = at & ~(kPage - 1);
    // To the mapping's end: what lies behind the end of the file is gone as well.
    return ::mmap(reinterpret_cast<void*>(page), end - page, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
  }
  return false;
}

static void on_sigbus(int number, siginfo_t* info, void*) {
  const int code = errno;
  if (info->si_code != BUS_ADRERR || !put_memory_at(reinterpret_cast<uintptr_t>(info->si_addr))) {
    if (handed_on.exchange(true)) {
      ::signal(SIGBUS, SIG_DFL);
    } else {
      ::sigaction(SIGBUS, &before, nullptr);
    }
    if (info->si_code <= 0) ::raise(number);  // it was sent; a fault comes again by itself
  }
  errno = code;
}

static void install() {
  struct sigaction now{};
  if (::sigaction(SIGBUS, nullptr, &now) != 0 || now.sa_sigaction == on_sigbus) return;
  before = now;
  handed_on.store(false);
  struct sigaction ours{};
  ours.sa_sigaction = on_sigbus;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&ours.sa_mask);
  ::sigaction(SIGBUS, &ours, nullptr);
}

static Watched* watch(uintptr_t begin, uint64_t bytes) {
  std::lock_guard<std::mutex> hold(changing);
  install();
  Watched* w = all.load(std::memory_order_relaxed);
  while (w && w->begin.load(std::memory_order_relaxed) != kNowhere) w = w->next;
  if (!w) {
    w = new Watched;
    w->next = all.load(std::memory_order_relaxed);
    all.store(w, std::memory_order_release);
  }
  w->cut.store(false, std::memory_order_relaxed);
  w->end.store(begin + bytes, std::memory_order_release);
  w->begin.store(begin, std::memory_order_release);
  return w;
}

CutGuard::CutGuard(uint8_t* base, uint64_t bytes)
    : watched_(watch(reinterpret_cast<uintptr_t>(base), bytes)) {}

CutGuard::~CutGuard() {
  std::lock_guard<std::mutex> hold(changing);
  watched_->begin.store(kNowhere, std::memory_order_release);
}

void CutGuard::note_cut() { watched_->cut.store(true, std::memory_order_release); }

bool CutGuard::cut() const { return watched_->cut.load(std::memory_order_acquire); }

}  // namespace hst
