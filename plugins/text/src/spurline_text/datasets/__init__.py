"""files, folders and the hub -> rows."""
