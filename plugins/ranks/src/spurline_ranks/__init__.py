"""Ranks: processes that train one model together, on this machine or on a Ray cluster."""
