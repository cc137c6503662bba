#pragma once

#include <nanobind/nanobind.h>

namespace hst {

void bind_ring(nanobind::module_& m);
void bind_codec(nanobind::module_& m);
void bind_copier(nanobind::module_& m);
void bind_gate(nanobind::module_& m);

}  // namespace hst
