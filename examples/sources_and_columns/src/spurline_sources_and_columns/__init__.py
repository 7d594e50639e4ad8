"""A source of its own, a decorated source, and components that read a column of the data."""
