#include <nanobind/nanobind.h>

NB_MODULE(_ffi, module) { module.attr("ABI") = 1; }
