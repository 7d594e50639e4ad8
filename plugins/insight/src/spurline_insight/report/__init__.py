"""Turn a run directory into one HTML page with plots. Imports no torch."""
