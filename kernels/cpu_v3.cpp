// The loops for processors with AVX2.
#include "cpu_table.h"
#ifdef CPD_HAS_X86_CLONES
#pragma GCC target("arch=x86-64-v3")
#define CPD_REGISTER 32  // bytes; g++ before 13 sets no macros by the pragma
#define CPD_TABLE cpd_loops_v3
#define CPD_TABLE_NAME "x86-64-v3"
#include "cpu_loops.h"
#endif
