// For wheels: `make wheel` has every file begin with it (-include), other builds have nothing of it. The extension then
// asks for symbols of glibc 2.28 and of GCC 8's libstdc++ alone, though it was built with GCC 12 and glibc 2.36. What a
// newer compiler asks for besides is named by auditwheel, and belongs here or into the file beside.
#pragma once

#define OFFLOAD_MANYLINUX_2_28

#include <bits/c++config.h>

// Timed waits are by the system's clock, as before glibc 2.30. They look at the steady one when they end, so that a clock
// set forward ends none too early.
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT

// The same functions in their first versions. Those of exp and log also look how errors are to be reported.
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver pthread_once,pthread_once@GLIBC_2.2.5");
