// Faults: what went wrong, as values that bindings.cpp turns into the classes of
// hstransport.errors.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

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

template <class... Args>
std::string cat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
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
