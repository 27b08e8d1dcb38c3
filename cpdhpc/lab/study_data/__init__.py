"""What studies and their files consist of, as plain data: cases, study files, statistics."""
