// What keeps a process alive when another one truncates a file that it has mapped.
#pragma once

#include <cstdint>

namespace hst {

struct Watched;

// To touch a mapping past the end of its file is a SIGBUS, and any process of the same user can
// move that end. Nothing prevents it: only a memfd can be sealed, and a ring needs a name that
// outlives its server. So a handler of SIGBUS puts empty memory in place of what is gone of this
// mapping, and cut() says so from then on: bytes that were read before cut() was false are the
// file's.
//
// Faults elsewhere go to the handler that was there before. One that is installed later takes
// precedence until the next guard is made.
class CutGuard {
 public:
  CutGuard(uint8_t* base, uint64_t bytes);
  ~CutGuard();
  CutGuard(const CutGuard&) = delete;
  CutGuard& operator=(const CutGuard&) = delete;

  bool cut() const;
  // For one who has seen that the file is too short, and met no fault: of the page in which it
  // ends now the rest is zeros.
  void note_cut();

 private:
  Watched* const watched_;
};

}  // namespace hst
