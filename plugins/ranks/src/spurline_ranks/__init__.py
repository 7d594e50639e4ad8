"""Processes that work for this one."""
