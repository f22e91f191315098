"""Measure honestly: load drivers, statistics, the archive of runs, tuning, quality."""
