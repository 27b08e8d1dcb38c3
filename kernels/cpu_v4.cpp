// The loops for processors with AVX-512.
#include "cpu_table.h"
#ifdef CPD_HAS_X86_CLONES
#pragma GCC target("arch=x86-64-v4")
#define CPD_REGISTER 64  // bytes; g++ before 13 sets no macros by the pragma
#define CPD_TABLE cpd_loops_v4
#define CPD_TABLE_NAME "x86-64-v4"
#include "cpu_loops.h"
#endif
