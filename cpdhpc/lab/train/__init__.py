"""Training jobs on many ranks; job files are checked without importing torch."""
