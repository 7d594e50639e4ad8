"""Decide which group may start and which batch may be trained, without clocks, threads or I/O."""
