"""Rows: arrays of samples, larger than the device or than memory, read by blocks of rows in any order."""
