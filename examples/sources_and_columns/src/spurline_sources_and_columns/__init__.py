"""A new source, a source that decorates another source, and components that read a column of the data."""
