// The loops for any processor.
#define CPD_TABLE cpd_loops_portable
#define CPD_TABLE_NAME "portable"
#include "cpu_loops.h"
