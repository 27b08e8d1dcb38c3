"""The laboratory, run by python -m cpdhpc: jobs, studies, reports, benchmarks.

It imports the library; the library imports nothing of it.
"""
