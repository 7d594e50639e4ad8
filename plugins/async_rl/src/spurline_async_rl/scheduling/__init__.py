"""Which group may start, and which batch may be trained: a pure state machine without clocks, threads or I/O."""
