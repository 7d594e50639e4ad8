"""Datasets: files, folders and the hub become rows."""
