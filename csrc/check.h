// Faults: what went wrong, as values that bindings.cpp turns into the classes of
// hstransport.errors.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace hst {

enum class Fault { kConfig, kRing, kLayout, kCorrupt, kBusy, kLease, kCuda };

class Error : public std::runtime_error {
 public:
  Error(Fault fault, const std::string& message) : std::runtime_error(message), fault(fault) {}
  const Fault fault;
};

// Becomes OSError, and with it FileNotFoundError, FileExistsError, PermissionError…
class OsError : public std::runtime_error {
 public:
  OsError(int code, const std::string& message, std::string path)
      : std::runtime_error(message), code(code), path(std::move(path)) {}
  const int code;
  const std::string path;
};

// Not by a stream: those need libstdc++'s locale objects, of which a process that loads several
// copies of libstdc++ may have broken ones.
inline void append(std::string& out, const std::string& part) { out += part; }
template <class T>
void append(std::string& out, T part) {
  if constexpr (std::is_convertible_v<T, const char*>) {
    out += part;
  } else {  // numbers and enumerators
    out += std::to_string(part);
  }
}

template <class... Args>
std::string cat(const Args&... parts) {
  std::string out;
  (append(out, parts), ...);
  return out;
}

inline std::string hex(const char* bytes, int count) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (int i = 0; i < count; ++i) {
    const auto byte = static_cast<unsigned char>(bytes[i]);
    out += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return out;
}

// `check(ok, fault, parts…)`: the message is only built when it is needed.
template <class... Args>
inline void check(bool ok, Fault fault, const Args&... parts) {
  if (__builtin_expect(!ok, 0)) throw Error(fault, cat(parts...));
}

}  // namespace hst
