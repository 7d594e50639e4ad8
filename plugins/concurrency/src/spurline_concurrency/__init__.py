"""Call functions that may hang, fail or die: tasks and threads with time limits, child processes, killable workers."""
