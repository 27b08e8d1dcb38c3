"""Array operations: one set of functions, three implementations (reference, cpu, gpu)."""
